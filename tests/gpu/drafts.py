"""Every kind of draft on a device, through real processes: the replies are the target's own, each
is drafted for to its end, and tau is as on the CPU.

Eagle, Dovetail and the small model are those of the demonstration; heads of the other kinds have
random weights, which nothing is accepted of, so that of them only the tokens, and that they draft,
mean anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from dovetail.protocol.errors import DovetailError
from dovetail.protocol.settings import TreeSettings
from gpu.margins import TIES, Replies, compare, replies_of
from gpu.report import Report
from support.heads import VARIANTS, Variant, write_head
from support.stacks import running

TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=10)
TAU = 0.9
"""The least share of the CPU's tau: rounding and narrower weights cost little."""
BESIDE = 4
"""Prompts of the requests that run together, two each."""
SIZES = {
    "hidden": 256,
    "target_width": 256,
    "vocabulary": 4096,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "intermediate": 512,
    "gain": 1.0,
}
"""The sizes of a head for the demonstration's target."""


@dataclass(frozen=True)
class Kind:
    """A draft: its flags, and whether it has learned its target."""

    flags: Mapping[str, str]
    trained: bool = True
    weights: tuple[str, ...] = ("auto",)


def kinds(folder: Path) -> dict[str, Kind]:
    """The drafts by name; heads of random weights are written to `folder`."""
    found = {
        "small": Kind({"draft.kind": "small"}, weights=("fp16", "bf16")),
        "eagle": Kind({"draft.kind": "eagle"}, weights=("fp16", "int8")),
        "dovetail": Kind({"draft.kind": "dovetail"}, weights=("fp16", "int4")),
    }
    for name, contrast in (
        ("eagle3", True),
        ("jakiro", True),
        ("jakiro", False),
        ("jakiro-star", True),
    ):
        head = write_head(folder / f"{name}-{contrast}", variant(name))
        flags = {"draft.model": str(head)} | ({} if contrast else {"draft.contrast": "false"})
        found[name if contrast else f"{name} without contrast"] = Kind(flags, trained=False)
    if find_spec("hqq") is not None:
        found["substitute"] = Kind({"draft.kind": "substitute"}, weights=("int4",))
    return found


def variant(name: str) -> Variant:
    """A variant of `support.heads` for the demonstration's target."""
    taps = (
        {"draft_vocabulary": 1024, "taps": (2, 4, 6)}
        if name == "eagle3"
        else {"draft_vocabulary": 4096}
    )
    return replace(VARIANTS[name], **SIZES, **taps)  # type: ignore[arg-type]


def run(report: Report, device: str, folder: Path, progress: Callable[[str], None]) -> None:
    """Every kind and type of weights, greedily and sampled; and, of those that have learned their
    target, all requests together, whose levels share passes on the device."""
    prompts, tokens = (1, 16) if report.quick else (2, 64)
    beside = 1 if report.quick else BESIDE
    with running({"draft.kind": "none"}) as client:
        alone = replies_of(client, beside, tokens, None)
    for name, kind in kinds(folder).items():
        here: Replies | None = None
        for weights in kind.weights[:1] if report.quick else kind.weights:
            called = f"{name}, {weights}"
            progress(called)
            try:
                if kind.trained and here is None:
                    with running({**kind.flags, "draft.device": "cpu"}) as client:
                        here = replies_of(client, prompts, tokens, TREE)
                with running(
                    {**kind.flags, "draft.device": device, "draft.weights": weights}
                ) as client:
                    found = replies_of(client, prompts, tokens, TREE)
                    together: Replies = {}
                    if kind.trained:
                        together = replies_of(client, beside, tokens, TREE, together=True)
            except DovetailError as error:
                report.check(called, False, str(error).splitlines()[0])
                continue
            compare(report, called, found, alone, TIES["fp32"])
            _check_drafting(report, called, found, here)
            if together:
                compare(report, f"{called}, side by side", together, alone, TIES["fp32"])
                _check_drafting(report, f"{called}, side by side", together, None)


def _check_drafting(report: Report, name: str, found: Replies, here: Replies | None) -> None:
    """Check that every reply was drafted for to its end, and report how well."""
    failures = [
        reply.result.draft_failure
        for reply in found.values()
        if reply.result.draft_failure is not None
    ]
    nodes = sum(reply.result.drafted_tokens for reply in found.values())
    said = failures[0].error if failures else f"{nodes} nodes verified"
    report.check(f"{name}: drafting", not failures and nodes > 0, said, "no failure")
    for temperature in sorted({temperature for _, temperature in found}):
        tau = _tau(found, temperature)
        if here is None:
            report.note(f"{name}: tau at T = {temperature:g}", f"{tau:.2f}")
        else:
            report.figure(
                f"{name}: tau at T = {temperature:g} over the CPU's {_tau(here, temperature):.2f}",
                tau / _tau(here, temperature),
                least=TAU,
            )


def _tau(replies: Replies, temperature: float) -> float:
    """Tokens that a round brought."""
    results = [reply.result for (_, heat), reply in replies.items() if heat == temperature]
    return sum(result.completion_tokens - 1 for result in results) / sum(
        result.rounds for result in results
    )
