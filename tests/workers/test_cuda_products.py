"""Our products for a GPU, computed by the CPU statement by statement: a row has the bytes that the
C++ kernels give it, alone and beside others. And compiled for every GPU that they are for."""

import json
import stat
from collections.abc import Iterator, Sequence
from ctypes import CDLL, byref, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.protocol.files import cache_folder
from dovetail.workers.devices.nvidia import compiled
from dovetail.workers.devices.nvidia import driver as nvidia_driver
from dovetail.workers.devices.nvidia.driver import DriverError, Functions, load_functions
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.backends.blob import Lying, Matrix
from dovetail.workers.models.backends.device import choice, trial
from dovetail.workers.models.backends.device.choice import CONTESTS, STORED, TIMED_ROWS, Products
from dovetail.workers.models.backends.device.own import (
    CODES_SOURCE,
    SOURCE,
    own_codes,
    own_matrix,
    source_of,
)
from dovetail.workers.models.substitutes import coded
from dovetail.workers.models.substitutes.quantize import CodedProduct
from pretended import device as pretended
from support.cases import everyday
from support.cuda_compilers import ARCHITECTURES, NVRTC, needs_nvrtc
from support.emulated import UNITS, Emulated, emulated, library_file
from support.kernels import needs_kernels

ROWS = (1, 3, 4, 5, 16, 17, 33, 70)
BITS, CODE_SHAPES = (8, 4, 3, 2), ((40, 100), (17, 1100), (16, 2500), (700, 200))
SHAPES = ((37, 130), (100, 33), (16, 3))
BOTH = SOURCE + CODES_SOURCE.removeprefix(source_of())
CPU = torch.device("cpu")


def packed(kind: Kind, n: int, k: int, *, bias: bool = True) -> PackedMatrix:
    generator = torch.Generator().manual_seed(3)
    offset = torch.randn(n, generator=generator) if bias else None
    matrix = PackedMatrix(kind, n, k, bias=offset)
    matrix.pack(torch.randn(n, k, generator=generator).to(STORED[kind]))
    return matrix


def lying(matrix: PackedMatrix) -> tuple[Lying, Tensor]:
    """The matrix in a blob, behind other bytes."""
    memory = torch.zeros(64 + matrix.nbytes, dtype=torch.uint8)
    memory[64:] = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes]
    has_bias = bool(matrix.struct.bias)
    return Lying(matrix.kind, matrix.n, matrix.k, 64, matrix.nbytes, has_bias), memory


def inputs(rows: int, k: int) -> Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(4))
    x[:, 0] = -0.0
    x[rows // 2] = 0.0
    return x


@needs_kernels
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bytes_that_the_kernels_give_it(kind: Kind, shape: tuple[int, int]) -> None:
    for bias in (True, False):
        matrix = packed(kind, *shape, bias=bias)
        own, x = own_matrix(emulated(SOURCE), *lying(matrix)), inputs(max(ROWS), shape[1])
        whole = matrix.linear(x)
        for rows in ROWS:
            found = own(x[:rows])
            assert found.numpy().tobytes() == whole[:rows].numpy().tobytes(), (rows, bias)


@needs_kernels
@pytest.mark.parametrize("bits", everyday(BITS, 4, 3))
@pytest.mark.parametrize("shape", CODE_SHAPES)
@pytest.mark.parametrize("units", UNITS)
def test_a_row_over_codes_has_the_bytes_that_the_kernels_give_it(
    bits: int, shape: tuple[int, int], units: str
) -> None:
    codes, bias = coded._random(bits, shape, 5), torch.linspace(-1, 1, shape[0])
    for offset in (bias, None):
        matrix = coded.pack_codes([codes], [offset])
        own = own_codes(emulated(UNITS[units] + CODES_SOURCE), *lying(matrix))
        x = inputs(20, shape[1])
        whole = matrix.linear(x)
        for rows in (1, 3, 8, 9, 20):
            assert own(x[:rows]).numpy().tobytes() == whole[:rows].numpy().tobytes(), rows


@needs_kernels
@pytest.mark.parametrize("rows", [4, 33])
def test_the_threads_of_a_block_may_go_on_in_any_order(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A barrier that is missing would show in one of two orders."""
    monkeypatch.setenv("DT_BACKWARDS", "1")
    for kind in STORED:
        matrix, x = packed(kind, *SHAPES[0]), inputs(rows, SHAPES[0][1])
        assert torch.equal(own_matrix(emulated(SOURCE), *lying(matrix))(x), matrix.linear(x))
    for bits in BITS:
        codes = coded.pack_codes([coded._random(bits, CODE_SHAPES[1], 5)], [None])
        x = inputs(rows, CODE_SHAPES[1][1])
        for units in UNITS.values():
            own = own_codes(emulated(units + CODES_SOURCE), *lying(codes))
            assert torch.equal(own(x), codes.linear(x))


@needs_kernels
def test_what_is_not_a_number_stays_none_and_stays_in_its_row() -> None:
    x = inputs(3, 33)
    x[1, 5] = float("inf")
    for kind in (Kind.FP16, Kind.INT8):
        y = own_matrix(emulated(SOURCE), *lying(packed(kind, 100, 33)))(x)
        assert not bool(y[1].isfinite().any())
        assert bool(y[[0, 2]].isfinite().all())


def nobody(_: str) -> str:
    """Compile nothing."""
    return "there is no compiler"


class Wrong(Emulated):
    """Functions of which one adds a little to what it computes."""

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
    ) -> None:
        super().launch(name, grid, threads, arguments)
        if name == "fp16_32":
            y = arguments[5]
            assert isinstance(y, Tensor)
            y[3, 7] += 1e-6


class Timed(Emulated):
    timed = True


@needs_kernels
def test_ours_is_used_where_it_is_proved() -> None:
    products, matrix = Products(CPU, emulated), packed(Kind.BF16, 37, 130)
    assert products.owner(CONTESTS[Kind.BF16]) is not None
    assert products.mark == "+own-bf16"
    assert "own product multiplies bf16 weights" in products.said[Kind.BF16]
    x = inputs(5, 130)
    assert torch.equal(products.lay_out(*lying(matrix))(x), matrix.linear(x))  # type: ignore[operator]


@needs_kernels
def test_ours_is_not_used_where_a_number_differs() -> None:
    products = Products(CPU, lambda source: Wrong(emulated(source)._library))
    assert products.owner(CONTESTS[Kind.FP16]) is None
    assert products.said[Kind.FP16].startswith(
        "cpu: torch's product multiplies fp16 weights: dovetail's own is not proved here: 17 rows"
    )
    assert products.mark == ""
    assert products.owner(CONTESTS[Kind.BF16]) is not None


@needs_kernels
def test_weights_of_32_bits_are_torchs() -> None:
    products, matrix = (Products(CPU, nobody), PackedMatrix(Kind.FP32, 16, 3))
    matrix.pack(torch.ones(16, 3))
    assert isinstance(products.lay_out(*lying(matrix)), Matrix)
    assert products.said == {}


def test_without_a_compiler_torch_multiplies_and_it_is_said_why() -> None:
    products = Products(CPU, nobody)
    assert products.owner(CONTESTS[Kind.FP16]) is None
    assert products.said[Kind.FP16] == (
        "cpu: torch's product multiplies fp16 weights: there is no compiler"
    )


@needs_kernels
@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ([[1e-4] * 3, [2e-4] * 3], True),
        ([[1e-4, 1e-4, 5e-4], [2e-4] * 3], False),
        ([[1e-4] * 3, "no such card"], True),
    ],
)
def test_the_product_that_was_measured_to_be_faster_is_used_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: object, chosen: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trials = [json.dumps(measured).encode()]
    for _ in range(2):  # the second time nothing is tried
        products = Products(
            CPU, lambda source: Timed(emulated(source)._library), lambda *_: trials.pop()
        )
        assert (products.owner(CONTESTS[Kind.INT8]) is not None) is chosen
        assert "0.1, 0.1" in products.said[Kind.INT8]


@needs_kernels
def test_both_products_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products are timed, as a trial does in its own process."""
    for room in ("backends.device.choice", "backends.device.attention", "substitutes.coded"):
        monkeypatch.setattr(f"dovetail.workers.models.{room}.TIMED_SHAPE", (64, 128))
    monkeypatch.setattr("dovetail.workers.models.backends.device.choice.TIMED_BYTES", 1)
    monkeypatch.setattr("dovetail.workers.models.backends.device.attention.TIMED_SLOTS", 100)
    monkeypatch.setattr(choice, "products_on", lambda device: Products(device, emulated))
    for name in ("fp16", "int8", "codes4", "attention"):
        ours, torchs = json.loads(trial.here("cpu", name))
        assert len(ours) == len(torchs) == len(TIMED_ROWS)
        assert min(*ours, *torchs) > 0


@needs_kernels
def test_a_substitute_multiplies_its_codes_with_ours_where_that_is_proved() -> None:
    parts, biases = [coded._random(4, (32, 100), seed) for seed in (1, 2)], [None, None]
    x, own = inputs(5, 100), Products(CPU, emulated)
    matrix = coded.pack_codes(parts, biases)
    found = coded.coded_product(*lying(matrix), own)(x)
    assert torch.equal(found, matrix.linear(x))
    torchs = coded.coded_product(*lying(matrix), Products(CPU, nobody))
    assert isinstance(torchs, CodedProduct)


@needs_kernels
def test_a_product_is_captured_in_a_graph_as_a_gpu_captures_it() -> None:
    """Nothing in it meets a tensor of the CPU or waits."""
    place = pretended.device()
    for kind in (Kind.FP16, Kind.INT8):
        matrix = packed(kind, 100, 33)
        where, memory = lying(matrix)
        own = own_matrix(emulated(SOURCE), where, memory.to(place))
        x = torch.zeros(5, 33, device=place)
        replay = pretended.capture(lambda own=own, x=x: own(x))
        x.copy_(inputs(5, 33))
        assert torch.equal(replay().cpu(), matrix.linear(inputs(5, 33)))


# ---- the driver, the compiler and its cache


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CDLL]:
    """A driver that runs our functions on the CPU; see `support/cuda/driver.cpp`."""
    monkeypatch.setattr(nvidia_driver, "DRIVER", str(library_file(BOTH)))
    nvidia_driver._driver.cache_clear()
    yield CDLL(str(library_file(BOTH)))
    nvidia_driver._driver.cache_clear()


@needs_kernels
@pytest.mark.parametrize(("architecture", "early"), [(86, False), (90, True)])
def test_the_driver_is_asked_for_what_was_meant(
    driver: CDLL, architecture: int, early: bool
) -> None:
    """Products through the driver's own interface: contexts, streams, names, arguments."""
    functions = load_functions(
        b"\x7fELF\0 and more", 0, "a chip", lambda: (7 << 40) + 1, 4, architecture
    )
    assert isinstance(functions, Functions)
    for kind in (Kind.FP16, Kind.INT8):
        matrix, x = packed(kind, 100, 33), inputs(5, 33)
        own = own_matrix(functions, *lying(matrix))
        assert torch.equal(own(x), matrix.linear(x))
    codes = coded.pack_codes([coded._random(4, (40, 100), 5)], [None])
    x = inputs(9, 100)
    assert torch.equal(own_codes(functions, *lying(codes))(x), codes.linear(x))
    driver.stream_of_last.restype = c_int64
    assert driver.stream_of_last() == (7 << 40) + 1
    assert bool(driver.last_was_early()) is early
    assert driver.contexts_left() == 0
    functions.launch("round_rows", (0, 1), 32, (None, None, None, 33))  # of no rows


@needs_kernels
def test_a_launch_takes_the_context_that_a_thread_has(driver: CDLL) -> None:
    functions = load_functions(b"\x7fELF\0", 0, "", lambda: 0, 4, 86)
    assert isinstance(functions, Functions)
    matrix, x = packed(Kind.FP16, 100, 33), inputs(5, 33)
    own = own_matrix(functions, *lying(matrix))
    own(x)
    pushes = driver.times_pushed()
    driver.cuCtxPushCurrent_v2(functions._context)
    assert torch.equal(own(x), matrix.linear(x))
    assert (driver.times_pushed(), driver.contexts_left()) == (pushes + 1, 1)
    driver.cuCtxPopCurrent_v2(byref(c_void_p()))
    assert torch.equal(own(x), matrix.linear(x))
    assert (driver.times_pushed(), driver.contexts_left()) == (pushes + 2, 0)


def test_what_the_driver_refuses_is_said_in_its_words(driver: CDLL) -> None:
    refused = "NVIDIA's driver: {}: error {}"
    assert load_functions(b"", 0, "", lambda: 0, 4, 86) == refused.format(
        "cuModuleLoadData", "200, device kernel image is invalid"
    )
    assert load_functions(b"\x7fELF\0", 1, "", lambda: 0, 4, 86) == refused.format(
        "cuDeviceGet", "101, invalid device ordinal"
    )
    functions = load_functions(b"\x7fELF\0", 0, "", lambda: 0, 4, 86)
    assert isinstance(functions, Functions)
    with pytest.raises(DriverError, match="named symbol not found"):
        functions.launch("nothing", (1, 1), 32, ())
    functions.timed = False  # it is not tried in another process, which has another driver
    driver.refuse(1)
    products = Products(CPU, lambda _: functions)
    assert products.owner(CONTESTS[Kind.FP16]) is None
    assert products.said[Kind.FP16].endswith("cuLaunchKernelEx: error 1, refused")
    driver.refuse(0)
    assert driver.contexts_left() == 0


@needs_nvrtc
@pytest.mark.parametrize("architecture", everyday(ARCHITECTURES, 90))
def test_the_functions_compile_for_every_gpu(architecture: int) -> None:
    assert not isinstance(NVRTC, str)
    code = NVRTC.compile(BOTH, architecture)
    assert isinstance(code, bytes), code
    assert code.startswith(b"\x7fELF")
    for name in ("fp16_4", "int8_32", "round_rows", "codes4", "round_64"):
        assert name.encode() in code


@needs_nvrtc
def test_a_source_that_is_wrong_and_a_gpu_that_is_not_known_are_refused_in_words() -> None:
    assert not isinstance(NVRTC, str)
    wrong = NVRTC.compile("__global__ void f() { g(); }", 86)
    assert isinstance(wrong, str)
    assert 'identifier "g" is undefined' in wrong
    assert str(NVRTC.compile("", 11)).endswith("has no code for compute capability 1.1")


@needs_nvrtc
def test_what_was_compiled_is_kept_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not isinstance(NVRTC, str)
    source = 'extern "C" __global__ void f(float* x) { x[0] = 1.0f; }'
    code = compiled.compiled_for(NVRTC, source, 86)
    assert isinstance(code, bytes)
    (file,) = (cache_folder() / "cuda").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert compiled.find(file.name) == code
    assert compiled.compiled_for(NVRTC, source, 75) != code
    assert len(list(file.parent.iterdir())) == 2

    file.chmod(0o620)
    assert compiled.find(file.name) is None
    file.chmod(0o600)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert compiled.find(file.name) is None
    assert "not yours alone" in caplog.text
    assert "not what was written" in caplog.text
    assert compiled.compiled_for(NVRTC, source, 86) == code
    assert compiled.find(file.name) == code
