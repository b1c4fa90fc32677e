"""What a pass of a model of some size takes on a described machine.

A pass takes the longer of reading its bytes and computing its products (the roofline; Williams et
al., 2009), and something for each layer.
"""

from dataclasses import dataclass

from dovetail.launch.planning.machines import (
    SIZES,
    DescribedMachine,
    DraftPart,
    Size,
    TargetPart,
    Weights,
)
from dovetail.launch.planning.planner import GIGA, MICRO
from dovetail.protocol.calibration import WEIGHT_BYTES, ContextCurve, LeastTime, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import MAX_GAMMA
from dovetail.runtime.costs.passes import PassCurves
from dovetail.runtime.costs.rounds import NO_MESSAGES, Messages, Origin


@dataclass(frozen=True)
class PlacedCosts:
    """Costs of a draft and a target on some machine."""

    t_v: PassCurves
    t_d: RowsSeconds  # a pass of the draft over rows
    proposal_s: float = 0.0  # seconds of the draft worker in a round beside its passes
    messages: Messages = NO_MESSAGES
    origin: Origin | None = None

    def verify_s(self, rows: int, context: float = 0.0) -> float:
        """Return the seconds of the target's pass over so many rows."""
        return self.t_v.at(rows, context)

    def alone_s(self, *, context: float = 0.0, rows: int = 1) -> float:
        """Return the seconds of a round without a draft."""
        return self.verify_s(rows, context) + self.messages.beside_s(drafted=False)


ROWS = (
    *range(1, 33),
    *range(36, 65, 4),
    *range(72, 129, 8),
    *range(144, 257, 16),
    *range(320, MAX_GAMMA + 1, 64),
    MAX_GAMMA + 1,
)
"""At which passes are computed; between them they are interpolated."""
CONTEXTS = (0, 512, 2048, 8192, 32768)


def read_size(name: str) -> Size:
    if name not in SIZES:
        raise UserError(f"there is no target of size {name!r}: choose {', '.join(SIZES)}")
    return SIZES[name]


def placed_costs(
    machine: DescribedMachine, size: Size, weights: Weights, blocks: int | None = None
) -> PlacedCosts:
    """Return what rounds cost with a target of that size, which is spread over all nodes;
    `blocks`: of the head. `UserError` if the machine has no arithmetic for those weights."""
    if weights not in machine.target.peak_gflop_s:
        raise UserError(
            f"{machine.title} has no figures for {weights} weights: choose "
            f"{' or '.join(machine.target.peak_gflop_s)}"
        )
    curves = [
        ContextCurve(context=context, t_v=_t_v(machine.target, size, weights, context))
        for context in CONTEXTS
    ]
    t_d = _t_d(machine.draft, size, blocks)
    return PlacedCosts(PassCurves(curves), t_d, messages=machine.link.messages)


def _t_v(part: TargetPart, size: Size, weights: Weights, context: int) -> RowsSeconds:
    count = size.layers * _block(size) + _head(size)
    total = count * WEIGHT_BYTES[weights]
    near = part.resident_bandwidth_gb_s or part.bandwidth_gb_s
    resident = min(total, part.resident_gb * GIGA)
    cache = 2 * context * size.keys * size.layers * part.kv_bytes
    reading = (total - resident) / (part.bandwidth_gb_s * GIGA) + (resident + cache) / (near * GIGA)
    operations = 2 * count + 4 * context * size.hidden * size.layers
    least = LeastTime(reading, operations / (part.peak_gflop_s[weights] * GIGA))
    alone = _curve(least, size.layers * part.layer_us)
    if (nodes := part.spread) is None:
        return alone
    spread = (nodes.spread_s(seconds, size.layers) for seconds in alone.seconds)
    return RowsSeconds.rising(alone.rows, spread)


def _t_d(part: DraftPart, size: Size, blocks: int | None) -> RowsSeconds:
    blocks = part.blocks if blocks is None else blocks
    if part.copy_bits is not None:
        weights, width, layers = (
            size.layers * _block(size) + _head(size),
            part.copy_bits / 8,
            size.layers,
        )
    else:
        weights, width, layers = (
            blocks * _block(size) + 2 * size.hidden**2 + _head(size),
            part.bytes,
            blocks,
        )
    least = LeastTime.of(
        size=weights * width,
        operations=2 * weights,
        bandwidth_gb_s=part.bandwidth_gb_s,
        gflop_s=part.peak_gflop_s,
    )
    return _curve(least, part.pass_us + layers * part.block_us)


def _block(size: Size) -> int:
    """Return the weights of the linears of a layer."""
    return 2 * size.hidden * (size.hidden + size.keys) + 3 * size.hidden * size.inner


def _head(size: Size) -> int:
    """Return the weights of the output head."""
    return size.hidden * size.vocabulary


def _curve(least: LeastTime, beside_us: float) -> RowsSeconds:
    return RowsSeconds.rising(ROWS, [least.at(rows) + beside_us * MICRO for rows in ROWS])
