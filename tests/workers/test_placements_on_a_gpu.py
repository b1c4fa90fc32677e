"""Tests that need a GPU: copies beside computation that wait for it, layers and prompts that torch
computes there, and what stands in a fingerprint."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.protocol.settings import MemorySettings, SplitSettings, TargetSettings
from dovetail.workers.devices.cuda import CudaTransfer
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.backends.blob import Lying
from dovetail.workers.models.backends.device import choice
from dovetail.workers.models.backends.device.own import OwnMatrix
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.backends.stages.stage import Ring
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.serving.open_target import open_target_worker
from support.decoded import decode
from support.kernels import needs_kernels
from support.models import FAMILIES, tiny_llama

pytestmark = [pytest.mark.gpu, needs_kernels]

TYPES = {"fp32": torch.float32, "half": torch.float16, "int8": torch.float32}
TOLERANCE = {"fp32": 1e-5, "half": 1e-5, "int8": 3e-2}
"""The largest difference of logits, as a share of the largest logit; see `test_staged.py`."""
HELD_CYCLES = 200_000_000  # a tenth of a second of a GPU: far more than the copy of a blob takes
BLOB_BYTES = 8 << 20


@pytest.fixture
def transfer() -> CudaTransfer:
    open_device("cuda:0", 1)
    return CudaTransfer(torch.device("cuda", 0))


class Hasty(CudaTransfer):
    """Copies that do not wait for what is computed."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        never_recorded = torch.cuda.Event()
        return super().copy(source, target, never_recorded)


def sums_of_slow_layers(transfer: CudaTransfer) -> tuple[list[int], list[int]]:
    """Return what two passes of layers read of their weights, each held back before it reads, and
    what they ought to."""
    blobs = [torch.full((BLOB_BYTES,), number + 1, dtype=torch.uint8) for number in range(5)]
    for blob in blobs:
        transfer.pin(blob)
    ring = Ring(transfer, blobs, 2)
    read = []
    for _ in range(2):
        for number in range(len(blobs)):
            with ring.next(number) as (_, memory):
                torch.cuda._sleep(HELD_CYCLES)
                read.append(memory.sum(dtype=torch.int64))
    torch.cuda.synchronize()
    return [int(total) for total in read], 2 * [int(blob.sum(dtype=torch.int64)) for blob in blobs]


def test_a_buffer_is_not_filled_anew_before_a_slow_layer_has_read_it(
    transfer: CudaTransfer,
) -> None:
    read, expected = sums_of_slow_layers(transfer)
    assert read == expected


@pytest.mark.usefixtures("transfer")
def test_that_would_be_seen() -> None:
    read, expected = sums_of_slow_layers(Hasty(0))
    assert read != expected


@pytest.mark.parametrize("places", ["streamed", "resident", "mixed"])
@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_computes_the_same_function_up_to_rounding(
    tmp_path: Path, transfer: CudaTransfer, family: str, weights: str, places: str
) -> None:
    folder = FAMILIES[family](tmp_path, dtype=TYPES[weights])
    whole = load_language_model(str(folder), weights=weights, device="cpu", backend="kernels")

    def spread(count: int) -> Sequence[Place]:
        rest = count - 1
        return {
            "streamed": [Place.STREAMED] * count,
            "resident": [Place.RESIDENT] * count,
            "mixed": [Place.CPU, *[Place.STREAMED] * (rest - 1), Place.RESIDENT],
        }[places]

    staging = Staging(spread(whole.layers), transfer)
    found, expected = (
        decode(
            load_language_model(
                str(folder), weights=weights, device="cpu", stage=lambda *_: staging
            )
        ),
        decode(whole),
    )
    assert float((found - expected).abs().max()) <= TOLERANCE[weights] * float(expected.abs().max())


@pytest.mark.parametrize("length", [1, 17, 300, 900])
def test_a_prompt_that_a_gpu_has_read_goes_on_on_the_cpu(
    tmp_path: Path, transfer: CudaTransfer, length: int
) -> None:
    folder = tiny_llama(tmp_path, layers=4, context=1024)
    tokens = torch.arange(length + 3) % 40
    logits = []
    for reader in (None, transfer):
        staging = Staging([Place.CPU] * 4, reader=reader)
        model = load_language_model(
            str(folder), weights="fp32", device="cpu", stage=lambda *_, staging=staging: staging
        )
        cache, last = model.new_cache(length + 3), torch.tensor([length - 1])
        if reader is None:
            model.forward(
                tokens[:length], torch.arange(length), [Segment(cache, 0, length)], rows=last
            )
        else:
            model.read_apart(tokens[:length], Segment(cache, 0, length), wanted=(), rows=last)
        cache.keep(range(length), length)
        logits.append(
            model.forward(
                tokens[length:], torch.arange(length, length + 3), [Segment(cache, length, 3)]
            )
        )
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_fingerprint_says_how_many_layers_a_gpu_computes_and_not_whether_they_stream(
    tmp_path: Path,
) -> None:
    folder = tiny_llama(tmp_path, layers=4)
    split = SplitSettings(device="cuda:0", layers=2)

    def fingerprint(settings: TargetSettings) -> str:
        worker = open_target_worker(
            settings, name="t", threads=1, memory=MemorySettings(vram="1GB")
        )
        assert worker.hello(1).limits.kept == 0  # type: ignore[union-attr]
        return str(worker.hello(1).fingerprint)

    streamed, resident, more = (
        fingerprint(TargetSettings(model=str(folder), split=split, resident=0)),
        fingerprint(TargetSettings(model=str(folder), split=split, resident=2)),
        fingerprint(
            TargetSettings(model=str(folder), split=SplitSettings(device="cuda:0", layers=3))
        ),
    )
    assert streamed == resident != more
    assert "/2@torch-" in streamed


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our products are used wherever they are proved, however fast they are."""
    monkeypatch.setattr(choice.Products, "_faster", lambda *_: (True, "it is proved"))
    choice.products_on.cache_clear()
    yield
    choice.products_on.cache_clear()


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("kind", choice.STORED)
def test_our_products_have_the_kernels_bytes_on_a_gpu_in_graphs_and_in_any_thread(
    transfer: CudaTransfer, kind: Kind
) -> None:
    generator = torch.Generator().manual_seed(5)
    matrix = PackedMatrix(kind, 1000, 777)
    matrix.pack(torch.randn(1000, 777, generator=generator).to(choice.STORED[kind]))
    memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes]
    lying = Lying(kind, 1000, 777, 0, matrix.nbytes, False)
    own = choice.products_on(transfer.device).lay_out(lying, memory.to(transfer.device))
    assert isinstance(own, OwnMatrix)
    x = torch.randn(70, 777, generator=generator)
    given, expected = x.to(transfer.device), matrix.linear(x)
    found = []
    thread = threading.Thread(target=lambda: found.append(own(given).cpu()))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)
    opened = open_device("cuda:0", 1)
    assert opened.capture is not None
    replay = opened.capture(lambda: own(given))
    given.mul_(2.0)
    assert torch.equal(replay().cpu(), matrix.linear(2.0 * x))


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("places", ["streamed", "mixed"])
@pytest.mark.parametrize("weights", ["half", "int8"])
def test_layers_of_our_products_are_the_same_function_up_to_rounding(
    tmp_path: Path, transfer: CudaTransfer, weights: str, places: str
) -> None:
    test_a_gpu_computes_the_same_function_up_to_rounding(
        tmp_path, transfer, "llama", weights, places
    )
    assert choice.products_on(transfer.device).mark
