"""Compares what was reached with what the hardware and the method allow at best; and the inequality
of the Dovetail paper's Appendix B. Pure: numbers in and out.

A pass over M rows takes T_p = bytes / bandwidth for the weights and T_c = 2 M weights / peak for
the arithmetic, and all in all between the larger of the two and their sum: T_V = max(T_c, T_p) +
beta min(T_c, T_p) (equations 4 and 5). Of a model with experts, T_p counts the weights that M rows
read, and T_c those that a row goes through; of one whose layers have states, both count these too.
Offloading streams the weights over the bus, in P / B_p a pass. Speculation across two devices is
right where a token costs less than that (equation 6).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.protocol.calibration import (
    STATELESS,
    WEIGHT_BYTES,
    LeastTime,
    MachineLimits,
    StateTraffic,
)
from dovetail.protocol.experts import DENSE, Mixture, count_experts
from dovetail.protocol.settings import byte_count
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.composite import is_composite, renamed, text_part
from dovetail.workers.models.checkpoints.footprint import linears_bytes, read_tensors
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.recurrent.sizes import count_layers as count_layers_of
from dovetail.workers.models.recurrent.sizes import traffic_of

FP32_BYTES = 4
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight", "embeddings.weight")
"""Tables of which a pass reads a row a token, unless the output head is the same table."""
TEXT = ("model.embed_tokens.", "model.layers.", "lm_head.")
"""Beginnings of names in the language model of a checkpoint of several parts."""
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
BALANCED = 0.1
"""Closer to each other than this, neither T_c nor T_p is said to bound a round."""


@dataclass(frozen=True)
class Model:
    """The linears of a target: what a pass reads and multiplies."""

    parameters: int
    weights: str
    """Type of the weights, as the setting target.weights names it."""
    mixture: Mixture = DENSE
    states: StateTraffic = STATELESS
    size: int = 0
    """The bytes of all of them where they are the blocks of a file."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all of them."""
        return self.size or round(self.parameters * WEIGHT_BYTES.get(self.weights, FP32_BYTES))

    @property
    def active(self) -> int:
        """Return how many of them a row goes through."""
        return round(self.parameters * self.mixture.active)

    def bytes_read(self, rows: float) -> float:
        """Return the bytes that a pass over so many rows reads."""
        return self.bytes * self.mixture.read(rows)

    def with_weights(self, weights: str) -> "Model":
        """Return the same weights in another type."""
        return replace(self, weights=weights, size=0)


def read_model(folder: Path | None, weights: str, inflation: str) -> Model | None:
    """The target in a folder, whose linears may be inflated to a size in fp32; None where neither
    tells how many weights it has."""
    if inflation:
        return Model(byte_count(inflation) // FP32_BYTES, weights)
    return None if folder is None else linears_of(folder, weights)


def has_16_bits(folder: Path | None) -> bool:
    """Return whether the matrices of a checkpoint are stored in 16 bits."""
    if folder is None:
        return False
    kinds = {tensor.kind for tensor in read_tensors(folder) if len(tensor.shape) > 1}
    return bool(kinds & {"F16", "BF16"})


def count_layers(folder: Path | None) -> int:
    """Decoder layers of the checkpoint in a folder; 0 where it does not say."""
    if folder is None or not (folder / "config.json").is_file():
        return 0
    told = text_part(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return int(count_layers_of(told) or told.get("n_layer") or 0)


def linears_of(folder: Path, weights: str) -> Model | None:
    """Return the weights of all matrices of a checkpoint, from the headers of its files: a
    table of embeddings where it is the output head too, and the experts' in whichever form. None:
    unknown."""
    sizes: dict[str, int] = {}
    stacked, tensors = set(), read_tensors(folder)
    for tensor in tensors:
        if len(tensor.shape) in (2, 3, 4) and not tensor.name.endswith("_bias"):
            sizes[tensor.name] = tensor.numbers
            stacked |= {tensor.name} if len(tensor.shape) > 2 else set()
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if composite := is_composite(content):
        sizes = {n: size for n, size in renamed(content, sizes).items() if n.startswith(TEXT)}
        content = text_part(content)
    tied = not any(name.endswith(HEADS) for name in sizes)
    tables = [name for name in sizes if name.endswith(EMBEDDINGS)]
    left_out = [name for name in tables if not tied or name.endswith("wpe.weight")]
    total = sum(size for name, size in sizes.items() if name not in left_out)
    routed = sum(
        size for name, size in sizes.items() if name in stacked or "experts" in name.split(".")
    )
    if not total:
        return None
    count, chosen = count_experts(content)
    mixture = Mixture(count, chosen, routed / total) if count > 1 and routed else DENSE
    own = [FILE] if composite else [FILE, INT4]  # whose other parts stay out of its layers
    blocks = next((name for name in own if weights.startswith(name)), "")
    size = linears_bytes(tensors, blocks) if blocks else 0
    return Model(total, weights, mixture, traffic_of(content), size)


@dataclass(frozen=True)
class Roofline:
    """The two least times of a pass over M rows of a model, on cores of these limits."""

    model: Model
    limits: MachineLimits
    library: bool = False
    """True if a library computes it, which multiplies 16-bit weights in their own type."""

    @property
    def peak_gflop_s(self) -> float:
        """Return the peak of the arithmetic that is used."""
        return self.limits.peak_of(self.model.weights, library=self.library)

    @cached_property
    def least(self) -> LeastTime:
        """The least time of a pass: T_p at E_m = 1, and T_c at E_c = 1."""
        model = self.model
        return self.limits.roofline(
            model.parameters,
            model.weights,
            library=self.library,
            mixture=model.mixture,
            states=model.states,
            size=model.bytes,
        )

    def least_s(self, rows: float) -> float:
        return self.least.at(rows)

    @property
    def crossover(self) -> float:
        """Rows at which reading and computing take the same time."""
        return self.least.crossover


@dataclass(frozen=True)
class Pass:
    """A pass of the target beside what the hardware allows; equations 4 and 5."""

    rows: float
    t_v_s: float
    t_p_s: float
    t_c_s: float
    crossover_rows: float

    @classmethod
    def of(cls, roofline: Roofline, rows: float, t_v_s: float) -> "Pass":
        least = roofline.least
        return cls(rows, t_v_s, least.reading_s(rows), rows * least.row_s, roofline.crossover)

    @property
    def bound(self) -> str:
        """Return what takes longer: "memory", "compute", or "both" where neither does by a
        tenth."""
        if abs(self.t_c_s - self.t_p_s) <= BALANCED * max(self.t_c_s, self.t_p_s):
            return "both"
        return "compute" if self.t_c_s > self.t_p_s else "memory"

    @property
    def efficiency(self) -> float:
        """The least possible time over the measured one."""
        return max(self.t_c_s, self.t_p_s) / self.t_v_s

    @property
    def overlap(self) -> float:
        """beta: how much of the shorter of the two is not hidden behind the longer; above 1 there
        is more than these two in a pass."""
        shorter = min(self.t_c_s, self.t_p_s)
        return max(0.0, self.t_v_s - max(self.t_c_s, self.t_p_s)) / shorter if shorter else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "bound": self.bound,
            "efficiency": self.efficiency,
            "beta": self.overlap,
        }


@dataclass(frozen=True)
class Bounds:
    """Figures of a run, each beside the most that it could be."""

    tau: float
    t_v_s: float
    """A pass of the target as it was called."""
    alone_s: float
    """A round of the target alone."""
    round_s: float
    """A round as it was."""
    drafting_s: float
    """Drafting of a round if it were done in turn with the target's pass."""
    exposed_s: float
    """The part of it that was waited for."""

    @property
    def speedup(self) -> float:
        """Over the target alone."""
        return self.tau * self.alone_s / self.round_s

    @property
    def most_speedup(self) -> float:
        """tau T_T / T_V, where T_T is a round of the target alone, its messages included: with
        drafting and messages for nothing."""
        return self.tau * self.alone_s / self.t_v_s

    @property
    def overlap_gain(self) -> float:
        """Return what drafting ahead brought: both phases in turn over what was waited for of
        them."""
        return (self.drafting_s + self.t_v_s) / (self.exposed_s + self.t_v_s)

    @property
    def most_overlap_gain(self) -> float:
        """1 + min / max of the two phases: both wholly at once."""
        longer = max(self.drafting_s, self.t_v_s)
        return 1.0 + min(self.drafting_s, self.t_v_s) / longer if longer else 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "speedup": self.speedup,
            "most_speedup": self.most_speedup,
            "overlap_gain": self.overlap_gain,
            "most_overlap_gain": self.most_overlap_gain,
        }


@dataclass(frozen=True)
class Offloading:
    """Heterogeneous speculation against streaming the weights to an accelerator (Appendix B,
    equation 6)."""

    needed_gb_s: float
    """The rate that the bus would have to carry for offloading, a token a pass, to be as fast as
    this run."""
    needed_with_tree_gb_s: float
    """The rate for offloading that verifies the same trees: a pass has to take less than T_V."""
    bus_gb_s: float | None
    """The rate that the bus carries; None: there is no accelerator."""

    @classmethod
    def of(cls, model: Model, bounds: Bounds, bus_gb_s: float | None) -> "Offloading":
        token_s = bounds.round_s / bounds.tau
        return cls(model.bytes / token_s / 1e9, model.bytes / bounds.t_v_s / 1e9, bus_gb_s)

    @property
    def right(self) -> bool | None:
        """Return whether heterogeneous speculation is the right choice here; None: only where there
        is an accelerator it is one."""
        return None if self.bus_gb_s is None else self.bus_gb_s < self.needed_gb_s

    def in_words(self) -> str:
        if self.bus_gb_s is None:
            return (
                "there is no accelerator here to stream the weights to (its bus would have "
                f"to carry {self.needed_gb_s:.1f} GB/s)"
            )
        if self.bus_gb_s < self.needed_gb_s:
            return (
                f"right: offloading a token a pass would need {self.needed_gb_s:.1f} GB/s "
                f"over a bus that carries {self.bus_gb_s:.1f} at best"
            )
        return (
            f"wrong: the bus carries up to {self.bus_gb_s:.1f} GB/s, and offloading a token "
            f"a pass draws level at {self.needed_gb_s:.1f}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "right": self.right, "in_words": self.in_words()}


def achieved(model: Model, rows: float, t_v_s: float) -> Mapping[str, float]:
    """Rates of a pass: bytes read and operations done a second, 10^9."""
    read, operations = model.bytes_read(rows), 2 * rows * model.active
    return {"gb_s": read / t_v_s / 1e9, "gflop_s": operations / t_v_s / 1e9}
