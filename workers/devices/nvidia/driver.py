"""NVIDIA's driver by ctypes: loads compiled functions into torch's context, launches them on its
streams."""

import hashlib
from collections.abc import Callable, Sequence
from ctypes import (
    CDLL,
    Structure,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_uint,
    c_uint64,
    c_void_p,
    pointer,
)
from functools import cache
from threading import Lock

from torch import Tensor

DRIVER = "libcuda.so.1"
SUCCESS = 0
ARGUMENTS = {
    "cuInit": (c_int,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
}
EARLY = 90  # compute capability times ten from which a kernel may start early


class DriverError(RuntimeError):
    """The driver refused something."""


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_char * 60))


class _Launch(Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


_STARTS_EARLY = _Attribute(id=6, value=1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Function:
    def __init__(self, handle: c_void_p, count: int) -> None:
        self.handle, self.numbers = handle, (c_uint64 * count)()
        start = addressof(self.numbers)
        self.places = (c_void_p * count)(*range(start, start + 8 * count, 8))


class Functions:
    """Compiled functions of one GPU. A `Program`."""

    timed = True

    def __init__(
        self,
        driver: CDLL,
        module: c_void_p,
        context: c_void_p,
        about: str,
        key: str,
        stream: Callable[[], int],
        units: int,
        architecture: int,
    ) -> None:
        self.about, self.key, self.units = about, key, units
        self._driver, self._module, self._context, self._stream = driver, module, context, stream
        self._functions: dict[str, _Function] = {}
        self._current = c_void_p()
        self._next = _Launch(block=(0, 1, 1), grid=(0, 0, 1))
        if architecture >= EARLY:
            self._next.attributes, self._next.attribute_count = addressof(_STARTS_EARLY), 1
        self._address = pointer(self._next)
        self._lock = Lock()

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
    ) -> None:
        """Launch a function on torch's stream, in the function's context. An empty grid launches
        nothing."""
        if 0 in grid:
            return
        stream = self._stream()
        with self._lock:
            _check(self._driver, "cuCtxGetCurrent", byref(self._current))
            if self._current.value == self._context.value:
                self._launch(name, grid, threads, arguments, stream)
                return
            _check(self._driver, "cuCtxPushCurrent_v2", self._context)
            try:
                self._launch(name, grid, threads, arguments, stream)
            finally:
                _check(self._driver, "cuCtxPopCurrent_v2", byref(c_void_p()))

    def _launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
        stream: int,
    ) -> None:
        if (function := self._functions.get(name)) is None:
            function = self._functions[name] = _Function(self._find(name), len(arguments))
        function.numbers[:] = [_number(argument) for argument in arguments]
        self._next.grid[:2] = grid
        self._next.block[0], self._next.stream = threads, stream
        _check(
            *(self._driver, "cuLaunchKernelEx", self._address),
            *(function.handle, function.places, None),
        )

    def _find(self, name: str) -> c_void_p:
        handle = c_void_p()
        _check(self._driver, "cuModuleGetFunction", byref(handle), self._module, name.encode())
        return handle


def load_functions(
    code: bytes, index: int, about: str, stream: Callable[[], int], units: int, architecture: int
) -> Functions | str:
    """Return machine code loaded for GPU `index`, or why it cannot be. `about`: libraries and chip;
    `stream` returns torch's current stream; `units`: multiprocessors; `architecture`: ten times the
    capability."""
    driver = _driver()
    if isinstance(driver, str):
        return driver
    key = hashlib.sha256(f"{about}\0".encode() + code).hexdigest()[:32]
    device, context, module = c_int(), c_void_p(), c_void_p()
    try:
        _check(driver, "cuInit", 0)
        _check(driver, "cuDeviceGet", byref(device), index)
        _check(driver, "cuDevicePrimaryCtxRetain", byref(context), device)
        _check(driver, "cuCtxPushCurrent_v2", context)
        try:
            _check(driver, "cuModuleLoadData", byref(module), code)
        finally:
            _check(driver, "cuCtxPopCurrent_v2", byref(c_void_p()))
    except DriverError as error:
        return str(error)
    return Functions(driver, module, context, about, key, stream, units, architecture)


@cache
def _driver() -> CDLL | str:
    try:
        driver = CDLL(DRIVER)
        for name, arguments in ARGUMENTS.items():
            getattr(driver, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        return f"NVIDIA's driver cannot be loaded ({error})"
    return driver


def _check(driver: CDLL, name: str, *arguments: object) -> None:
    """Call a function of the driver; raise `DriverError` with its message if it fails."""
    if (result := getattr(driver, name)(*arguments)) != SUCCESS:
        said = c_char_p()
        driver.cuGetErrorString(c_int(result), byref(said))
        words = said.value.decode() if said.value else "unknown"
        raise DriverError(f"NVIDIA's driver: {name}: error {result}, {words}")


def _number(argument: Tensor | int | None) -> int:
    if argument is None:
        return 0
    return argument if isinstance(argument, int) else argument.data_ptr()
