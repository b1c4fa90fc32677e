"""The wheels that `.ci/wheels` builds."""

import json
import os
import platform
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD_S = 3600.0  # compiling the kernels takes minutes of CPU time
CROSS = "aarch64-linux-gnu-g++"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_S)]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has pip and the package `wheel`."""
    folder = tmp_path_factory.mktemp("builder")
    venv.create(folder, with_pip=True)
    program = folder / "bin" / "python"
    subprocess.run([program, "-m", "pip", "install", "--quiet", "wheel"], check=True)
    return program


def built(builder: Path, out: Path, *arguments: str) -> Path:
    command = [builder, ROOT / ".ci" / "wheels", f"--out={out}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def test_a_wheel_is_installed_in_a_fresh_environment_and_decodes(
    builder: Path, tmp_path: Path
) -> None:
    """Its dependencies are those of this environment; its kernels are its own."""
    wheel = built(builder, tmp_path / "dist")
    start = "dovetail_llm-0.1.0-cp311-abi3-manylinux_2_"
    assert wheel.name.startswith(start), wheel.name
    assert wheel.name.endswith(f"_{platform.machine()}.whl")

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True)
    program = fresh / "bin" / "python"
    subprocess.run([program, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment = {**own, "XDG_CACHE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}

    def run(*command: object) -> str:
        done = subprocess.run(
            [*map(str, command)], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(
        program, "-c", "from dovetail.workers import kernels as k; print(k.why_not(), k.LIBRARY)"
    )
    assert where.split() == ["None", str(site / "dovetail/workers/kernels/_native.abi3.so")]
    assert run(fresh / "bin" / "dovetail", "--version") == "dovetail 0.1.0\n"
    told = run(
        *(fresh / "bin" / "dovetail", "generate", "Name five fruits."),
        *("--max-tokens", "8", "--json"),
    )
    assert json.loads(told)["completion_tokens"] == 8


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"needs {CROSS}")
def test_a_wheel_for_arm_is_built_by_a_cross_compiler(builder: Path, tmp_path: Path) -> None:
    wheel = built(builder, tmp_path, "--machine=aarch64")
    assert wheel.name.endswith("_aarch64.whl")


def test_a_wheel_without_kernels_is_refused(builder: Path, tmp_path: Path) -> None:
    command = [builder, ROOT / ".ci" / "wheels", f"--out={tmp_path}"]
    environment = {**os.environ, "CXX": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("has no kernels: the compiler failed")
    assert [*tmp_path.glob("*.whl")] == []
