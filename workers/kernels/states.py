"""The Python interface of mixers with a state: their plan, and the state of a session, matching
`native/scan.h` field by field."""

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from torch import Tensor

from dovetail.workers.kernels import address_of

COLUMNS = 16  # columns of a state that are interleaved
MOST_TAPS = 16  # the most rows of a convolution


class ScanRule(IntEnum):
    """How a state is updated and read: the gated delta rule, with a decay for each head or for each
    number of its key (KDA), Mamba-2's, or none, if the mixer is only a gated convolution."""

    GATED_DELTA = 0
    SELECTIVE = 1
    SHORT_CONVOLUTION = 2
    CHANNEL_DELTA = 3


@dataclass(frozen=True)
class StateShape:
    """The sizes of the state of one layer."""

    state: int  # numbers of the state
    row: int  # numbers of the factors of a row
    taps: int  # rows of the convolution, including the last one


@dataclass(frozen=True)
class ScanPlan:
    """A mixer with a state. Its matrix computes for each row [query | key | value | gate | b | a]
    for the gated delta rule, [query | key | value | gate | step] for Mamba-2, and [before | behind
    | x] for a convolution alone; with a decay for each number of a key [query | key | value | b |
    low gate | low a], from which two more matrices make the gate and a."""

    rule: ScanRule
    taps: Tensor  # float32 [taps, channels]: the weights of the convolution, the oldest row's first
    taps_bias: Tensor | None = None  # float32 [channels]
    key_heads: int = 1
    value_heads: int = 0  # consecutive ones share a key head; 0: only a convolution
    key_dim: int = 0
    value_dim: int = 0
    decay: Tensor | None = None
    """float32 [value_heads], negative: a state is multiplied by e^(decay step)."""
    step_bias: Tensor | None = None  # float32 [decays], added before the softplus of a step
    skip: Tensor | None = None  # float32 [value_heads]: values times it are added to the output
    norm: Tensor | None = None
    """float32, the weights of the output's RMS norms: those of one norm for all, or
    concatenated."""
    norm_width: int = 0  # numbers that are normed together
    gate_first: bool = False  # apply the gate before the norm
    epsilon: float = 1e-6
    query_scale: float = 1.0
    step_factor: float = 1.0  # the factor of the gated delta rule's steps
    low: int = 0  # width of the low gate, and of the low a
    given_factors: Tensor | None = None  # float32, factors of the matrix's output; None: they are 1
    index: int = 0  # the index of the layer among those with a state
    state_before: int = 0  # numbers of the states of those before it
    row_before: int = 0  # numbers of a row's factors of those before it

    @cached_property
    def struct(self) -> "ScanStruct":
        """The mixer in the kernels' format, valid while this is kept; raises ValueError for parts
        that do not fit together."""
        return scan_struct(self)

    @property
    def decays(self) -> int:
        """The number of decays of a row."""
        each = self.key_dim if self.rule is ScanRule.CHANNEL_DELTA else 1
        return self.value_heads * each

    @property
    def widths(self) -> tuple[int, int]:
        """The output width of the matrix before it, and the input width of the one after it."""
        channels, values = self.taps.shape[1], self.value_heads * self.value_dim
        if self.rule is ScanRule.SHORT_CONVOLUTION:
            return 3 * channels, channels
        if self.rule is ScanRule.CHANNEL_DELTA:
            return channels + self.value_heads + 2 * self.low, values
        steps = self.value_heads * (2 if self.rule is ScanRule.GATED_DELTA else 1)
        return channels + values + steps, values

    @property
    def shape(self) -> StateShape:
        """The sizes of its state."""
        taps, channels = self.taps.shape
        columns = _padded(self.value_dim)
        row = _padded(channels) + _padded(self.key_heads * self.key_dim)
        row += self.value_heads * columns + _padded(self.decays)
        return StateShape(self.value_heads * columns * self.key_dim, row, taps)


@dataclass(frozen=True)
class StateRows:
    """The state of a session for the rows of a pass."""

    state: Tensor  # float32 [numbers of all layers]
    factors: Tensor  # float32 [ring times the numbers of a row]
    folded: Tensor  # int64 [layers]: how many rows each layer's state includes
    ring: int  # the number of rows that the factors have room for
    fold: int  # the slot up to which the pass folds rows into the state
    lent: Tensor | None = None
    """float32 [lent_room times the numbers of a row]: the factors of the slots from `lent_first`
    on, if they are another model's."""
    lent_first: int = 0
    lent_room: int = 0

    @cached_property
    def struct(self) -> "StatesStruct":
        """The state in the kernels' format, valid while this is kept."""
        tensors = (self.state, self.factors, self.folded)
        lent = None if self.lent is None else self.lent.data_ptr()
        return StatesStruct(
            *(part.data_ptr() for part in tensors),
            *(self.ring, self.fold, lent, self.lent_first, self.lent_room),
        )


class ScanStruct(Structure):
    """`Scan` of native/scan.h."""

    _fields_ = (
        *((name, c_int64) for name in ("state_before", "row_before")),
        *(
            (name, c_int32)
            for name in (
                *("index", "rule", "taps", "channels"),
                *("key_heads", "value_heads", "key_dim", "value_dim"),
                *("norm_width", "gate_first"),
            )
        ),
        *((name, c_float) for name in ("epsilon", "query_scale", "step_factor")),
        ("low", c_int32),
        *(
            (name, c_void_p)
            for name in (
                *("taps_weights", "taps_bias", "decay", "step_bias"),
                *("skip", "given_factors", "norm_weight"),
            )
        ),
        ("norm_stride", c_int64),
    )


class StatesStruct(Structure):
    """`States` of native/scan.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("state", "factors", "folded")),
        *((name, c_int32) for name in ("ring", "fold")),
        ("lent", c_void_p),
        *((name, c_int32) for name in ("lent_first", "lent_room")),
    )


def scan_struct(plan: ScanPlan) -> ScanStruct:
    """Return a mixer in the kernels' format; raise ValueError for parts that do not fit
    together."""
    taps, channels = plan.taps.shape
    keys, values = plan.key_heads * plan.key_dim, plan.value_heads * plan.value_dim
    scans = plan.rule is not ScanRule.SHORT_CONVOLUTION
    if (
        not 1 <= taps <= MOST_TAPS
        or plan.key_heads < 1
        or plan.value_heads % plan.key_heads
        or scans != bool(values)
        or (scans and channels != 2 * keys + values)
    ):
        raise ValueError(
            f"a convolution of {channels} channels and {taps} rows, {plan.key_heads} key heads of "
            f"{plan.key_dim} and {plan.value_heads} value heads of {plan.value_dim}"
        )
    struct = ScanStruct(channels=channels, taps=taps)
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "norm_width", "gate_first")
    before = ("index", "state_before", "row_before", "low")
    for name in ("rule", *names, *before, "epsilon", "query_scale", "step_factor"):
        setattr(struct, name, getattr(plan, name))
    struct.taps_weights = address_of(plan.taps, (taps, channels), ("float32",))
    if plan.norm is not None:
        if plan.norm_width < 1 or values % plan.norm_width:
            raise ValueError(f"norms of {plan.norm_width} numbers over {values}")
        together = plan.norm.numel() == plan.norm_width
        struct.norm_stride = 0 if together else plan.norm_width
        width = plan.norm_width if together else values
        struct.norm_weight = address_of(plan.norm, (width,), ("float32",))
    named = {"taps_bias": channels, "decay": plan.value_heads, "step_bias": plan.decays}
    named |= {"skip": plan.value_heads, "given_factors": plan.widths[0]}
    for name, width in named.items():
        if (numbers := getattr(plan, name)) is not None:
            setattr(struct, name, address_of(numbers, (width,), ("float32",)))
        elif scans and name in ("decay", "step_bias"):
            raise ValueError(f"a state without {name}")
    return struct


def placed(plan: ScanPlan, before: Sequence[StateShape]) -> ScanPlan:
    """Return a mixer whose state follows those of the layers `before` in a session's state."""
    return replace(
        plan,
        index=len(before),
        state_before=sum(shape.state for shape in before),
        row_before=sum(shape.row for shape in before),
    )


def _padded(numbers: int) -> int:
    return -(-numbers // COLUMNS) * COLUMNS
