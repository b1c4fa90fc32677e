"""A substitute in a process of its own, all layers of which a GPU computes, has the function of the
kernels' substitute up to rounding; a level of its trees is one copy and one launch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.spans import Spans
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.passes import Rows
from dovetail.workers.models.backends import fused, packing
from dovetail.workers.models.backends.device.fixed import ArenaCache
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.substitutes.substitute import ResidentSubstitute, load_substitute
from pretended.device import MEMORY, POSSIBLE, capped
from support.architectures import write_varied
from support.cases import everyday
from support.decoded import TOKENS, TREE, decode, far, level, read
from support.kernels import needs_kernels
from support.models import FAMILIES, tiny_llama

pytestmark = needs_kernels

ROUNDED = 0.08  # see `test_substitute.py`
AS_IT_COMES = ("gpt2",)  # models that are more than embedding, layers, norm and head


@pytest.fixture
def there() -> Device:
    if not POSSIBLE:
        pytest.skip("this version of torch cannot be told of a device from Python")
    return open_device("pretended", 1)


def both(
    folder: Path, device: Device, weights: str = "int4", **more: int
) -> tuple[LanguageModel, LanguageModel]:
    """Return the kernels' substitute and the one on a device, of the same codes."""
    found = [
        load_substitute(
            str(folder), weights=weights, device=name, folder=folder.parent / "kept", **more
        )
        for name in ("cpu", device.name)
    ]
    assert found[1][1].made == 0
    return found[0][0], found[1][0]


def resident(model: LanguageModel) -> ResidentSubstitute:
    assert isinstance(model.back_end, ResidentSubstitute)
    return model.back_end


@pytest.mark.parametrize(
    ("family", "weights"),
    everyday(
        [
            *(("llama", f"int{bits}") for bits in (8, 4, 3, 2)),
            *((family, "int4") for family in FAMILIES if family != "llama"),
        ],
        ("llama", "int3"),
        ("gemma2", "int4"),
    ),
)
def test_it_is_the_kernels_substitute_and_its_levels_are_captured(
    tmp_path: Path, there: Device, family: str, weights: str
) -> None:
    kernels, model = both(FAMILIES[family](tmp_path / "m", dtype=torch.float16), there, weights)
    assert resident(model).captures is (family not in AS_IT_COMES)
    assert model.device == there.torch_device
    assert far(decode(model), decode(kernels)) < ROUNDED


@pytest.mark.parametrize(
    "kind",
    everyday(["lfm2_moe", "gpt_oss", "qwen3_5_text", "youtu", "cohere2", "gpt_neox"], "gpt_oss"),
)
def test_layers_of_every_kind_are_computed_there(tmp_path: Path, there: Device, kind: str) -> None:
    """Experts, states, latents, gates, sinks, and rows that are reordered."""
    kernels, model = both(write_varied(kind, tmp_path / "m", torch.float16), there, "int8")
    resident(model)
    assert far(decode(model), decode(kernels)) < 2 * ROUNDED


def test_levels_that_are_replayed_are_those_that_are_computed_as_they_come(
    tmp_path: Path, there: Device
) -> None:
    model = both(tiny_llama(tmp_path / "m", dtype=torch.float16), there)[1]
    cache = model.new_cache(40)
    read(model, cache)
    replayed = [level(model, cache) for _ in range(2)]
    assert isinstance(part := cache.parts[0], ArenaCache)  # type: ignore[attr-defined]
    assert len(part.arena.captured) == 1
    resident(model)._levels = None
    expected = level(model, cache).cpu()
    assert torch.equal(*replayed)
    torch.testing.assert_close(replayed[0].cpu(), expected, rtol=2e-2, atol=2e-2)


def test_a_prompt_in_parts_and_shared_beginnings_give_what_a_session_alone_gives(
    tmp_path: Path, there: Device
) -> None:
    model = both(tiny_llama(tmp_path / "m", dtype=torch.float16), there)[1]
    first, parted = model.new_cache(40), model.new_cache(40)
    whole = read(model, first)
    expected = level(model, first)
    for start, stop in ((0, 3), (3, len(TOKENS))):
        places = torch.arange(start, stop)
        rows = Segment(parted, start, stop - start)
        found = model.forward(torch.tensor(TOKENS[start:stop]), places, [rows])
        parted.keep(range(start, stop), stop - start)
    torch.testing.assert_close(found.cpu(), whole[3:].cpu(), rtol=2e-2, atol=2e-2)
    branched = first.branch(len(TOKENS))
    branched.resize(40)
    orders = [
        Rows(
            torch.tensor([30, 7, 8, 22]),
            torch.tensor([10, 11, 11, 12]),
            Segment(cache, len(TOKENS), len(TREE), Paths.of(len(TOKENS), TREE)),
            wanted=len(TREE),
        )
        for cache in (branched, parted)
    ]
    both_levels = Drafter(model, Spans()).compute(orders)
    assert torch.equal(both_levels[0].logits, expected)
    torch.testing.assert_close(both_levels[1].logits.cpu(), expected.cpu(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("why", ["not built", "not described", "stumbles"])
def test_what_is_not_described_is_the_librarys_and_that_is_said(
    tmp_path: Path,
    there: Device,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError("a line stumbles")

    patches: dict[str, Callable[[], None]] = {
        "not built": lambda: monkeypatch.setattr(packing, "reason_against", lambda _: "not built"),
        "not described": lambda: monkeypatch.setattr(fused, "FAMILIES", {}),
        "stumbles": lambda: monkeypatch.setattr(ResidentSubstitute, "_take", stumble),
    }
    patches[why]()
    folder = str(tiny_llama(tmp_path / "m", dtype=torch.float16))
    model = load_substitute(folder, weights="int4", device=there.name)[0]
    assert model.backend == "library"
    reason = {
        "not built": "not built",
        "not described": "the C++ kernels cannot compute it: no family with that name is "
        "described here",
        "stumbles": "the kernels' layers cannot be computed on pretended:0: RuntimeError: a line "
        "stumbles",
    }[why]
    assert caplog.messages == [
        f"{folder}: the library computes its substitute on pretended:0, one operation at a time, "
        f"because {reason}"
    ]


REMEDIES = {
    "int8": "set draft.weights to int4, or draft.device to 'cpu'",
    "int4": "choose another draft.kind, or set draft.device to 'cpu'",
}


@pytest.mark.parametrize("weights", REMEDIES)
def test_one_that_does_not_fit_is_refused_before_its_layers_are_read_or_as_soon_as_it_shows(
    tmp_path: Path, there: Device, weights: str
) -> None:
    folder = str(tiny_llama(tmp_path / "m", dtype=torch.float16))
    for room, why in (
        (20_000, "takes .* GB of {} as {} while it is loaded, of which 2e-05 GB are free"),
        (
            {"int8": 90_000, "int4": 60_000}[weights],
            "as {1} needs more memory of {0} while it is loaded",
        ),
    ):
        said = f"{folder}: its substitute {why.format(there.name, weights)}.*: {REMEDIES[weights]}"
        with capped(MEMORY.used + room), pytest.raises(CheckpointError, match=f"^{said}$"):
            load_substitute(folder, weights=weights, device=there.name)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["int8", "int4", "int2"])
def test_levels_that_a_gpu_replays_are_those_that_it_computes_as_they_come(
    tmp_path: Path, weights: str
) -> None:
    device = open_device("cuda:0", 1)
    kernels, model = both(tiny_llama(tmp_path / "m", dtype=torch.float16), device, weights)
    assert resident(model).captures
    found = decode(model)
    assert far(found, decode(kernels)) < ROUNDED
    resident(model)._levels = None
    torch.testing.assert_close(decode(model), found, rtol=2e-2, atol=2e-2)
