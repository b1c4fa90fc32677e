"""Builds the C++ kernels by hand: `python -m dovetail.workers.kernels.build`.

For a checkout that was not installed, and for an installation that had no compiler at the time; pip
builds the same sources with the same flags as an optional extension (pyproject.toml)."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dovetail.workers.kernels import LIBRARY

FOLDER = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)
"""No fast-math, and products are fused only explicitly: the bytes of a result must not depend on
the compiler."""


def sources() -> list[Path]:
    """Return the files to compile; their headers are in the same folder."""
    return sorted((FOLDER / "native").glob("*.cpp"))


def compiler() -> list[str]:
    """Return the C++ compiler and its arguments: $CXX, else $CC, which may be a C compiler, else
    the first of g++, c++ and clang++; empty if there is none."""
    if named := os.environ.get("CXX") or os.environ.get("CC"):
        return shlex.split(named)
    return [*filter(None, map(shutil.which, ("g++", "c++", "clang++")))][:1]


def build() -> Path:
    """Compile the kernels and install the library atomically; raise the compiler's error if it
    fails."""
    program = compiler()
    if not program:
        raise FileNotFoundError("no C++ compiler: install g++ or set CXX")
    if shutil.which(program[0]) is None:
        raise FileNotFoundError(
            f"CXX or CC names {program[0]}, which does not exist: correct or unset it"
        )
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Path(folder) / LIBRARY.name
        subprocess.run(
            [*program, *FLAGS, "-fPIC", "-shared", *sources(), "-o", made, "-lstdc++"], check=True
        )
        return made.replace(LIBRARY)


if __name__ == "__main__":
    try:
        print(build())
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
