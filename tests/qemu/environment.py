"""Prints the files of this Python, of what dovetail requires, and of the libraries that they load,
a line each and below /, which an image needs to run dovetail. Run by the environment's Python."""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distribution
from os.path import normpath
from pathlib import Path

UNUSED = re.compile(
    r"/(test|idlelib|tkinter|lib2to3|ensurepip|config-[^/]*)/|/torch/(include|bin/(?!torch_shm))"
    r"|\.pyi$|\.opt-.\.pyc$"
)


def standard_library() -> Iterator[Path]:
    for path in Path(sysconfig.get_path("stdlib")).rglob("*"):
        if path.is_file() and "site-packages" not in path.parts:
            yield path


def required(name: str, seen: set[str]) -> Iterator[Path]:
    """The files of what a distribution requires, and of what that requires."""
    for line in distribution(name).requires or ():
        wanted = re.split(r"[^\w.-]", line)[0]
        if "extra ==" in line or wanted in seen:
            continue
        seen.add(wanted)
        try:
            files = distribution(wanted).files or ()
        except ModuleNotFoundError:  # of another system
            continue
        yield from (Path(file.locate()) for file in files)
        yield from required(wanted, seen)


def libraries(paths: set[Path]) -> Iterator[Path]:
    """The libraries of the system that these load."""
    loading = [str(path) for path in paths if ".so" in path.name]
    found = subprocess.run(["ldd", sys.executable, *loading], capture_output=True, text=True).stdout
    for place in re.findall(r"(?:=> |^\t)(/\S+)", found, re.MULTILINE):
        yield Path(place)


if __name__ == "__main__":
    native = Path(sys.argv[1])
    paths = {*standard_library(), *required("dovetail", set())}
    paths = {path for path in paths if not UNUSED.search(str(path))}
    paths |= {*libraries({*paths, native}), Path(sys.executable), Path(sys.executable).resolve()}
    paths.add(Path(sys.prefix, "pyvenv.cfg"))
    print(*sorted({normpath(path).lstrip("/") for path in paths if path.is_file()}), sep="\n")
