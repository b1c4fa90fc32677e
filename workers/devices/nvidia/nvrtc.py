"""NVRTC, NVIDIA's CUDA C++ compiler, by ctypes: it comes with torch for CUDA and needs no GPU."""

import importlib.util
from collections.abc import Iterator
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

OPTIONS = ("--std=c++17", "--fmad=false")
"""Products are fused only explicitly: the bytes of a result must not depend on the compiler."""
MAJORS = (12, 13)  # the versions of CUDA that torch comes with
SUCCESS = 0


@dataclass(frozen=True)
class Compiler:
    """One NVRTC."""

    library: CDLL
    version: tuple[int, int]
    architectures: tuple[int, ...]  # the compute capabilities that it compiles for, times ten

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}"

    def compile(self, source: str, architecture: int, *options: str) -> bytes | str:
        """Return machine code for a compute capability, such as 86; or the compiler's errors."""
        if architecture not in self.architectures:
            return f"{self} has no code for compute capability {architecture / 10:.1f}"
        program = c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(byref(program), source.encode(), b"", 0, None, None)
        )
        try:
            given = [f"--gpu-architecture=sm_{architecture}", *OPTIONS, *options]
            array = (c_char_p * len(given))(*(option.encode() for option in given))
            if self.library.nvrtcCompileProgram(program, len(given), array) != SUCCESS:
                said = self._get("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                return f"{self} cannot compile dovetail's functions for sm_{architecture}: {said}"
            return self._get("CUBIN", program)
        finally:
            self.library.nvrtcDestroyProgram(byref(program))

    def _get(self, what: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, byref(size)))
        found = create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, found))
        return found.raw

    def _check(self, result: int) -> None:
        if result != SUCCESS:
            raise RuntimeError(f"{self}: error {result}")


@cache
def find(cuda: str) -> Compiler | str:
    """Return the compiler of a version of CUDA (empty: any), else another one; or why there is
    none."""
    wanted = int(cuda.partition(".")[0]) if cuda else None
    found = [compiler for name in _names() if (compiler := _open(name)) is not None]
    if not found:
        return (
            "there is no NVRTC, the compiler that torch for CUDA brings along: pip install "
            f"nvidia-cuda-nvrtc{'' if wanted == MAJORS[-1] else '-cu12'}"
        )
    return next((one for one in found if one.version[0] == wanted), found[0])


def _names() -> Iterator[str]:
    """Yield where the library may be: in NVIDIA's packages, in torch, on the system."""
    nvidia, torch = (importlib.util.find_spec(name) for name in ("nvidia", "torch"))
    for place in (nvidia and nvidia.submodule_search_locations) or ():
        yield from map(str, sorted(Path(place).glob("*/lib/libnvrtc.so.*")))
    for place in (torch and torch.submodule_search_locations) or ():
        found = Path(place).glob("lib/libnvrtc*.so*")
        yield from sorted(str(path) for path in found if "builtins" not in path.name)
    for major in MAJORS:
        yield f"libnvrtc.so.{major}"
    if (name := find_library("nvrtc")) is not None:
        yield name


def _open(name: str) -> Compiler | None:
    if ".alt." in name:
        return None
    try:
        library = CDLL(name)
        major, minor, count = c_int(), c_int(), c_int()
        asked: list[Any] = [library.nvrtcVersion(byref(major), byref(minor))]
        asked.append(library.nvrtcGetNumSupportedArchs(byref(count)))
        architectures = (c_int * count.value)()
        asked.append(library.nvrtcGetSupportedArchs(architectures))
    except (OSError, AttributeError):
        return None
    if any(result != SUCCESS for result in asked):
        return None
    return Compiler(library, (major.value, minor.value), tuple(architectures))
