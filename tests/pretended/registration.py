"""The registration of the pretended device with torch, once for the whole process."""

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from pretended.memory import MEMORY
from pretended.rules import NAME
from pretended.tensors import compute

aten = torch.ops.aten
POSSIBLE = hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_device_guard")
"""True if this torch can be told of a device from Python."""
RESIZING = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
"""Operations that make an empty tensor and have another one resize it, which a wrapper does not
survive."""

_make_tensor = torch.tensor
_LIBRARIES: list[Any] = [torch.library.Library(name, "IMPL") for name in ("_", "aten")]  # type: ignore[no-untyped-call]


class _Module(ModuleType):
    """The functions that torch looks for in the module of a device."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        """Return 0: torch need not look after its random numbers."""
        return 0

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the bytes that are free, and all of them."""
        free = MEMORY.free_bytes()
        return free, free + MEMORY.reserved if MEMORY.cap is None else MEMORY.cap

    def empty_cache(self) -> None:
        MEMORY.empty_cache()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: it has no random numbers of its own."""


@cache
def device() -> torch.device:
    """Return the device, of which torch is told at the first call; `SettingsError` where this torch
    cannot be told."""
    if not POSSIBLE:
        raise SettingsError(
            f"device {NAME!r} is a test rig, and torch {torch.__version__} cannot be told of a "
            "device from Python: use cpu or cuda:N"
        )
    from torch.utils._device import _device_constructors
    from torch.utils.backend_registration import _DummyDeviceGuard, rename_privateuse1_backend

    _device_constructors()  # remembers torch's own `tensor`, for `with torch.device(...)`
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())  # type: ignore[no-untyped-call]
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())
    # what makes tensors comes here; all else is done by `Elsewhere`
    _LIBRARIES[0].fallback(_fall_back, "PrivateUse1")
    for maker in RESIZING:
        _LIBRARIES[1].impl(maker, partial(_fall_back, _overload(maker)), "PrivateUse1")
    torch.tensor = _tensor  # type: ignore[assignment]  # torch's own makes its tensor where no dispatch reaches
    return torch.device(NAME, 0)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _fall_back(function: Any, *args: Any, **kwargs: Any) -> Any:
    return compute(function, args, kwargs)


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor as `torch.tensor` does."""
    if device is None or torch.device(device).type != NAME:
        return _make_tensor(data, device=device, **kwargs)
    return _make_tensor(data, device="cpu", **kwargs).to(device)
