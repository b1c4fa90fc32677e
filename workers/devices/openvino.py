"""OpenVINO's devices: a CPU, and Intel's GPUs and NPUs, integrated ones too. They compute converted
levels of heads; tensors, caches and all else are the host's.

The package is an extra. Its converter reports its use to Intel, through a module that is kept from
being imported here.
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.files import cache_folder
from dovetail.workers.devices import cpu
from dovetail.workers.devices.base import Conversion, Device, DeviceKind

REMEDY = "pip install 'dovetail[openvino]'"
ANEW = "pip install --force-reinstall openvino"
PLACE = re.compile(r"openvino(?::(.*))?")
EXACT, ROUNDED = 2e-5, 1e-2
"""The largest difference from torch's results that is accepted, as a share of the largest number:
in fp32, and in fp16, which is all that an NPU has."""


@cache
def _package() -> Any:
    """Return the package; `SettingsError` where it is missing or broken."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import openvino
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "openvino"
        why = "is not installed" if missing else f"cannot be imported ({error})"
        remedy = REMEDY if missing else ANEW
        raise SettingsError(f"OpenVINO {why}: {remedy}, or use device cpu") from error
    return openvino


@cache
def _core() -> Any:
    return _package().Core()


@contextmanager
def _asked() -> Iterator[None]:
    """`SettingsError` where OpenVINO, or the driver of a device, fails within the block."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:300]
        raise SettingsError(f"OpenVINO fails here ({why}): {ANEW}, or use device cpu") from error


def found() -> Mapping[str, str]:
    """Return OpenVINO's devices here and what each calls itself; `SettingsError` without it, and
    where it fails."""
    with _asked():
        names = _core().available_devices
        return {name: str(_property(name, "FULL_DEVICE_NAME")) for name in names}


def _property(place: str, name: str) -> Any:
    return _core().get_property(place, name)


def version() -> str:
    """Return OpenVINO's version, such as 2026.4.1."""
    return str(_package().__version__).partition("-")[0]


def _converted(
    place: str, module: nn.Module, example: Sequence[Tensor], free: Sequence[Sequence[int]]
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Convert a module for a device. A `Convert`, whose tensors are the host's; `SettingsError`
    where OpenVINO or the device's driver cannot."""
    try:
        request = _compiled(place, module, example, free).create_infer_request()
    except Exception as error:  # of any class: its converter's, a driver's
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise SettingsError(
            f"openvino:{place} cannot compute this head: {why}; use draft.device cpu"
        ) from error

    def compute(given: Sequence[Tensor]) -> Sequence[Tensor]:
        numbers = [tensor.contiguous().numpy() for tensor in given]
        results = request.infer(numbers, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(results[index]) for index in range(len(results))]

    return compute


def _compiled(
    place: str, module: nn.Module, example: Sequence[Tensor], free: Sequence[Sequence[int]]
) -> Any:
    """Return a module as a model that a device computes."""
    with _logging_kept(), warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's tracing; its result is compared with torch's
        model = _package().convert_model(module, example_input=tuple(example))
    model.reshape(
        {
            index: [-1 if dim in dims else size for dim, size in enumerate(tensor.shape)]
            for index, (tensor, dims) in enumerate(zip(example, free, strict=True))
        }
    )
    return _core().compile_model(model, place, _properties(place))


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Leave Python's logging as it is: a conversion that fails would leave it without warnings."""
    root = logging.getLogger()
    level, filters, handlers = root.level, [*root.filters], [*root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.filters, root.handlers = filters, handlers


def _properties(place: str) -> dict[str, Any]:
    """Return how a device is to compute: in fp32 where it can, one pass at a time."""
    able = _property(place, "OPTIMIZATION_CAPABILITIES")
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    if "FP32" in able:
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    if place != "CPU":  # a CPU compiles in under a second, and would keep a copy of all weights
        kept = {"CACHE_DIR": str(cache_folder() / "openvino")} if "EXPORT_IMPORT" in able else {}
        properties |= kept
    else:
        properties["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
        properties["ENABLE_CPU_PINNING"] = False  # the process is bound to its cores
    return properties


class _Openvino(DeviceKind):
    """OpenVINO's devices, by the names that it has for them."""

    type = "openvino"  # no name of torch's: tensors are the host's

    def open(self, name: str) -> Device | None:
        if (match := PLACE.fullmatch(name)) is None:
            return None
        place, there = match[1] or "", found()
        if place not in there and not (place == "GPU" and "GPU.0" in there):
            known = ", ".join(f"{self.type}:{one} ({chip})" for one, chip in there.items())
            raise SettingsError(
                f"there is no {name}: OpenVINO {version()} finds {known}; use one of these, or "
                "install the driver of the device that is meant"
            )
        with _asked():
            chip = str(_property(place, "FULL_DEVICE_NAME")).replace(" ", "-")
            able = _property(place, "OPTIMIZATION_CAPABILITIES")
        conversion = Conversion(
            partial(_converted, place),
            grows=not place.startswith("NPU"),
            tolerance=EXACT if "FP32" in able else ROUNDED,
        )
        return Device(
            self,
            name,
            torch.device("cpu"),
            f"openvino-{version()}-{place}-{chip}-{torch.get_num_threads()}t",
            "stored",
            capture=lambda function: function,
            conversion=conversion,
        )

    def free_bytes(self, device: torch.device) -> int:
        return cpu.free_bytes()


OPENVINO = _Openvino()
