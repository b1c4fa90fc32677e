"""The command `build-llama`: llama.cpp's programs, built from the sources that the package
llama-cpp-python brings, for this machine's CPU."""

import subprocess
import sys
import tarfile
from pathlib import Path

import click

from benchmarks.options import Command
from dovetail.protocol.errors import UserError

VERSION = "0.3.36"
"""The release of llama-cpp-python whose llama.cpp is compared with here."""
PROGRAMS = ("llama-server", "llama-bench", "llama-quantize")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


@click.command(cls=Command)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder for it.")
@click.option("--version", default=VERSION, show_default=True, help="Version of llama-cpp-python.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True)
def build_llama(out: Path, version: str, jobs: int) -> None:
    """Download llama-cpp-python's sources by pip and build llama-server, llama-bench and
    llama-quantize with cmake, a C++ compiler and what else llama.cpp needs; print where they
    are."""
    out = out.expanduser().resolve()
    out.mkdir(parents=True, exist_ok=True)
    package = f"llama-cpp-python=={version}"
    kinds = ["--no-deps", "--no-binary", "llama-cpp-python"]
    _run([sys.executable, "-m", "pip", "download", *kinds, "-d", str(out), package])
    archive = next(out.glob(f"llama_cpp_python-{version}.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    sources = out / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    build = out / "build"
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    _run(["cmake", "-S", str(sources), "-B", str(build), *options])
    _run(["cmake", "--build", str(build), "-j", str(jobs), "--target", *PROGRAMS])
    for program in PROGRAMS:
        click.echo(build / "bin" / program)


def _run(command: list[str]) -> None:
    try:
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except FileNotFoundError:
        raise UserError(f"there is no {command[0]} here: install it") from None
    if code:
        raise UserError(f"{' '.join(command)} ended with exit code {code}")
