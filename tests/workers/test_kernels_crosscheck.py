"""The kernels built for this machine and, by a cross compiler, for aarch64: the same digests from
every instruction set of both.

Needs g++, aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu,
qemu-user-static); a minute of compiling.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from dovetail.workers.kernels import build

SOURCE = Path(__file__).parent / "crosscheck" / "digests.cpp"
NATIVE = Path(build.__file__).parent / "native"
CROSS = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")

pytestmark = pytest.mark.slow


def compiled(compiler: str, program: Path, *options: str) -> Path:
    subprocess.run(
        [
            compiler,
            *build.FLAGS,
            *options,
            f"-I{NATIVE}",
            str(SOURCE),
            *map(str, build.sources()),
            "-o",
            str(program),
        ],
        check=True,
    )
    return program


def printed(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def digests(*program: str) -> dict[str, list[str]]:
    """Return what the program prints by the number of the instruction set."""
    return {isa: printed(*program, isa) for isa in printed(*program)}


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in CROSS), reason=f"needs {' and '.join(CROSS)}"
)
def test_every_instruction_set_of_two_architectures_computes_the_same_bytes(tmp_path: Path) -> None:
    (compiler,) = build.compiler()
    native = digests(str(compiled(compiler, tmp_path / "native")))
    foreign = digests(CROSS[1], str(compiled(CROSS[0], tmp_path / "foreign", "-static")))
    plain = native["0"]
    assert len(plain) > 100
    assert set(foreign) == {"0", "4"}
    for lines in (*native.values(), *foreign.values()):
        assert lines == plain
