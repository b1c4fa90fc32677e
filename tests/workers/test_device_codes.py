"""A substitute that shares its target's GPU: here the CPU computes as the GPU would, by torch's
operations, in levels that are padded and not captured."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from dovetail.protocol.settings import MemorySettings, SplitSettings, TargetSettings
from dovetail.workers.devices.base import Capture
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels.coded import GROUP
from dovetail.workers.models.backends import staged
from dovetail.workers.models.backends.blob import Lying, alone
from dovetail.workers.models.backends.device.fixed import ArenaCache
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.placement import (
    TREES_AHEAD,
    Place,
    coded_bytes,
    level_bytes,
    needed_bytes,
)
from dovetail.workers.models.backends.sizes import TREE_ROWS, sizes_of
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.backends.stages.engines import TorchEngine
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.substitutes import substitute
from dovetail.workers.models.substitutes.coded import coded_product, pack_codes, unpack_codes
from dovetail.workers.models.substitutes.quantize import CodedProduct, Codes, quantise
from dovetail.workers.models.substitutes.substitute import (
    DeviceSubstitute,
    load_device_substitute,
    load_substitute,
)
from dovetail.workers.serving.spread import spread_of
from support.architectures import write_tiny, write_varied
from support.cases import everyday
from support.decoded import far
from support.kernels import needs_kernels
from support.models import CONFIG, tiny_llama

ROUNDED = 0.08  # see `test_substitute.py`
TOKENS = torch.tensor([3, 14, 15, 9, 26, 5, 35, 8])
PATHS = [[8], [8, 9], [8, 10], [8, 10, 11], [8, 10, 12]]
TREE, LEVELS = torch.tensor([30, 7, 8, 22, 4]), torch.tensor([8, 9, 9, 10, 10])


def codes_of(rows: int, inputs: int, bits: int) -> Codes:
    generator = torch.Generator().manual_seed(bits)
    groups = -(-inputs // GROUP)
    codes = torch.randint(
        0, 1 << bits, (rows, groups * GROUP), generator=generator, dtype=torch.uint8
    )
    scales, offsets = (torch.rand(2, rows, groups, generator=generator) * 0.1).half()
    return Codes(bits, inputs, codes, scales, offsets)


@needs_kernels
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("rows", "inputs"), [(32, 128), (40, 100)])
def test_codes_of_any_width_are_multiplied_by_products_of_four_bits(
    bits: int, rows: int, inputs: int
) -> None:
    parts, bias = (
        [codes_of(rows, inputs, bits), codes_of(8, inputs, bits)],
        torch.linspace(-1, 1, rows),
    )
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1))
    expected = x @ torch.cat([part.weight() for part in parts]).t() + torch.cat(
        [bias, torch.zeros(8)]
    )
    product = coded_product(*alone(pack_codes(parts, [bias, None])), None)
    assert isinstance(product, CodedProduct)
    found = product(x)
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Have torch compute layers on the CPU as on a GPU, with passes "captured" as they are."""
    monkeypatch.setattr(staged, "engine_of", lambda transfer: TorchEngine(transfer.device))
    return lambda function: function


def pair(
    folder: Path, kept: Path, capture: Capture, resident: int, *, weights: str = "int4"
) -> tuple[LanguageModel, LanguageModel]:
    """A target of which so many layers stay, and its substitute."""
    places = [Place.RESIDENT] * resident + [Place.STREAMED] * (2 - resident)
    target = load_language_model(
        str(folder), weights="half", device="cpu", stage=lambda *_: Staging(places, HostTransfer())
    )
    substitute, made, shared = load_device_substitute(target, capture, weights=weights, folder=kept)
    assert shared == resident == 2 - made.made
    return target, substitute


def read(model: LanguageModel, cache: KVCache) -> Tensor:
    """The logits of a prompt, and of a tree behind it."""
    prompt = model.forward(TOKENS, torch.arange(8), [Segment(cache, 0, 8)])
    cache.keep(range(8), 8)
    return torch.cat(
        [prompt, model.forward(TREE, LEVELS, [Segment(cache, 8, 5, Paths.of(8, PATHS))])]
    )


@needs_kernels
@pytest.mark.parametrize("weights", everyday(["int8", "int4", "int3", "int2"], "int4", "int3"))
def test_it_computes_what_the_kernels_substitute_computes(
    tmp_path: Path, as_a_gpu: Capture, weights: str
) -> None:
    folder = tiny_llama(tmp_path / "model", intermediate_size=128, dtype=torch.float16)
    substitute = pair(folder, tmp_path / "kept", as_a_gpu, 0, weights=weights)[1]
    kernels, made = load_substitute(
        str(folder), weights=weights, device="cpu", folder=tmp_path / "kept"
    )
    assert made.made == 0  # the codes are the same
    found, expected = (read(model, model.new_cache(16)) for model in (substitute, kernels))
    assert float((found - expected).norm() / expected.norm()) < ROUNDED


@needs_kernels
@pytest.mark.parametrize("resident", [0, 1, 2])
def test_a_level_in_fixed_shapes_is_what_its_rows_are_one_by_one(
    tmp_path: Path, as_a_gpu: Capture, resident: int
) -> None:
    """A level of fewer rows than its shape, in the target's own cache, and the levels below it."""
    folder = tiny_llama(tmp_path / "model", intermediate_size=128, dtype=torch.float16)
    target, fixed = pair(folder, tmp_path / "kept", as_a_gpu, resident)
    free = load_device_substitute(target, None, weights="int4", folder=tmp_path / "kept")[0]
    caches = [target.new_cache(40).parts[0] for _ in range(2)]  # type: ignore[attr-defined]
    expected, found = read(free, caches[0]), read(fixed, caches[1])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(
        caches[1].rows[..., 13:, :], torch.zeros_like(caches[1].rows[..., 13:, :])
    )  # what is not written stays what it was
    torch.testing.assert_close(caches[0].rows, caches[1].rows, rtol=2e-2, atol=2e-2)


@needs_kernels
@pytest.mark.parametrize("kind", everyday(["cohere2", "gpt_neox"], "gpt_neox"))
@pytest.mark.parametrize("resident", [0, 1])
def test_rows_that_the_kernels_have_in_another_order_have_their_codes_in_it(
    tmp_path: Path, as_a_gpu: Capture, kind: str, resident: int
) -> None:
    folder, kept = tmp_path / "model", tmp_path / "kept"
    assert write_tiny(kind, folder, dtype=torch.float16, num_hidden_layers=2)
    target, shared = pair(folder, kept, as_a_gpu, resident, weights="int8")
    kernels = load_substitute(str(folder), weights="int8", device="cpu", folder=kept)[0]
    found, expected, whole = (
        read(model, model.new_cache(16))  # type: ignore[arg-type]
        for model in (shared, kernels, target)
    )
    assert far(found, whole if resident else expected) < ROUNDED


@needs_kernels
@pytest.mark.parametrize(
    "kind",
    everyday(
        ["qwen3_moe", "qwen3_next", "deepseek_v3", "falcon_h1"],
        "qwen3_next",
    ),
)
def test_layers_of_every_kind_compute_what_their_codes_stand_for(
    tmp_path: Path, as_a_gpu: Capture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Experts, states and latents, with products in fp32: those of a GPU round to bf16, and a
    router then chooses other experts."""
    write_varied(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    exact, layers = ("kv_b_proj", "shared_expert_gate"), decoder_layers(model)[1]
    for name, part in layers.named_modules():
        if isinstance(part, nn.Linear) and not name.endswith(exact):
            part.weight = nn.Parameter(quantise(part.weight, 8).weight(), requires_grad=False)
    for stack in [part.data for part in layers.parameters() if part.ndim == 3]:
        if stack.shape[1] > 1:  # no convolution
            stack.copy_(torch.stack([quantise(matrix, 8).weight() for matrix in stack]))
    with torch.inference_mode():
        expected = model(TOKENS.unsqueeze(0)).logits[0]

    def exactly(lying: Lying, memory: Tensor, _: object) -> Product:
        codes, bias = unpack_codes(lying, memory)
        return lambda x: linear(x, codes.weight(), bias)

    monkeypatch.setattr(substitute, "coded_product", exactly)
    staging = Staging([Place.STREAMED] * len(layers), HostTransfer())
    target = load_language_model(
        str(tmp_path), weights="fp32", device="cpu", stage=lambda *_: staging
    )
    shared = load_device_substitute(target, as_a_gpu, weights="int8")[0]
    assert isinstance(shared.back_end, DeviceSubstitute)
    assert shared.back_end.levels is None
    found = shared.forward(TOKENS, torch.arange(8), [Segment(shared.new_cache(8), 0, 8)])
    assert far(found, expected) < 1e-4


@needs_kernels
def test_what_was_captured_for_a_session_serves_the_next_one(
    tmp_path: Path, as_a_gpu: Capture
) -> None:
    folder = tiny_llama(tmp_path / "model", intermediate_size=128, dtype=torch.float16)
    substitute = pair(folder, tmp_path / "kept", as_a_gpu, 0)[1]
    cache = substitute.new_cache(16)
    assert isinstance(cache, ArenaCache)
    arena, expected = cache.arena, read(substitute, cache)
    captured = set(arena.captured)
    del cache
    cache = substitute.new_cache(15)
    assert isinstance(cache, ArenaCache)
    assert cache.arena is arena
    assert torch.equal(read(substitute, cache), expected)
    assert set(arena.captured) == captured != set()
    larger = substitute.new_cache(16)
    assert isinstance(larger, ArenaCache)
    assert larger.arena is not arena


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4", "int2"])
@pytest.mark.parametrize("resident", [0, 1])
def test_levels_that_a_gpu_replays_are_those_of_the_kernels_substitute(
    tmp_path: Path, weights: str, resident: int
) -> None:
    folder = tiny_llama(tmp_path / "model", intermediate_size=128, dtype=torch.float16)
    kernels = load_substitute(str(folder), weights=weights, device="cpu", folder=tmp_path / "kept")[
        0
    ]
    device = open_device("cuda:0", 1)
    places = [Place.RESIDENT] * resident + [Place.STREAMED] * (2 - resident)
    target = load_language_model(
        str(folder),
        weights="half",
        device="cpu",
        stage=lambda *_: Staging(places, device.transfer()),
    )
    shared = load_device_substitute(
        target, device.capture, weights=weights, folder=tmp_path / "kept"
    )[0]
    caches = shared.new_cache(40), kernels.new_cache(40)
    expected = read(kernels, caches[1])  # type: ignore[arg-type]
    found = read(shared, caches[0])  # type: ignore[arg-type]
    assert found.device == device.torch_device
    assert resident or float((found.cpu() - expected).norm() / expected.norm()) < ROUNDED
    again = shared.forward(
        TREE, LEVELS, [Segment(caches[0], 8, 5, Paths.of(8, PATHS))]
    )  # replayed once more, over the same slots
    assert torch.equal(again, found[-5:])


def test_what_the_codes_take_is_left_to_them_of_a_limit(tmp_path: Path) -> None:
    sizes = sizes_of(CONFIG, "fp16")
    weights = 8 * (64 * 64 * 4 + 3 * 64 * 96)
    trees = 8 * sizes.row * TREES_AHEAD * TREE_ROWS + level_bytes(sizes)
    codes = {bits: coded_bytes(sizes, "fp16", bits) - trees for bits in (2, 4, 8)}
    assert codes[4] == codes[2] == codes[8] // 2
    assert codes[4] == pytest.approx(weights * 4.5 / 8, rel=0.1)
    limit = needed_bytes(sizes, 8, 5, "cpu") + trees
    memory, cpu = MemorySettings(vram=f"{limit}B"), open_device("cpu", 1)
    alone, beside = (
        spread_of(
            TargetSettings(split=SplitSettings(device="cpu", layers=8)), memory, cpu, 1, bits=bits
        )
        for bits in (4, 8)
    )
    resident = [
        spread.stage(CONFIG, "fp16").places.count(Place.RESIDENT)
        for spread in (alone, beside)
        if spread is not None
    ]
    assert 5 > resident[0] > resident[1]


def test_a_layer_that_stays_on_the_device_leaves_no_room_to_codes() -> None:
    sizes = sizes_of(CONFIG, "fp16")
    trees = 8 * sizes.row * TREES_AHEAD * TREE_ROWS + level_bytes(sizes)
    memory = MemorySettings(vram=f"{needed_bytes(sizes, 8, 8, 'cpu') + trees}B")
    target = TargetSettings(split=SplitSettings(device="cpu", layers=8))
    spread = spread_of(target, memory, open_device("cpu", 1), 1, bits=8)
    assert spread is not None
    assert spread.stage(CONFIG, "fp16").places.count(Place.RESIDENT) == 8
