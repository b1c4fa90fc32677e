"""Layers with states, attention over latents, experts, and others that are more than heads and an
MLP, in stages: the same bytes where the CPU stands for the device, the same function where torch
computes there, in trees that grow, after commits and after going back."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.workers.devices.base import Transfer
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.kernels.states import ScanPlan, ScanRule, placed
from dovetail.workers.models.backends.blocked_cache import states_of
from dovetail.workers.models.backends.device.scan import DeviceScan, StatefulRows
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.sizes import count_layers
from dovetail.workers.models.backends.staged import Staged, Staging
from dovetail.workers.models.backends.stages.engines import TorchEngine
from dovetail.workers.models.cache import MixedKVCache
from dovetail.workers.models.families.mixtures import FAMILIES
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.recurrent import CHAIN, RecurrentStates
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Paths, Segment
from pretended.device import POSSIBLE, PretendedTransfer
from support.architectures import LATENT, VARIED, VOCABULARY, write_tiny, write_varied
from support.cases import everyday
from support.decoded import extend
from support.kernels import needs_kernels

pytestmark = needs_kernels

C, R, S = Place.CPU, Place.RESIDENT, Place.STREAMED
WAYS = {"split": [C, S, R], "streamed": [S, R, S]}
"""The places of layers, one after the other and around."""
KINDS = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "bamba"),
    *("falcon_h1", "nemotron_h", "granitemoehybrid", *LATENT),
    *("lfm3", "olmo_hybrid", "kimi_linear"),
    *("gemma4_text", "gemma4_text small", "gemma4_unified_text", "bitnet", "dbrx", "phimoe"),
    *FAMILIES,
)
EXPERTS = (
    *("moe", "next", "deepseek", "lite", "sarvam", "axk1", "granite", "nemotron", "gemma4_text"),
    *FAMILIES,
)
TYPES = {"fp32": torch.float32, "half": torch.bfloat16, "int8": torch.float32}
TOLERANCE = {"fp32": 1e-4, "half": 1e-4, "int8": 5e-2}
"""The largest difference of logits that rounding may make, as a share of the largest logit."""
TEXT = torch.randint(3, VOCABULARY, (90,), generator=torch.Generator().manual_seed(3)).tolist()


def load(
    folder: Path,
    weights: str,
    way: Sequence[Place] = (),
    transfer: Transfer | None = None,
    *,
    reader: bool = False,
    host_experts: bool = False,
) -> LanguageModel:
    if not way:
        return load_language_model(str(folder), weights=weights, device="cpu", backend="kernels")
    to = transfer or HostTransfer()

    def stage(config: dict[str, Any], *_: object) -> Staging:
        count = int(count_layers(config))
        places = sorted(((way * count)[:count]), key=lambda place: place is not C)
        return Staging(places, to, to if reader else None, host_experts=host_experts)

    return load_language_model(str(folder), weights=weights, device="cpu", stage=stage)


def grow(model: LanguageModel, cache: Cache) -> Tensor:
    """A tree that grows in two passes, of which a path that is the text is kept: logits of its
    first pass, and of its second."""
    first = cache.length
    paths = [[0], [0, 1], [0, 2], [0, 2, 3]]
    one = _tree(model, cache, paths, [first, first + 1, None, None])
    other = _tree(model, cache, [[0, 1, 4], [0, 2, 5], [0, 1, 4, 6]], [first + 2, None, first + 3])
    cache.keep([first + slot for slot in (0, 1, 4, 6)], 3)
    return torch.cat([one, other])


def _tree(
    model: LanguageModel, cache: Cache, paths: Sequence[Sequence[int]], which: Sequence[int | None]
) -> Tensor:
    """Logits of rows by their paths, behind what is committed; `which`: of the text, or none."""
    first = cache.length
    tokens = [7 if at is None else TEXT[at] for at in which]
    positions = torch.tensor([first + len(path) - 1 for path in paths])
    seen = Paths.of(first, [[first + slot for slot in path] for path in paths])
    segment = Segment(cache, first + paths[0][-1], len(paths), seen)
    return model.forward(torch.tensor(tokens), positions, [segment])


def decode(model: LanguageModel) -> Tensor:
    """Logits of a prompt, of trees behind it, of single rows, and of what comes after the session
    has gone back."""
    cache, found = model.new_cache(len(TEXT) + 8), list[Tensor]()
    found.append(extend(model, cache, TEXT[:20]))
    cache.checkpoint()
    for _ in range(4):  # what is committed by trees waits, and then goes into the states
        found.append(grow(model, cache))
    found += [extend(model, cache, [TEXT[cache.length]]) for _ in range(3)]
    cache.truncate(cache.restorable(24))
    assert cache.length in (20, 24)
    found.append(extend(model, cache, TEXT[cache.length : 60])[-36:])
    cache.resize(200)
    found.append(grow(model, cache))
    return torch.cat(found)


def close(found: Tensor, expected: Tensor, weights: str) -> None:
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max())
    assert difference <= TOLERANCE[weights] * float(expected.abs().max())


@pytest.mark.parametrize("kind", everyday(KINDS, "deepseek_v2", "falcon_h1", "llama4_text"))
def test_wherever_a_layer_is_the_bytes_are_the_same(kind: str, tmp_path: Path) -> None:
    weights = [*TYPES][len(kind) % 3]
    write_varied(kind, tmp_path / "m", dtype=TYPES[weights])
    expected = decode(load(tmp_path / "m", weights))
    for name, way in WAYS.items():
        found = load(tmp_path / "m", weights, way)
        for _ in range(2):  # the second time the buffers go on where the first ended
            assert torch.equal(decode(found), expected), name
    if any(part in kind for part in EXPERTS):
        for way in ([R], WAYS["split"]):
            found = load(tmp_path / "m", weights, way, host_experts=True)
            assert torch.equal(decode(found), expected), way


def test_layers_that_read_anothers_keys_are_split_from_it_at_every_boundary(tmp_path: Path) -> None:
    write_tiny("gemma4_text", tmp_path / "m", **VARIED["gemma4_text small"])
    expected = decode(load(tmp_path / "m", "fp32"))
    for first in range(1, 6):  # the last three of six layers read keys of the second and third
        on_device = [S, R] * 3
        found = load(tmp_path / "m", "fp32", [C] * first + on_device[: 6 - first])
        assert torch.equal(decode(found), expected), first


@pytest.mark.skipif(not POSSIBLE, reason="this version of torch cannot be told of a device")
@pytest.mark.parametrize("kind", everyday(KINDS, "qwen3_5_text", "gpt_oss"))
def test_torch_computes_the_function_of_the_kernels(kind: str, tmp_path: Path) -> None:
    weights = [*TYPES][len(kind) % 2]
    write_varied(kind, tmp_path / "m", dtype=TYPES[weights])
    expected = decode(load(tmp_path / "m", weights))
    ways = [(WAYS["split"], any(part in kind for part in EXPERTS))]
    if ways[0][1]:
        ways.append(([R], False))
    for way, host_experts in ways:
        model = load(tmp_path / "m", weights, way, PretendedTransfer(), host_experts=host_experts)
        assert isinstance(model.back_end, Staged)
        assert isinstance(model.back_end.engine, TorchEngine)
        close(decode(model), expected, weights)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "youtu"])
def test_a_long_prompt_goes_through_a_streamed_layer_in_parts(kind: str, tmp_path: Path) -> None:
    length = 2 * PROMPT_ROWS + 5
    write_tiny(kind, tmp_path / "m", **(VARIED[kind] | {"max_position_embeddings": 600}))
    ids, logits = (TEXT * 6)[: length + 4], list[Tensor]()
    for way in ([], [C, S, S]):
        model = load(tmp_path / "m", "fp32", way)
        cache = model.new_cache(600)
        step = model.prompt_rows
        parts = [extend(model, cache, ids[at : at + step]) for at in range(0, length, step)]
        logits.append(torch.cat([*parts, extend(model, cache, ids[length:])]))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("length", everyday([12, 33], 33))
@pytest.mark.parametrize(
    ("kind", "pretended"),
    everyday(
        [
            *(("falcon_h1", False), ("youtu", False), ("gemma4_text small", False)),
            *(("qwen3_5_text", True), ("deepseek_v3", True), ("gemma4_text small", True)),
        ],
        *(("gemma4_text small", False), ("qwen3_5_text", True), ("deepseek_v3", True)),
    ),
)
def test_a_prompt_that_a_device_has_read_goes_on_on_the_cpu(
    kind: str, pretended: bool, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if pretended and not POSSIBLE:
        pytest.skip("this version of torch cannot be told of a device")
    whole, model = _with_reader(kind, pretended, tmp_path_factory.getbasetemp())
    caches = whole.new_cache(90), model.new_cache(90)
    expected = extend(whole, caches[0], TEXT[:length])[-1:]
    rows, last = torch.tensor(TEXT[:length]), torch.tensor([length - 1])
    found = model.read_apart(rows, Segment(caches[1], 0, length), wanted=(), rows=last)[0]
    caches[1].keep(range(length), length)
    after = [
        torch.cat([grow(one, cache), extend(one, cache, TEXT[cache.length :][:20])])
        for one, cache in zip((whole, model), caches, strict=True)
    ]
    if pretended:
        close(torch.cat([found, after[1]]), torch.cat([expected, after[0]]), "fp32")
    else:
        assert torch.equal(found, expected)
        assert torch.equal(*after)


@cache
def _with_reader(kind: str, pretended: bool, root: Path) -> tuple[LanguageModel, LanguageModel]:
    """A model on the CPU, and the same with a reader of prompts."""
    folder = root / f"read_{kind.split()[0]}"
    write_varied(kind, folder)
    transfer = PretendedTransfer() if pretended else None
    return load(folder, "fp32"), load(folder, "fp32", [C], transfer, reader=True)


# ---- the recurrence itself ----


def mixers() -> dict[str, ScanPlan]:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, keys, dims = 4, 2, {"key_dim": 6, "value_dim": 20}
    channels = 2 * keys * 6 + heads * 20
    numbers: dict[str, Any] = {"decay": -random(heads).exp(), "step_bias": random(heads)}
    sizes: dict[str, Any] = {"key_heads": keys, "value_heads": heads, **dims, **numbers}
    norm = {"norm": random(20), "norm_width": 20}
    return {
        "delta": ScanPlan(ScanRule.GATED_DELTA, random(4, channels), **sizes, **norm),
        "mamba": ScanPlan(
            ScanRule.SELECTIVE, random(3, channels), random(channels), **sizes, skip=random(heads)
        ),
        "channels": ScanPlan(
            ScanRule.CHANNEL_DELTA,
            random(4, channels),
            **(sizes | {"step_bias": random(heads * 6)}),
            **norm,
            low=3,
        ),
        "convolution": ScanPlan(ScanRule.SHORT_CONVOLUTION, random(3, 24)),
    }


def width_of(plan: ScanPlan) -> int:
    """The width of a mixer's input: the outputs of all matrices before it."""
    return plan.widths[0] + (plan.widths[1] + plan.decays if plan.low else 0)


class Session:
    """A session of a layer with a state, on the CPU, whose rows are computed by torch."""

    def __init__(self, plan: ScanPlan) -> None:
        other = placed(plan, [plan.shape])
        self.scan = DeviceScan(other, torch.device("cpu"))
        self.cache = MixedKVCache((), capacity=200, dtype=torch.float32, device=torch.device("cpu"))
        self.cache.states = RecurrentStates([plan.shape, plan.shape])
        self.cache.states.folded[0] = 1 << 30  # of a layer that nobody computes here

    def read(self, given: Tensor, start: int, paths: Paths | None = None) -> Tensor:
        states = self.cache.states
        assert states is not None
        states.folded[0] = states.folded[1]
        segment = Segment(self.cache, start, len(given), paths)
        out = self.scan.run([StatefulRows(segment, 0, states_of(states, segment))], given)
        states.folded[0] = states.folded[1]
        return out

    def keep(self, slots: Sequence[int]) -> None:
        self.cache.keep(slots, len(slots))


@pytest.mark.parametrize("name", ["delta", "channels", "mamba", "convolution"])
def test_a_row_that_torch_computes_is_the_same_on_every_way_to_it(name: str) -> None:
    plan = mixers()[name]
    given = torch.randn(TIMES, width_of(plan), generator=torch.Generator().manual_seed(5))
    whole = Session(plan).read(given, 0)
    for seed in range(6):
        random, session = Random(seed), Session(plan)
        while (first := session.cache.length) < TIMES - 8:
            if random.random() < 0.3:
                count = random.choice([1, 2, CHAIN + 3])
                rows = given[first : first + count]
                _same(session.read(rows, first), whole[first : first + len(rows)])
                session.keep(range(first, first + len(rows)))
                continue
            session.keep(_grown(session, given, whole, random))


class Launches(TorchDispatchMode):
    """Counts the operations that a device would be told of."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [part.alias_info for part in func._schema.returns]
        self.count += not any(alias and not alias.is_write for alias in views)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "a_row", "a_prompt"),
    [("delta", 5.5, 60), ("channels", 5.5, 60), ("mamba", 1.5, 40), ("convolution", 0, 20)],
)
def test_a_row_of_a_prompt_takes_few_operations_beside_those_for_all_rows(
    name: str, a_row: float, a_prompt: int
) -> None:
    plan, found = mixers()[name], list[int]()
    for rows in (32, 64, 128):
        session, given = Session(plan), torch.randn(rows, width_of(plan))
        with Launches() as launches:
            session.read(given, 0)
        found.append(launches.count)
    assert (found[2] - found[1]) / 64 <= a_row
    assert found[0] - 32 * a_row <= a_prompt


@pytest.mark.parametrize(("name", "a_row"), [("delta", 1), ("mamba", 1)])
def test_a_row_that_waits_takes_few_operations_in_every_pass(name: str, a_row: int) -> None:
    plan, session = mixers()[name], Session(mixers()[name])
    given, found = torch.randn(40, width_of(plan)), list[int]()
    session.read(given[:20], 0)
    session.keep(range(20))
    for slot in range(20, 26):
        with Launches() as launches:
            session.read(given[slot : slot + 1], slot)
        session.keep([slot])
        found.append(launches.count)
    assert found[-1] - found[1] <= a_row * (len(found) - 2)


@pytest.mark.parametrize("name", ["delta", "channels", "mamba", "convolution"])
def test_a_prompt_has_the_same_bytes_in_any_parts(name: str) -> None:
    """The parts are such that torch rounds all their exponentials alike on any CPU."""
    plan, cuts = mixers()[name], ([64], [16, 48], [48, 16], [16, 16, 32], [32, 32])
    given, found = torch.randn(64, width_of(plan)), list[Tensor]()
    for parts in cuts:
        session, rows = Session(plan), list[Tensor]()
        for count in parts:
            first = session.cache.length
            rows.append(session.read(given[first : first + count], first))
            session.keep(range(first, first + count))
        found.append(torch.cat(rows))
    assert all(torch.equal(rows, found[0]) for rows in found)


TIMES = 70


def _same(found: Tensor, expected: Tensor) -> None:
    """Check that two tensors agree up to how torch rounds exponentials at the ends of tensors on a
    CPU."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _grown(session: Session, given: Tensor, whole: Tensor, random: Random) -> list[int]:
    """Grow a tree of random nodes of which one path are rows of the text; the slots of a part of
    that path."""
    first, spine, nodes = session.cache.length, list[int](), list[list[int]]()
    for _ in range(random.randint(1, 2)):
        start, rows, paths, along = first + len(nodes), list[Tensor](), list[list[int]](), []
        for slot in range(start, start + random.randint(1, 6)):
            on = not nodes or random.random() < 0.5
            above = spine if on else random.choice(nodes)
            along.append(len(spine) if on else None)
            rows.append(given[first + len(spine)] if on else torch.randn(given.shape[1]))
            paths.append([*above, slot])
            nodes.append(paths[-1])
            spine += [slot] if on else []
        found = session.read(torch.stack(rows), start, Paths.of(first, paths))
        for row, depth in zip(found, along, strict=True):
            if depth is not None:
                _same(row, whole[first + depth])
    return spine[: random.randint(1, len(spine))]
