"""A large target that does not fit: what its passes cost under a cap of the device's memory, what
its substitute as a draft is worth there, and what each part of that adds. Engines only, in one
process, as a unified worker has them: the times are those of the device.

The target is read once. For every cap its layers are placed anew, resident or streamed from the
same pinned blobs.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.runtime.session.comparison import NEAR_TIE
from dovetail.workers.calibration.passes import Passes
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.devices.cuda import CudaTransfer
from dovetail.workers.devices.memory import HELD
from dovetail.workers.drafters.model import SUBSTITUTE_SHARPENING, Drafter
from dovetail.workers.drafters.shared import Lent, SharedDrafter, SharedSession
from dovetail.workers.kernels.coded import GROUP
from dovetail.workers.models.backends import staged
from dovetail.workers.models.backends.placement import Demand, Place, coded_bytes, place_layers
from dovetail.workers.models.backends.sizes import sizes_of
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.backends.stages import stage as stages
from dovetail.workers.models.backends.stages.engines import KernelEngine, TorchEngine
from dovetail.workers.models.backends.stages.stage import PromptReader, Stage
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import Kept
from dovetail.workers.models.substitutes import kept
from dovetail.workers.models.substitutes.quantize import Codes
from dovetail.workers.models.substitutes.substitute import (
    DeviceSubstitute,
    load_device_substitute,
    shared_cache,
)
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.speculation.proposal import Shape as Proposed
from dovetail.workers.verifier import Verifier
from gpu import chip
from gpu.grown import SEVEN, SMALL, Shape, grow
from gpu.report import Report
from support.drafts import DEEP, Timed, of_a_level
from support.opening import opening
from support.stacks import PROMPTS

ROWS = (1, 16, 64, 289)
CONTEXT_ROWS = 256
PROMPT_ROWS = 2048
PCIE4_GB_S = 25.0
"""The rate of 16 lanes, as measured from pinned memory on such machines; the link of the papers'
tables."""
BEAM = TreeSettings(
    policy="beam", insist=True, gamma=288, depth=48, width=6, sharpening=SUBSTITUTE_SHARPENING
)
"""SubSpec's tree."""
SMALL_BEAM = TreeSettings(
    policy="beam", insist=True, gamma=24, depth=6, width=4, sharpening=SUBSTITUTE_SHARPENING
)
KEY = bytes(16)
CACHE = "half"
"""The type of keys and values that target.cache is with weights of 16 bits."""
LOOP = 20
"""Tokens; of longer replies that repeat so many the rest does not count."""


PINNED: set[int] = set()
"""Addresses of the target's blobs, which live as long as this process."""


class PinnedOnce(CudaTransfer):
    """Blobs that are pinned already stay so when they are placed anew."""

    def pin(self, memory: Tensor) -> None:
        if memory.data_ptr() not in PINNED:
            PINNED.add(memory.data_ptr())
            super().pin(memory)


class InOrder(PinnedOnce):
    """Copies stand among what is computed, and nothing goes on beside them: the ablation's other
    side."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        target.copy_(source, non_blocking=True)
        return self.computed()


class HostInOrder(HostTransfer):
    """`InOrder` with the CPU in place of the device."""

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        done = super().copy(source, target, after)
        done.result()
        return done


@dataclass(frozen=True)
class Played:
    """A reply that was decoded."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    seconds: float
    """Seconds without those of the prompt."""
    rounds: int
    draft_s: float
    verify_s: float


def _rate(replies: Sequence[Played]) -> float:
    """Tokens a second of all of them."""
    return sum(len(reply.tokens) - 1 for reply in replies) / sum(reply.seconds for reply in replies)


def _tau(replies: Sequence[Played]) -> float:
    return sum(len(reply.tokens) - 1 for reply in replies) / sum(reply.rounds for reply in replies)


class Bench:
    """A target and its substitute."""

    def __init__(self, report: Report, device: Device, folder: Path, shape: Shape) -> None:
        self.report, self.device, self.shape = report, device, shape
        self.on_cpu, capture = (
            device.torch_device.type == "cpu",
            device.capture or (lambda function: function),
        )
        if self.on_cpu:
            vars(staged)["engine_of"] = vars(stages)["engine_of"] = lambda transfer: TorchEngine(
                transfer.device
            )  # the CPU computes as a GPU does
        self.transfer = HostTransfer() if self.on_cpu else PinnedOnce(device.torch_device)
        self.in_order = HostInOrder() if self.on_cpu else InOrder(device.torch_device)
        self.target = self._timed("target read and pinned", lambda: self._open_target(folder))
        back = self.target.back_end
        assert isinstance(back, staged.Staged)
        self.staged = back
        self.link = chip.link_gb_s(
            device.torch_device, chip.QUICK_BYTES if report.quick else chip.COPY_BYTES
        )[0]
        self.memory = chip.memory_gb_s(
            device.torch_device, chip.QUICK_BYTES if report.quick else chip.COPY_BYTES
        )
        ready: Sequence[Any] = back._stages[0]._layers
        self.layers = list(zip(back._stages[0].layout.plans, ready, strict=True))
        if find_spec("hqq") is None:
            report.note(
                "codes",
                "by rounding to the nearest: the hqq package is not installed, and tau is "
                "lower than with it",
            )
            vars(kept).update(check_installed=lambda: None, quantise=nearest)
        made = self._timed(
            "substitute made", lambda: load_device_substitute(self.target, capture, weights="int4")
        )
        self.substitute = made[0]
        report.note(
            "of that quantised",
            f"{made[1].weights / 1e9:.2f} billion weights in {made[1].seconds:.1f} s",
        )
        own = self.substitute.back_end
        assert isinstance(own, DeviceSubstitute)
        self.own, self._coded = own, list(own._coded)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": turns[0]}], add_generation_prompt=True
            )["input_ids"]
            for turns in PROMPTS
        ]

    def place(self, resident: int, transfer: HostTransfer | PinnedOnce | None = None) -> None:
        """Keep so many layers on the device, spread evenly; the others pass through."""
        count = len(self.layers)
        stage = Stage(0, 0, self.staged.engine, transfer or self.transfer)
        self.own._coded[:] = self._coded
        if self.own.levels is not None:
            self.own.levels = replace(self.own.levels)  # with nothing captured
        self.staged._stages[0] = stage
        gc.collect()
        if not self.on_cpu:
            torch.cuda.empty_cache()
        for index, (plan, ready) in enumerate(self.layers):
            stage.take(
                plan,
                ready._blob,
                streamed=not (index + 1) * resident // count > index * resident // count,
            )
        stage.finish(self.staged._staging.capture, self.staged._cache)
        for index, layer in stage.settled.items():
            self.own._coded[index] = layer.roughly

    @property
    def streamed_bytes(self) -> int:
        """The bytes that a pass streams."""
        return sum(blob.numel() for blob in self.staged._stages[0]._blobs)

    def passes(self, model: LanguageModel, rows: Sequence[int], times: int = 5) -> dict[int, float]:
        """Median seconds of a pass over so many rows behind a context."""
        over = Passes(model, CONTEXT_ROWS + max(rows) + 8)
        over.fill(CONTEXT_ROWS)
        over.once(max(rows))
        return {count: statistics.median(over.once(count) for _ in range(times)) for count in rows}

    def drafted_level(self, tree: TreeSettings, *, quick: bool) -> float:
        """Median seconds of a level of the substitute's tree, with all that the host does."""
        drafts = Timed(Drafter(self.substitute, Spans()), tree.width, 0.0)

        def of_proposal(depth: int) -> float:
            return statistics.median(drafts.seconds(depth) for _ in range(3 if quick else 9))

        of_proposal(DEEP)  # what it takes is captured
        return of_a_level(of_proposal)

    def play(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        tree: TreeSettings | None,
        shared: bool = True,
        temperature: float = 0.0,
    ) -> Played:
        """Decode; without a tree by the target alone."""
        verifier = Verifier(self.target, Spans())
        sampling = Sampling(temperature=temperature)
        shape = tree or TreeSettings(gamma=0, depth=1, width=1)
        drafter: Drafter | None = None
        if tree is not None and shared:
            drafter = SharedDrafter(self.substitute, Spans(), sharpening=SUBSTITUTE_SHARPENING)
            drafter.borrow = lambda number: _lent(verifier, number)
            verifier.rows_beside = drafter.rows_beside
        elif tree is not None:
            drafter = Drafter(self.substitute, Spans())
        options = {
            "key": KEY,
            "capacity": len(prompt) + tokens + shape.most_nodes + 2,
            "sampling": sampling,
            "tree": shape,
        }
        order = opening(1, prompt, **options, vocabulary_size=self.target.vocabulary_size)
        (first,) = (event for event in verifier.open(order) if isinstance(event, First))
        session = None if drafter is None else drafter.open(order)
        if isinstance(session, SharedSession):
            session.number = 1
        said, margins, accepted = [first.token], [first.margin], tuple[int, ...]()
        rounds, draft_s, verify_s = 0, 0.0, 0.0
        start = time.perf_counter()
        while len(said) < tokens and not _loops(said):
            began = time.perf_counter()
            offered, parents = tuple[int, ...](), tuple[int, ...]()
            if drafter is not None and session is not None:
                tree_of = drafter.draft(
                    session, accepted, said[-1], Proposed(shape.gamma, shape.depth, shape.width)
                ).tree
                offered, parents = tree_of.tokens, tree_of.parents
            drafted = time.perf_counter()
            rounds += 1
            item = VerifyItem(
                session=1,
                round=rounds,
                prefix=len(prompt) + len(said),
                tokens=offered,
                parents=parents,
            )
            (verdict,) = verifier.verify([item])
            assert isinstance(verdict, Verdict), verdict
            accepted = verdict.item.accepted
            said += [*(offered[node] for node in accepted), verdict.item.bonus]
            margins += verdict.item.margins
            draft_s, verify_s = draft_s + drafted - began, verify_s + time.perf_counter() - drafted
        return Played(
            tuple(said), tuple(margins), time.perf_counter() - start, rounds, draft_s, verify_s
        )

    def _open_target(self, folder: Path) -> LanguageModel:
        def stage(config: Any, *_: Any) -> Staging:
            places = [Place.STREAMED] * config["num_hidden_layers"]
            return Staging(places, self.transfer, capture=self.device.capture)

        return load_language_model(
            str(folder), weights="half", device="cpu", stage=stage, cache=CACHE
        )

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.report.note(name, f"{time.perf_counter() - start:.1f} s")
        return result


def nearest(weight: Tensor, bits: int, device: torch.device) -> Codes:
    """Codes by the extremes of each group."""
    rows, inputs = weight.shape
    groups = -(-inputs // GROUP)
    parts = torch.nn.functional.pad(
        weight.to(device).float(), (0, groups * GROUP - inputs), mode="replicate"
    ).view(rows, groups, GROUP)
    low, high = parts.amin(2), parts.amax(2)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-6).half()
    codes = (
        ((parts - low[..., None]) / scales.float()[..., None])
        .round()
        .clamp(0, (1 << bits) - 1)
        .to(torch.uint8)
    )
    offsets = (low + (1 << bits - 1) * scales.float()).half()
    return Codes(bits, inputs, codes.view(rows, -1).cpu(), scales.cpu(), offsets.cpu())


def _loops(tokens: Sequence[int]) -> bool:
    """Return whether the last tokens were said before: a tiny model goes round in circles when it
    is greedy, and what comes then is too easily guessed."""
    last = tuple(tokens[-LOOP:])
    return len(tokens) > LOOP and any(
        tuple(tokens[at : at + LOOP]) == last for at in range(len(tokens) - LOOP)
    )


def _lent(verifier: Verifier, number: int) -> Lent:
    log, cache, first = verifier.lend(number)
    return Lent(log, shared_cache(cache), first)


def run(
    report: Report,
    device: Device,
    caps: Sequence[float],
    work: Path,
    progress: Callable[[str], None],
) -> None:
    """Everything."""
    shape = SMALL if report.quick else SEVEN
    if device.torch_device.type != "cpu":
        _cap(device, max(caps))
    progress("the target is made")
    size = grow(shape, work / "model", device.torch_device)
    report.note(
        "target",
        f"{shape.layers} layers of {shape.hidden} states and {shape.units} units, "
        f"{size / 1e9:.2f} GB of fp16",
    )
    bench = Bench(report, device, work / "model", shape)
    for cap in caps:
        progress(f"{cap:g} GB")
        try:
            _under(bench, cap)
        except (SettingsError, torch.OutOfMemoryError) as error:
            report.check(f"{cap:g} GB", False, str(error).splitlines()[0])
    if not bench.on_cpu:
        _cap(device, max(caps))
    progress("ablation")
    _ablation(bench)
    progress("prefill")
    _prefill(bench)


def _cap(device: Device, cap: float) -> None:
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 1e9 / total), device.torch_device)
    torch.cuda.reset_peak_memory_stats(device.torch_device)


def _under(bench: Bench, cap: float) -> None:
    """All figures of one cap of the device's memory, of which every layer has its codes from one
    cap to the next; on the CPU so many hundredths of the layers stay."""
    report, device = bench.report, bench.device
    config = {**bench.staged._model.config.to_dict(), "dtype": "float16"}
    sizes = sizes_of(config, "fp16", CACHE)
    if bench.on_cpu:
        resident = min(len(bench.layers), int(cap) // 4 - 2)
    else:
        bench.place(0)
        _cap(device, cap)
        resident = place_layers(
            sizes,
            Demand(device=device.name, device_bytes=int(cap * 1e9) - coded_bytes(sizes, "fp16", 4)),
        ).resident
    bench.place(resident)
    layers = len(bench.layers)
    report.note(
        f"{cap:g} GB: placement",
        f"{resident} of {layers} layers resident, {bench.streamed_bytes / 1e9:.2f} GB streamed "
        "a pass",
    )
    target = bench.passes(bench.target, ROWS)
    for rows, taken in target.items():
        report.note(
            f"{cap:g} GB: {'t_T' if rows == 1 else f'T_V({rows})'}", f"{1e3 * taken:.2f} ms"
        )
    if resident < layers:
        report.figure(
            f"{cap:g} GB: streaming, share of a pinned copy",
            100 * bench.streamed_bytes / target[1] / 1e9 / bench.link,
            " %",
            least=90,
        )
    tree = SMALL_BEAM if report.quick else BEAM
    level = bench.passes(bench.substitute, [tree.width])[tree.width]
    step_bytes = _step_bytes(bench, resident, sizes.head)
    report.note(
        f"{cap:g} GB: t_D of a level of {tree.width} rows",
        f"{1e3 * level:.2f} ms, {step_bytes / 1e9:.2f} GB",
    )
    report.figure(
        f"{cap:g} GB: draft step, share of memory bandwidth",
        100 * step_bytes / level / 1e9 / bench.memory,
        " %",
        least=60,
    )
    step = bench.drafted_level(tree, quick=report.quick)
    report.note(
        f"{cap:g} GB: t_D with its ranking and the growth of the tree", f"{1e3 * step:.2f} ms"
    )
    HELD.let_go()
    _rounds(bench, cap, tree, target, step)
    if not bench.on_cpu:
        peak = torch.cuda.max_memory_reserved(device.torch_device) / 1e9
        report.check(f"{cap:g} GB: peak memory", peak <= cap, f"{peak:.2f} GB", f"<= {cap:g} GB")


def _step_bytes(bench: Bench, resident: int, head: int) -> int:
    """Return the bytes that a draft step reads: codes, the target's own layers, the head, and keys
    and values."""
    shape, layers = bench.shape, len(bench.layers)
    weights = shape.bytes // 2 // layers
    coded = weights // GROUP * (GROUP // 2 + 4)
    cache = bench.own.new_cache(1)
    assert isinstance(cache, KVCache)
    return (
        (layers - resident) * coded + resident * 2 * weights + head + cache.row_bytes * CONTEXT_ROWS
    )


def _rounds(
    bench: Bench, cap: float, tree: TreeSettings, target: dict[int, float], step_s: float
) -> None:
    """Compare plain offloading with speculation, and with what the formula predicts. `target`:
    seconds of its passes by rows; `step_s`: seconds of a draft step."""
    report, quick = bench.report, bench.report.quick
    plain_tokens, tokens = (6, 24) if quick else (12, 160)
    for temperature in (0.0,) if quick else (0.0, 0.6):
        longest = max(bench.prompts[:4], key=len)
        bench.play(longest, tokens, tree=tree, temperature=temperature)  # its passes are captured
        plain = [
            bench.play(prompt, plain_tokens, tree=None, temperature=temperature)
            for prompt in bench.prompts[:1]
        ]
        drafted = [
            bench.play(prompt, tokens, tree=tree, temperature=temperature)
            for prompt in bench.prompts[: 2 if quick else 4]
        ]
        name = f"{cap:g} GB, T = {temperature:g}"
        report.check(
            f"{name}: same tokens as the target alone",
            *_compared(plain[0], drafted[0]),
            "the same, or parted at a near-tie",
        )
        plain_rate, rate, tau = _rate(plain), _rate(drafted), _tau(drafted)
        rounds = sum(d.rounds for d in drafted)
        report.note(f"{name}: plain offloading", f"{plain_rate:.2f} tokens/s")
        report.note(f"{name}: SubSpec", f"{rate:.2f} tokens/s, tau {tau:.2f} over {rounds} rounds")
        parts = (
            1e3 * sum(d.draft_s for d in drafted) / rounds,
            1e3 * sum(d.verify_s for d in drafted) / rounds,
        )
        report.note(
            f"{name}: a round",
            f"draft {parts[0]:.1f} ms ({parts[0] / tree.depth:.2f} a level), verify "
            f"{parts[1]:.1f} ms",
        )
        verified = target[289] if tree.gamma == 288 else target[16]
        ratio, predicted = rate / plain_rate, tau * target[1] / (tree.depth * step_s + verified)
        bound = {0.0: 9.0, 0.6: 8.0}[temperature] if cap == 8 else None
        report.figure(f"{name}: SubSpec over plain offloading", ratio, least=bound)
        report.figure(f"{name}: formula, off by", 100 * abs(ratio / predicted - 1.0), " %", most=10)
        streams = bench.streamed_bytes / 1e9 / PCIE4_GB_S
        slow = tau * max(target[1], streams) / (tree.depth * step_s + max(verified, streams))
        report.note(
            f"{name}: the same by the formula at PCIe 4 x16",
            f"{slow:.2f} ({PCIE4_GB_S:g} GB/s; here {bench.link:.1f} GB/s and {predicted:.2f})",
        )


def _compared(alone: Played, drafted: Played) -> tuple[bool, str]:
    """Return whether two runs are the same as far as the shorter goes, up to a near-tie, and how
    that reads."""
    pairs = zip(alone.tokens, drafted.tokens, alone.margins, drafted.margins, strict=False)
    parted = next(
        (
            (position, max(a, b))
            for position, (one, other, a, b) in enumerate(pairs)
            if one != other
        ),
        None,
    )
    if parted is None:
        return True, f"{min(len(alone.tokens), len(drafted.tokens))} tokens, the same"
    return parted[1] < NEAR_TIE, f"they part at token {parted[0]}, margin {parted[1]:.1e}"


def _ablation(bench: Bench) -> None:
    """SubSpec's table 2: each part on top of those before it, with all layers streamed."""
    quick = bench.report.quick
    tokens, tree = (24, SMALL_BEAM) if quick else (96, BEAM)
    flat = tree.model_copy(update={"sharpening": 1.0})
    cases = (
        ("base", flat, False, bench.in_order),
        ("+ shared cache", flat, True, bench.in_order),
        ("+ sharpening", tree, True, bench.in_order),
        ("+ asynchronous transfer", tree, True, bench.transfer),
    )
    bench.place(0)
    plain = _rate([bench.play(bench.prompts[0], 4 if quick else 8, tree=None)])
    for name, shape, shared, transfer in cases:
        bench.place(0, transfer)
        played = [
            bench.play(prompt, tokens, tree=shape, shared=shared)
            for prompt in bench.prompts[: 2 if quick else 4]
        ]
        rate, tau = _rate(played), _tau(played)
        bench.report.note(
            f"ablation: {name}",
            f"{rate:.2f} tokens/s, {rate / plain:.2f} of plain offloading, tau {tau:.2f}",
        )


def _prefill(bench: Bench) -> None:
    """A long prompt through some layers: read by the device for the CPU, and by the CPU's
    kernels."""
    rows, few = (64, 2) if bench.report.quick else (PROMPT_ROWS, 4)
    layers = [(plan, ready._blob) for plan, ready in bench.layers[:few]]
    bench.place(0)
    HELD.let_go()
    streamed = PromptReader(bench.transfer, layers, torch.float32)
    stage = Stage(0, 0, KernelEngine(), None)
    for plan, blob in layers:
        stage.take(plan, blob, streamed=False)
    states = torch.randn(
        rows, bench.shape.hidden, generator=torch.Generator().manual_seed(1)
    ) / math.sqrt(bench.shape.hidden)
    cache = stage.new_cache(rows, torch.float32)
    whole = Segment(stages.StagedCache([cache]), 0, rows)
    seen = stages.StagedPass(torch.arange(rows), [whole])
    found: list[Tensor] = []
    read = chip.seconds_of(
        bench.device.torch_device,
        lambda: found.append(streamed.run(states.clone(), seen, Kept())),
        times=2,
    )
    start = time.perf_counter()
    expected = stage.run(states.clone(), seen, Kept())
    own = time.perf_counter() - start
    off = float((found[0].cpu() - expected).norm() / expected.norm())
    bench.report.check(
        f"prefill of {rows} tokens: the device's states against the kernels'",
        off < 1e-3,
        f"{off:.1e}",
        "< 1e-3",
    )
    bench.report.figure(
        f"streamed prefill of {rows} tokens over the CPU's with {torch.get_num_threads()} threads",
        own / read,
        least=5,
    )
