"""Describes a plan: each alternative, the reason for its speed, the settings that start it, and
whether speculation is worth it."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.planning.designs import LOOKUP
from dovetail.launch.planning.planner import Link, Option
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import SHORT_FORMS
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.gguf.view import FILE, spelled

MS = 1e3
GIGA = 1e9
SHARD = "shard"  # the value of target.numa that spreads a target over memory nodes
WORTH = 1.02  # ratio to the target alone: less is within the variation of two runs


def placement(one: Option, device: str) -> str:
    parts = []
    if one.on_cpu:
        parts.append(f"cpu 0-{one.on_cpu - 1}" + ("" if one.computed else " and head"))
    if one.computed:
        kinds = ((one.resident, "resident"), (one.streamed, "streamed"))
        how = ", ".join(f"{count} {word}" for count, word in kinds if count)
        parts.append(f"{device} {one.on_cpu}-{one.layers - 1} ({how}) and head")
        if one.host_experts:
            parts.append("experts on the cpu")
    if one.nodes > 1:
        parts.append(f"over {one.nodes} memory nodes")
    words = ", ".join(parts)
    return f"{words}; {one.draft.name}" if one.draft is not None else words


def why(one: Option) -> str:
    """Return its bottleneck."""
    rows = counted(1 if one.tree is None else one.tree.gamma + 1, "row")
    passes = f"{_ms(one.verify_s)} a pass of {rows}"
    drafting = f", {_ms(one.draft_s)} of drafting waited for" if one.tree is not None else ""
    bound = {
        "draft": "drafting takes longest",
        "link": f"the link is busy for {_ms(one.copy_s)} a round",
        "cpu": "layers on the CPU take longest",
        "device": "layers on the device take longest",
    }[one.bound]
    return f"{passes}{drafting}: {bound}"


def tree_of(one: Option) -> str:
    tree = one.tree
    return "-" if tree is None else f"{tree.gamma}/{tree.depth}/{tree.width} {tree.policy}"


def _ms(seconds: float) -> str:
    return f"{figure(seconds * MS)} ms"


def figure(value: float) -> str:
    """Format with three digits and no exponent."""
    return f"{value:.3g}" if value < 1000.0 else f"{value:.0f}"


def settings(one: Option, device: str, draft_device: str, base: Configuration) -> dict[str, Any]:
    """Dotted names and values of the settings that start it, in order."""
    about = ["target.model", "target.weights", "target.threads", "target.numa"]
    about += ["target.cache", "target.context"]
    if base.settings.target.weights in (INT4, FILE):
        about.append("target.activations")
    found: dict[str, Any] = {
        name: base.value(name) for name in about if base.value(name) != SETTINGS[name].default
    }
    found |= _target(one, device)
    if one.draft is None or one.tree is None:
        found["draft.kind"] = "none"
    else:
        own = one.candidate.settings
        found |= {
            f"draft.{name}": value
            for name in ("kind", "model", "weights")
            if (value := getattr(own, name)) != type(own).model_fields[name].default
        }
        if one.draft.shares:
            found["draft.share"] = True
        elif own.kind != LOOKUP:
            found["draft.device"] = draft_device
        sizes = ("policy", "gamma", "depth", "width")
        found |= {f"tree.{name}": getattr(one.tree, name) for name in sizes}
    for name in found.keys() & {"target.model", "draft.model"}:
        found[name] = spelled(found[name])
    return {name: found[name] for name in SETTINGS if name in found}


def _target(option: Option, device: str) -> dict[str, Any]:
    if option.nodes > 1:
        return {"target.numa": SHARD}
    if not option.computed:
        return {}
    resident = {"target.resident": option.resident}
    if not option.host_experts and not option.on_cpu:
        return {"target.device": device, **resident}
    parts = {"target.split.experts_on_cpu": True} if option.host_experts else {}
    split = {"target.split.device": device, "target.split.layers": option.computed}
    return {**split, **parts, **resident}


def serve_command(found: Mapping[str, Any], *more: str) -> str:
    """Return the command that serves with these settings. Dynamic trees are left to the policy of
    `serve`, which adapts their size."""
    own = found.get("tree.policy") == "dynamic"
    shown = {name: value for name, value in found.items() if not (own and name.startswith("tree."))}
    if "draft.model" in shown:
        shown.pop("draft.kind", None)
    flags = (f"{_short(name)}={SETTINGS[name].flag_text(shown[name])}" for name in shown)
    return shlex.join(["dovetail", "serve", *flags, *more])


def _short(name: str) -> str:
    draft = name in ("draft.kind", "draft.model")
    return "--draft" if draft else SHORT_FORMS.get(name, f"--{name}")


def verdict(
    found: Sequence[Option],
    size: int,
    link: Link | None,
    layer_bytes: int,
    *,
    dense: bool = True,
) -> list[str]:
    """Return which wins, whether speculation is worth it, and for a dense target whether to offload
    instead (Dovetail paper, Appendix B); `size`: bytes that a pass reads."""
    best, alone = found[0], next((one for one in found if one.candidate is None), None)
    lacks = "" if best.draft is None else best.candidate.lacks.partition(":")[0]
    wins = f"{best.name} wins{f', but its draft {lacks}' if lacks else ''}"
    said = [f"{wins}: {figure(best.tokens_per_s)} tokens/s; {why(best)}"]
    if best.draft is not None and best.candidate.kind == LOOKUP:
        said.append("no other known draft pays off; a look-up takes almost no time")
    elif alone is not None and best is not alone:
        gain = best.tokens_per_s / alone.tokens_per_s
        worth = "is worth it" if gain >= WORTH else "gains almost nothing here"
        other = f"{alone.name}, {figure(alone.tokens_per_s)} tokens/s"
        said.append(f"speculation {worth}: {gain:.2f} times the best without a draft ({other})")
    elif alone is not None:
        cause = "no draft was considered, or none fits next to the target"
        if any(one.candidate is not None for one in found):
            cause = "no draft pays off"
        said.append(f"speculation is not worth it here: {cause}")
    if (over := _over_nodes(found)) is not None:
        said.append(over)
    mixed = next((one for one in found if one.on_cpu and one.candidate is not None), None)
    if mixed is not None and dense:
        copy_s = 0.0 if link is None else link.layer_s(1)
        bus = layer_bytes / copy_s / GIGA if copy_s else None
        judged = against_offloading(size * mixed.tokens_per_s / GIGA, bus)
        both = f"heterogeneous speculation ({mixed.name}) against offloading"
        said.append(f"{both} (Appendix B, equation 6): {judged}")
    return said


def _over_nodes(found: Sequence[Option]) -> str | None:
    """Describe the gain from spreading the target over memory nodes; None if it was not considered,
    or nothing else was."""
    spread = next((one for one in found if one.nodes > 1), None)
    other = next((one for one in found if one.nodes == 1), None)
    if spread is None or other is None:
        return None
    gain = spread.tokens_per_s / other.tokens_per_s
    best = f"the best on one ({other.name}, {figure(other.tokens_per_s)} tokens/s)"
    nodes = f"over {spread.nodes} memory nodes (target.numa = {SHARD!r})"
    return f"{nodes}: {gain:.2f} times {best}"


def against_offloading(needed_gb_s: float, bus_gb_s: float | None) -> str:
    """Return whether heterogeneous speculation is right, and why (Dovetail paper, equation 6).
    `needed_gb_s`: rate at which offloading is as fast; `bus_gb_s`: None without accelerator."""
    needed = f"{needed_gb_s:.1f} GB/s"
    if bus_gb_s is None:
        return f"there is no accelerator to stream the weights to (its bus would carry {needed})"
    if bus_gb_s < needed_gb_s:
        bus = f"a bus that carries {bus_gb_s:.1f} at best"
        return f"right: offloading a token a pass would need {needed} over {bus}"
    bus = f"the bus carries up to {bus_gb_s:.1f} GB/s"
    return f"wrong: {bus}, and offloading a token a pass draws level at {needed_gb_s:.1f}"


def told(
    one: Option, device: str, found: Mapping[str, Any], alone: Option | None
) -> dict[str, Any]:
    """An alternative in the format of `--json`."""
    tree, candidate = one.tree, one.candidate
    return {
        "name": one.name,
        "placement": placement(one, device),
        "tokens_per_s": one.tokens_per_s,
        "tau": one.tau,
        "speedup": one.tokens_per_s / alone.tokens_per_s if alone is not None else None,
        "policy": tree and tree.policy,
        "gamma": tree.gamma if tree is not None else 0,
        "depth": tree and tree.depth,
        "width": tree and tree.width,
        "blocks": candidate and candidate.blocks,
        "layers": {"cpu": one.on_cpu, "resident": one.resident, "streamed": one.streamed},
        "round_ms": {
            name: getattr(one, f"{name}_s") * MS for name in ("draft", "verify", "beside")
        },
        "memory_nodes": one.nodes,
        "vram_gb": one.device_bytes / GIGA,
        "ram_gb": one.host_bytes / GIGA,
        "why": why(one),
        "acceptance": candidate and candidate.acceptance.origin,
        "lacks": candidate.lacks if candidate is not None else "",
        "settings": dict(found),
    }
