"""A model in stages computes what it computes as a whole: the same bytes where the CPU stands for
the device, up to rounding where torch computes."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.backends import staged
from dovetail.workers.models.backends.blob import Lying, unpack
from dovetail.workers.models.backends.device.products import product
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.backends.stages import stage
from dovetail.workers.models.backends.stages.engines import TorchEngine
from dovetail.workers.models.backends.stages.stage import StagedCache
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import PROMPT_ROWS, Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.verifier import Verifier
from support.cases import everyday
from support.decoded import TOKENS, decode
from support.kernels import needs_kernels
from support.models import FAMILIES, tiny_llama
from support.opening import opening

pytestmark = needs_kernels

LAYERS = 4
C, R, S = Place.CPU, Place.RESIDENT, Place.STREAMED
PLACES = {
    **{f"split after {n}": [C] * n + [R] * (LAYERS - n) for n in range(1, LAYERS)},
    "streamed": [S] * LAYERS,
    "one resident": [S, S, S, R],
    "some resident": [S, R, S, R],
    "all resident": [R] * LAYERS,
    "mixed": [C, S, R, S],
    "last streamed": [C, C, C, S],
}
TYPES = {"fp32": torch.float32, "half": torch.float16, "int8": torch.float32}
TOLERANCE = {"fp32": 1e-5, "half": 1e-3, "int8": 3e-2}
"""The largest difference of logits that rounding may make, as a share of the largest logit. A key
or a value that is rounded to the other half is off by 1/2048, and an input of int8 that is rounded
to the other side by 1/127."""
GREEDY = Sampling(temperature=0.0)
TREE = TreeSettings(policy="dynamic", gamma=12, depth=6)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device computes as a GPU does: by torch."""
    for module in (staged, stage):
        monkeypatch.setattr(module, "engine_of", lambda transfer: TorchEngine(transfer.device))
    return iter(())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random Llama of four layers for each type of weights."""
    return {
        weights: tiny_llama(
            tmp_path_factory.mktemp(weights), layers=LAYERS, dtype=dtype, context=1024
        )
        for weights, dtype in TYPES.items()
    }


def load(
    folder: Path, weights: str, places: Sequence[Place] | None = None, *, reader: bool = False
) -> LanguageModel:
    """The model as a whole, or in stages; with half and int8 weights over a cache of halves."""
    if places is None:
        return load_language_model(
            str(folder), weights=weights, device="cpu", backend="kernels", cache="auto"
        )
    staging = Staging(places, HostTransfer(), HostTransfer() if reader else None)
    return load_language_model(
        str(folder), weights=weights, device="cpu", stage=lambda *_: staging, cache="auto"
    )


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> dict[str, Tensor]:
    """Return what the whole model computes, for each type of weights."""
    return {weights: decode(load(folders[weights], weights)) for weights in TYPES}


@pytest.mark.parametrize(
    ("places", "weights"),
    everyday(
        itertools.product(PLACES, TYPES),
        *(("split after 2", "half"), ("some resident", "half"), ("last streamed", "half")),
        *(("mixed", "fp32"), ("mixed", "int8")),
    ),
)
def test_every_placement_computes_the_same_bytes(
    folders: dict[str, Path], whole: dict[str, Tensor], places: str, weights: str
) -> None:
    found = load(folders[weights], weights, PLACES[places])
    for _ in range(2):  # the second time the buffers go on where the first ended
        assert torch.equal(decode(found), whole[weights])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_split_and_streamed(tmp_path: Path, family: str) -> None:
    folder = FAMILIES[family](tmp_path)
    whole = load(folder, "fp32")
    found = load(folder, "fp32", [C] + [S] * (whole.layers - 1))
    assert torch.equal(decode(found), decode(whole))


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(
    ("family", "weights"),
    [
        (family, weights)
        if weights == ("half", "int8")[number % 2] and number % 3 == 0
        else pytest.param(family, weights, marks=pytest.mark.slow)
        for number, family in enumerate(FAMILIES)
        for weights in TYPES
    ],
)
def test_torch_computes_the_same_function_up_to_rounding(
    tmp_path: Path, family: str, weights: str
) -> None:
    folder = FAMILIES[family](tmp_path, dtype=TYPES[weights])
    whole = load(folder, weights)
    found, expected = decode(load(folder, weights, [S] * whole.layers)), decode(whole)
    assert float((found - expected).abs().max()) <= TOLERANCE[weights] * float(expected.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(37, 48), (48, 17), (96, 30), (100, 33), (16, 3)])
@pytest.mark.parametrize("kind", [Kind.FP32, Kind.FP16, Kind.BF16, Kind.INT8])
def test_a_packed_matrix_is_laid_out_as_it_was(
    kind: Kind, shape: tuple[int, int], bias: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    dtype = {Kind.FP16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    weight, x = (
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(5, shape[1], generator=generator),
    )
    offset = torch.randn(shape[0], generator=generator) if bias else None
    packed = PackedMatrix(kind, *shape, bias=offset)
    packed.pack(weight)
    memory = torch.frombuffer(packed.memory, dtype=torch.uint8)
    found = unpack(Lying(kind, *shape, 0, packed.nbytes, bias), memory)
    if kind is not Kind.INT8:
        assert torch.equal(found.weight, weight)
    assert (offset is None) if found.bias is None else torch.equal(found.bias, offset)
    x[2] = 0.0
    torch.testing.assert_close(
        product(found, x),
        packed.linear(x),
        rtol=2e-6,
        atol=2e-6 * float(packed.linear(x).abs().max()),
    )


def test_integer_products_are_the_kernels_own() -> None:
    """The inputs need no rounding, so that nothing is left but the products."""
    generator = torch.Generator().manual_seed(4)
    weight, x = (
        torch.randn(64, 2048, generator=generator),
        torch.randint(-127, 128, (9, 2048), generator=generator).float(),
    )
    x[:, 0] = 127.0
    packed = PackedMatrix(Kind.INT8, 64, 2048)
    packed.pack(weight)
    found = unpack(
        Lying(Kind.INT8, 64, 2048, 0, packed.nbytes, False),
        torch.frombuffer(packed.memory, dtype=torch.uint8),
    )
    assert found.scales is not None
    expected = (x.double() @ found.weight[:, :2048].double().t()) * found.scales.double()
    assert torch.equal(product(found, x), packed.linear(x))
    torch.testing.assert_close(product(found, x).double(), expected, rtol=1e-6, atol=0.0)


def test_what_is_not_a_number_stays_none_in_int8() -> None:
    packed = PackedMatrix(Kind.INT8, 16, 8)
    packed.pack(torch.ones(16, 8))
    found = unpack(
        Lying(Kind.INT8, 16, 8, 0, packed.nbytes, False),
        torch.frombuffer(packed.memory, dtype=torch.uint8),
    )
    x = torch.ones(2, 8)
    x[1, 3] = float("inf")
    y = product(found, x)
    assert bool(y[1].isnan().all())
    assert not bool(y[0].isnan().any())


@pytest.mark.parametrize("places", [[S] * LAYERS, [C, S, R, S]], ids=["streamed", "mixed"])
@pytest.mark.parametrize(
    "length",
    everyday(
        [PROMPT_ROWS - 1, PROMPT_ROWS, PROMPT_ROWS + 1, 3 * PROMPT_ROWS + 40],
        PROMPT_ROWS + 1,
        3 * PROMPT_ROWS + 40,
    ),
)
def test_a_long_prompt_goes_through_layer_after_layer(
    folders: dict[str, Path], places: list[Place], length: int
) -> None:
    """The bytes are the same as with some rows at a time, and the weights are copied once."""
    tokens, positions = torch.arange(length) % 40, torch.arange(length)
    whole, found = load(folders["fp32"], "fp32"), load(folders["fp32"], "fp32", places)
    expected = whole.forward(
        tokens,
        positions,
        [Segment(whole.new_cache(length), 0, length)],
        rows=torch.tensor([length - 1]),
    )
    ring = found._back_end._stages[-1]._ring  # type: ignore[attr-defined]
    before = ring.copied_bytes
    logits = found.forward(
        tokens,
        positions,
        [Segment(found.new_cache(length), 0, length)],
        rows=torch.tensor([length - 1]),
    )
    assert torch.equal(logits, expected)
    assert ring.copied_bytes - before <= sum(blob.numel() for blob in ring._blobs)


@pytest.mark.parametrize("places", [[C] * LAYERS, [C, C, S, R]], ids=["on the CPU", "split"])
@pytest.mark.parametrize(
    "length", everyday([1, 15, 16, 17, PROMPT_ROWS, PROMPT_ROWS + 1, 600], 1, 17, PROMPT_ROWS + 1)
)
def test_a_prompt_that_a_device_has_read_goes_on_on_the_cpu(
    folders: dict[str, Path], places: list[Place], length: int
) -> None:
    tokens = torch.arange(length + 3) % 40
    whole, found = load(folders["fp32"], "fp32"), load(folders["fp32"], "fp32", places, reader=True)
    logits = []
    for model in (whole, found):
        cache, last = model.new_cache(length + 3), torch.tensor([length - 1])
        if model is found:
            read, _ = model.read_apart(
                tokens[:length], Segment(cache, 0, length), wanted=(), rows=last
            )
        else:
            read = model.forward(
                tokens[:length], torch.arange(length), [Segment(cache, 0, length)], rows=last
            )
        cache.keep(range(length), length)
        more = model.forward(
            tokens[length:], torch.arange(length, length + 3), [Segment(cache, length, 3)]
        )
        logits.append(torch.cat([read, more]))
    assert torch.equal(*logits)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(
    ("length", "weights"), [(1, "fp32"), (16, "fp32"), (300, "fp32"), (17, "half")]
)
def test_the_keys_and_values_that_torch_computes_are_handed_over(
    folders: dict[str, Path], length: int, weights: str
) -> None:
    tokens = torch.arange(length) % 40
    whole, found = (
        load(folders[weights], weights),
        load(folders[weights], weights, [C] * LAYERS, reader=True),
    )
    expected, cache = whole.new_cache(length), found.new_cache(length)
    whole.forward(tokens, torch.arange(length), [Segment(expected, 0, length)])
    found.read_apart(tokens, Segment(cache, 0, length), wanted=(), rows=torch.tensor([length - 1]))
    assert isinstance(cache, StagedCache)
    (part,) = cache.parts
    for name in ("keys", "values"):
        left, right = getattr(part, name), getattr(expected, name)
        if name == "keys":  # blocks of 16 slots side by side, as slots
            left, right = (blocks.transpose(3, 4).flatten(2, 3) for blocks in (left, right))
        error = 1e-4 if weights == "fp32" else 1e-3
        torch.testing.assert_close(
            left[:, :, :length], right[:, :, :length], rtol=error, atol=error
        )


def test_a_draft_reads_the_same_states_of_any_placement(folders: dict[str, Path]) -> None:
    def states(model: LanguageModel, *, apart: bool = False) -> list[Tensor]:
        tokens, cache, wanted = torch.tensor(TOKENS), model.new_cache(16), (0, 1, 2, 3, 4, LAST)
        segment = Segment(cache, 0, 10)
        found = (
            model.read_apart(tokens, segment, wanted=wanted, rows=torch.tensor([9]))
            if apart
            else None
        )
        return list(
            (
                found
                or model.forward_with_states(tokens, torch.arange(10), [segment], wanted=wanted)
            )[1].values()
        )

    expected = states(load(folders["fp32"], "fp32"))
    for places in PLACES.values():
        assert all(map(torch.equal, states(load(folders["fp32"], "fp32", places)), expected))
    assert all(
        map(
            torch.equal,
            states(load(folders["fp32"], "fp32", [C, C, S, R], reader=True), apart=True),
            expected,
        )
    )


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("places", [[C] * LAYERS, [C, C, S, R]], ids=["on the CPU", "split"])
def test_a_session_that_is_begun_anew_has_the_same_prompt_read_by_the_reader(
    folders: dict[str, Path], places: list[Place]
) -> None:
    """Its reply's rows are computed as they were, by the CPU alone; else the reader's rounding
    would get into them."""
    prompt, key = tuple(3 + number % 40 for number in range(50)), session_key(7, 0, (1, 2))

    def opened(log: Sequence[int], replied: int) -> tuple[Verifier, First]:
        verifier = Verifier(load(folders["fp32"], "fp32", places, reader=True), Spans())
        (first,) = verifier.open(
            opening(
                1,
                log,
                key=key,
                capacity=90,
                sampling=GREEDY,
                tree=TREE,
                round=replied,
                replied=replied,
            )
        )
        assert isinstance(first, First)
        return verifier, first

    def verified(verifier: Verifier, log: Sequence[int], round: int) -> int:
        from dovetail.protocol.messages import VerifyItem

        item = VerifyItem(
            session=1,
            round=round,
            prefix=len(log),
            tokens=TokenTree().tokens,
            parents=TokenTree().parents,
        )
        verifier.check(item)
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        return verdict.item.bonus

    before, first = opened(prompt, 0)
    assert first.apart
    log = [*prompt, first.token]
    for round in range(1, 7):
        log.append(verified(before, log, round))
    after, again = opened(log[:-1], 6)
    assert again.apart
    assert again.token == log[-1]
    caches = [verifier._sessions[1].cache for verifier in (before, after)]
    for left, right in zip(caches[0].parts, caches[1].parts, strict=True):  # type: ignore[attr-defined]
        if places == [C] * LAYERS:
            assert torch.equal(left.values[:, :, :56], right.values[:, :, :56])


def test_a_short_prompt_a_scored_one_and_one_with_a_base_are_read_locally(
    folders: dict[str, Path],
) -> None:
    model, key = load(folders["fp32"], "fp32", [C] * LAYERS, reader=True), session_key(7, 0, (1, 2))
    verifier = Verifier(model, Spans(), kept_tokens=1000, reads_from=30)
    prompt = tuple(3 + number % 40 for number in range(30))

    def read_apart(number: int, log: Sequence[int], **more: object) -> bool:
        *_, first = verifier.open(
            opening(number, log, key=key, capacity=90, sampling=GREEDY, tree=TREE, **more)
        )  # type: ignore[arg-type]
        assert isinstance(first, First)
        return first.apart

    assert read_apart(1, prompt)
    assert not read_apart(2, prompt[:29])
    assert not read_apart(3, prompt, scored=True, logprobs=1)
    assert not read_apart(4, prompt, replied=1)
    verifier.close(1, keep=True)
    assert not read_apart(5, [*prompt, 5, 6], base=1, kept=20)


def test_what_the_kernels_cannot_compute_is_neither_split_nor_streamed(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(
        CheckpointError, match=r"only what the C\+\+ kernels can compute is split or streamed"
    ) as caught:
        load_language_model(
            str(folders["fp32"]),
            weights="int8-per-tensor",
            device="cpu",
            stage=lambda *_: Staging([S] * LAYERS, HostTransfer()),
        )
    assert "\n" not in str(caught.value)
