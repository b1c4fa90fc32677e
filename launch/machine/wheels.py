"""Which build of PyTorch has code for which GPU, and the driver that it needs: from RELEASE.md of
pytorch/pytorch (releases 2.8 to 2.13, x86-64) and its lists of ROCm and XPU wheels. Only builds for
CUDA 12.6 have code for Maxwell and Pascal, and from 2.11 for Volta."""

import re
from collections.abc import Sequence

Capability = tuple[int, int]

MAXWELL, TURING, BLACKWELL = (5, 0), (7, 5), (10, 0)
"""CUDA 12.6 builds: Maxwell to Hopper (9.0); 13.0: Turing on; Blackwell needs 13.0, or 12.8."""
RELEASES = {
    "cu126": ((2, 8), (2, 13)),
    "cu128": ((2, 8), (2, 11)),
    "cu130": ((2, 9), (2, 13)),
    "rocm6.4": ((2, 8), (2, 9)),
    "rocm7.1": ((2, 10), (2, 13)),
    "xpu": ((2, 8), (2, 13)),
}
"""Build -> the first and the last supported release for which it is published."""
LEAST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> least driver (NVIDIA, CUDA Compatibility, minor versions)."""
ROCM = ("rocm6.4", "rocm7.1")  # the builds for AMD's GPUs
LIKE_GFX1030 = ("gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036")
"""AMD chips without code in any build, with gfx1030's instructions (LLVM, AMDGPU Backend)."""
INDEX = "https://download.pytorch.org/whl"


def has_code_for(architectures: Sequence[str], capability: Capability) -> bool:
    """Return whether a build with these architectures runs on a GPU: machine code for the same
    major version and no later minor one, or PTX of an earlier one."""
    return any(_fits(name, capability) for name in architectures)


def _fits(architecture: str, capability: Capability) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if found is None:
        return False
    code = (int(found[2]), int(found[3]))
    if found[4]:  # for one architecture alone, such as sm_90a
        return code == capability
    return code <= capability and (found[1] == "compute" or code[0] == capability[0])


def build_for(capability: Capability, *, release: str, driver: int | None) -> str:
    """Return the build for a GPU and its driver, such as cu126; empty if there is none. `release`:
    of torch, such as 2.13.0; `driver`: its major version, or None."""
    if capability < MAXWELL or (driver is not None and driver < LEAST_DRIVER[12]):
        return ""
    if capability < TURING:
        return "cu126"
    newest = (driver is None or driver >= LEAST_DRIVER[13]) and _release(release) >= RELEASES[
        "cu130"
    ][0]
    return "cu130" if newest else "cu128" if capability >= BLACKWELL else "cu126"


def fits(build: str, release: str) -> bool:
    """Return whether a build is published for a release of torch, such as 2.13.0."""
    first, last = RELEASES[build]
    return first <= _release(release) <= last


def install_command(build: str, *, release: str) -> str:
    """Return the command that installs a build: of the installed release if it exists, else of any
    that fits."""
    first, last = RELEASES[build]
    exact = f"torch=={release.partition('+')[0]}"
    wanted = (
        exact if fits(build, release) else f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    )
    return f"pip install --force-reinstall '{wanted}' --index-url {INDEX}/{build}"


def driver_for(cuda: str) -> int | None:
    """The minimum driver for a build for this version of CUDA, such as 13.0; None if unknown."""
    major = cuda.partition(".")[0]
    return LEAST_DRIVER.get(int(major)) if major.isdigit() else None


def parse_capability(text: str) -> Capability | None:
    """(8, 6) of "8.6"."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text.strip())
    return None if found is None else (int(found[1]), int(found[2]))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
