"""Every instruction set of the kernels computes the same bytes, whatever machine it is on: those of
this one, those of older x86-64 machines under qemu, and NEON of a build for aarch64.

A program (`crosscheck/digests.cpp`) prints a digest of each result. The older machines need
qemu-user, aarch64 its compiler too (Debian: qemu-user-static, g++-aarch64-linux-gnu).
"""

import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from dovetail.workers.kernels import LIBRARY, Isa, build
from support.cases import everyday
from support.kernels import needs_kernels

SOURCE = Path(__file__).parent / "crosscheck" / "digests.cpp"
NATIVE = Path(build.__file__).parent / "native"
OLDER = {"Westmere": "SSE41", "IvyBridge": "AVX", "Haswell": "AVX2"}
"""What qemu calls an older machine, and the best instruction set of the kernels on it."""
CROSS = "aarch64-linux-gnu-g++"
QEMU_X86, QEMU_ARM = "qemu-x86_64-static", "qemu-aarch64-static"


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


needs_a_compiler = pytest.mark.skipif(not build.compiler(), reason="needs a C++ compiler")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")


def compiled(program: Path, compiler: Sequence[str], *others: str | Path) -> Path:
    command = [*compiler, *build.FLAGS, f"-I{NATIVE}", SOURCE, *others, "-o", program]
    subprocess.run(command, check=True)
    return program


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program over the kernels that are built for this machine."""
    return compiled(tmp_path_factory.mktemp("here") / "digests", build.compiler(), LIBRARY)


def printed(*command: str | Path) -> list[str]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def sets(*program: str | Path) -> list[Isa]:
    return [Isa(int(number)) for number in printed(*program)]


@cache
def expected(program: Path) -> list[str]:
    lines = printed(program, str(int(Isa.PLAIN)))
    assert len(lines) > 250
    return lines


@needs_kernels
@needs_a_compiler
def test_every_instruction_set_of_this_machine_computes_the_same_bytes(here: Path) -> None:
    for isa in sets(here):
        assert printed(here, str(int(isa))) == expected(here), isa.name


@on_x86
@needs_kernels
@needs_a_compiler
@needs(QEMU_X86)
@pytest.mark.parametrize("machine", everyday(OLDER, "Westmere"))
def test_an_older_machine_computes_the_same_bytes_by_the_best_set_that_it_has(
    machine: str, here: Path
) -> None:
    older = (QEMU_X86, "-cpu", machine, here)
    best = max(sets(*older))
    assert best.name == OLDER[machine]
    assert printed(*older, str(int(best))) == expected(here)


@needs(CROSS)
def test_what_differs_on_aarch64_compiles() -> None:
    files = [SOURCE, *(file for file in build.sources() if "aarch64" in file.read_text())]
    command = [CROSS, *build.FLAGS, f"-I{NATIVE}", "-fsyntax-only", *files]
    subprocess.run(command, check=True)


@pytest.mark.slow
@needs_kernels
@needs_a_compiler
@needs(CROSS, QEMU_ARM)
def test_aarch64_computes_the_same_bytes_by_each_of_its_sets(here: Path, tmp_path: Path) -> None:
    """With as little optimization as takes half a minute to compile: the bytes depend on none."""
    program = compiled(tmp_path / "digests", [CROSS], "-O1", "-static", *build.sources())
    assert sets(QEMU_ARM, program) == [Isa.PLAIN, Isa.NEON]
    for isa in (Isa.PLAIN, Isa.NEON):
        assert printed(QEMU_ARM, program, str(int(isa))) == expected(here), isa.name
