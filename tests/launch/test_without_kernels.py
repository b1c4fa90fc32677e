"""An installation without C++ kernels or a compiler, as after a failed build: torch computes, and
what it cannot compute is refused before anything is read."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.launch.settings.models import DEMO_FOLDER
from support.gguf_files import tokens_of, write_gguf

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
BUILD = (sys.executable, "-P", "-m", "dovetail.workers.kernels.build")


@pytest.fixture
def bare(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment without the kernel library and without a compiler."""
    kernels = tmp_path / "bare" / "dovetail" / "workers" / "kernels"
    kernels.mkdir(parents=True)
    for made in (kernels, kernels.parent, kernels.parent.parent):
        for one in (ROOT / made.relative_to(tmp_path / "bare" / "dovetail")).iterdir():
            plain = one.name.isidentifier() or one.suffix == ".py"
            if plain and not (made / one.name).exists():
                (made / one.name).symlink_to(one)
    for name in ("CC", "CXX"):
        environment.pop(name, None)
    return {**environment, "PYTHONPATH": str(tmp_path / "bare"), "PATH": str(tmp_path / "none")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The embedded target as a GGUF file of blocks."""
    file = tmp_path / "model-Q8_0.gguf"
    target = DEMO_FOLDER / "target"
    write_gguf(target, file, lambda *_: Type.Q8_0, **tokens_of(target))
    return file


def test_a_gguf_file_is_decoded_by_torch_and_other_weights_are_refused(
    run: Run, bare: dict[str, str], file: Path
) -> None:
    ask = ("generate", "A star", "--target", str(file), "--max-tokens", "6", "--json")
    done = run(*ask, "--draft", "none", env=bare)
    assert done.returncode == 0, done.stderr
    assert "only by the C++ kernels, and the C++ kernels are not built" in done.stderr
    result = json.loads(done.stdout)
    assert result["completion_tokens"] == 6
    assert "by torch's own operations" in result["placement"]
    assert "/torch-" in result["fingerprint"]  # no target with the kernels goes on with its text

    done = run(*ask, "--draft", "none", "--weights", "int8", env=bare)
    assert done.returncode == 2
    assert "int8 weights need the C++ kernels, and the C++ kernels are not built" in done.stderr
    assert "loading" not in done.stderr


@pytest.mark.slow
def test_the_embedded_pair_is_served_and_the_start_says_what_computes(
    start: Callable[..., "subprocess.Popen[str]"], run: Run, bare: dict[str, str]
) -> None:
    server = start("serve", "--http.port", "0", more=bare)
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if "chat:" in line:
            break
    assert any("by torch's own operations" in line for line in said), said
    done = run("status", "--json", env=bare)
    target = next(one for one in json.loads(done.stdout)["workers"] if "target" in one["roles"])
    assert "the C++ kernels are not built" in target["placement"]


@pytest.mark.slow
def test_the_selftest_passes_and_the_doctor_says_what_is_lost(
    run: Run, bare: dict[str, str], file: Path
) -> None:
    few = ("--limit", "1", "--max-tokens", "10", "--text-tokens", "40")
    for target in ((), ("--target", str(file), "--draft", "substitute")):
        done = run("selftest", *few, *target, env=bare)
        assert done.returncode == 0, done.stderr
    assert "int8, int4 and file weights" in run("doctor", env=bare).stdout


def test_the_kernels_are_built_by_the_compiler_that_is_named(
    bare: dict[str, str], tmp_path: Path
) -> None:
    named, noted = tmp_path / "my compiler", tmp_path / "noted"
    lines = (
        "#!/bin/sh",
        f'echo "$@" > "{noted}"',
        'while [ "$1" != -o ]; do shift; done',
        ': > "$2"',
    )
    named.write_text("\n".join(lines))
    named.chmod(named.stat().st_mode | stat.S_IXUSR)

    def build(**compilers: str) -> "subprocess.CompletedProcess[str]":
        env = {**bare, **compilers}
        return subprocess.run(BUILD, env=env, capture_output=True, text=True)

    done = build(CXX=f"'{named}' --target=here", CC="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert noted.read_text().startswith("--target=here -std=c++17")
    assert Path(done.stdout.strip()).is_relative_to(bare["PYTHONPATH"])
    done = build(CC="no-such-compiler -m64")
    assert done.returncode == 1
    assert done.stderr == (
        "CXX or CC names no-such-compiler, which does not exist: correct or unset it\n"
    )
