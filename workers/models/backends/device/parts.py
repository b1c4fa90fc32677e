"""Our functions on a GPU for the work between products, one launch each: norms, rotation with the
caching of keys and values, and gates (`kernels/cuda/parts.cu`). A row's bytes do not depend on
others."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, silu

from dovetail.workers.devices.base import Program
from dovetail.workers.kernels.layer_plan import (
    Activation,
    HeadNorm,
    LayerPlan,
    Norm,
    NormKind,
    Rotary,
)
from dovetail.workers.models.backends.device.attention import PlacedCaches
from dovetail.workers.models.backends.device.choice import TIMED_SHAPE, Contest, Function
from dovetail.workers.models.backends.device.own import bits_of, source_of
from dovetail.workers.models.backends.device.products import Product, narrowed
from dovetail.workers.models.cache import HALF, rounded


class Angles:
    """The rotary tables of a model on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, tuple[Rotary, Tensor, Tensor]] = {}
        self._alike: dict[int, tuple[Rotary, int]] = {}
        """Tables with the numbers of another table, and the id of that."""
        self._factors: dict[int, Tensor] = {}  # the factors of queries of tables that have any

    def add(self, rotary: Rotary) -> None:
        """Take over a table if it is new; one with the same numbers is not copied again."""
        if id(rotary) in self._tables or id(rotary) in self._alike:
            return
        for key, (known, _, _) in self._tables.items():
            if _equal(known, rotary):
                self._alike[id(rotary)] = (rotary, key)
                return
        tables = rotary.cosines.to(self._device), rotary.sines.to(self._device)
        self._tables[id(rotary)] = (rotary, *tables)
        if rotary.factors is not None:
            self._factors[id(rotary)] = rotary.factors.to(self._device)

    def at(self, positions: Tensor) -> "Turn | None":
        """Return the angles of rows at positions int64 [T]; None without tables."""
        found = {
            key: (cosines[positions].unsqueeze(1), sines[positions].unsqueeze(1))
            for key, (_, cosines, sines) in self._tables.items()
        }
        grown = {key: table[positions].view(-1, 1, 1) for key, table in self._factors.items()}
        for key, (_, of) in self._alike.items():
            found[key] = found[of]
            if of in grown:
                grown[key] = grown[of]
        return Turn(found, grown) if found else None


@dataclass(frozen=True)
class Turn:
    """The angles of the rows of a pass."""

    angles: Mapping[int, tuple[Tensor, Tensor]]  # cosines and sines [T, 1, rotary_dim / 2] by table
    factors: Mapping[int, Tensor] = field(default_factory=dict)
    """The factors of queries [T, 1, 1], by the id of their table."""

    def of(self, heads: Tensor, rotary: Rotary) -> Tensor:
        """Return heads [T, H, head_dim] rotated by a table's angles at the rows' positions."""
        cosines, sines = self.angles[id(rotary)]
        half = cosines.shape[-1]
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        first, second = (
            torch.addcmul(a * cosines, b, sines, value=-1),
            torch.addcmul(b * cosines, a, sines),
        )
        return torch.cat([first, second, rest] if rest.shape[-1] else [first, second], dim=-1)

    def grow(self, query: Tensor, rotary: Rotary) -> Tensor:
        """query [T, heads, head_dim] times the factors that a table has for its rows' positions."""
        factors = self.factors.get(id(rotary))
        return query if factors is None else query * factors


def _equal(one: Rotary, other: Rotary) -> bool:
    pairs = ((one.cosines, other.cosines), (one.sines, other.sines), (one.factors, other.factors))
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


SOURCE = source_of("parts")
NORM_THREADS, TURN_THREADS, GATE_THREADS, WARP = 512, 128, 256, 32
MOST_WIDTH = 16 * NORM_THREADS  # the widest row of our norm: 16 numbers a thread (parts.cu)
TOLERANCE = 1e-5  # the largest difference to double precision, as a share of the largest number
HEADS, KV_HEADS, WIDTH, HALF_TURN, SLOTS = 3, 2, 40, 16, 9
"""The shape of the proof of a rotation; the last numbers of each head are not rotated."""
PROOF_WIDTH, UNITS = 1100, 300
TIMED_WIDTH, TIMED_TURNS, TIMED_ROWS = 128, 24, 1024


@dataclass(frozen=True)
class Turning:
    """The rotation of a layer's queries and keys, which also writes keys and values to a cache."""

    program: Program
    heads: int
    kv_heads: int
    query_weight: Tensor | None  # [width]: the norm of each query; None: no norm
    key_weight: Tensor | None
    epsilon: float

    def __call__(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Return rotated queries [heads, T, width] of qkv [T, (heads + 2 kv_heads) width], and
        write keys and values to `slots` int64 [T] of a cache, [kv_heads, S, width] each. `angles`:
        cosines and sines [T, ...]."""
        halves = keys.dtype == HALF
        return self._turn(qkv, angles, slots, (keys, values, keys.stride(0)), None, halves=halves)

    def placed(
        self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None, slots: Tensor, placed: PlacedCaches
    ) -> Tensor:
        """Do the same for slots of each row's own cache in halves. `angles` None: no rotation."""
        nowhere = None, None, placed.first_key
        return self._turn(qkv, angles, slots, nowhere, placed.places, halves=True)

    def _turn(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        slots: Tensor,
        cache: tuple[Tensor | None, Tensor | None, int],
        places: Tensor | None,
        *,
        halves: bool,
    ) -> Tensor:
        rows, all_heads = len(qkv), self.heads + 2 * self.kv_heads
        width = qkv.shape[1] // all_heads
        cosines, sines = (None, None) if angles is None else angles
        half = 0 if cosines is None else cosines.shape[-1]
        query = qkv.new_empty(self.heads, rows, width)
        self.program.launch(
            "turn_rows",
            (rows, -(-all_heads // (TURN_THREADS // WARP))),
            TURN_THREADS,
            (
                *(qkv.contiguous(), cosines, sines, self.query_weight, self.key_weight, slots),
                *(query, *cache, rows, self.heads, self.kv_heads, width),
                *(half, bits_of(self.epsilon), int(halves), places),
            ),
        )
        return query


@dataclass(frozen=True)
class Parts:
    """Our functions for the work between products on one device."""

    program: Program

    def norm(
        self, x: Tensor, kind: NormKind, norm: Norm, epsilon: float, update: Tensor | None = None
    ) -> Tensor:
        """Return the norm of x [..., width] fp32, after adding `update` in place if x is
        contiguous."""
        x, width = x.contiguous(), x.shape[-1]
        y, update = torch.empty_like(x), None if update is None else update.contiguous()
        centred = int(kind is NormKind.LAYER_NORM)
        arguments = (x, update, norm.weight, norm.bias, y, width, centred, bits_of(epsilon))
        self.program.launch("norm_rows", (x.numel() // width, 1), NORM_THREADS, arguments)
        return y

    def gate(self, x: Tensor) -> Tensor:
        """Return silu(gate) up [T, units] of x [T, 2 units], the gates first."""
        x, units = x.contiguous(), x.shape[1] // 2
        y = x.new_empty(len(x), units)
        grid = (len(x), -(-units // GATE_THREADS))
        self.program.launch("gate_rows", grid, GATE_THREADS, (x, y, units))
        return y

    def narrow(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x fp32 in a type of 16 bits, as `products.narrowed` does."""
        x, size = x.contiguous(), x.numel()
        y = torch.empty_like(x, dtype=dtype)
        grid, brains = (-(-size // GATE_THREADS), 1), int(dtype == torch.bfloat16)
        self.program.launch("narrow_rows", grid, GATE_THREADS, (x, y, size, brains))
        return y

    def move(self, addresses: Tensor, x: Tensor, *, there: bool) -> Tensor:
        """Copy rows x [T, width] fp32 to addresses int64 [T], or from there, and return x."""
        rows, width = x.shape
        grid = (rows, -(-width // GATE_THREADS))
        self.program.launch("move_rows", grid, GATE_THREADS, (addresses, x, width, int(there)))
        return x

    def turning(self, plan: LayerPlan, device: torch.device) -> Turning | None:
        """Return the rotation of a layer; None if our functions cannot compute it."""
        norms = plan.query_norm, plan.key_norm
        plain = all(norm is None or norm.bias is None for norm in norms)
        before = norms == (None, None) or plan.head_norm is HeadNorm.HEAD_BEFORE_ROPE
        turns = plan.rotary is not None and plan.rotary.factors is None and plan.caches
        if not (plain and before and turns) or plan.value_norm or plan.key_factor != 1.0:
            return None
        query, key = (None if norm is None else norm.weight.to(device) for norm in norms)
        return Turning(self.program, plan.heads, plan.kv_heads, query, key, plan.epsilon)

    @staticmethod
    def gates(plan: LayerPlan) -> bool:
        """Return whether `gate` is the gate of a layer's MLP."""
        return plan.activation is Activation.SILU_GATED and plan.activation_numbers[0] == 0.0


class DeviceNorm:
    """A norm with its weights on a device."""

    def __init__(
        self,
        kind: NormKind,
        norm: Norm,
        epsilon: float,
        device: torch.device,
        parts: Parts | None = None,
    ) -> None:
        """`parts`: our functions there; None: torch computes these parts."""
        self._kind, self._epsilon, self._parts = kind, epsilon, parts
        bias = None if norm.bias is None else norm.bias.to(device)
        self._norm = Norm(norm.weight.to(device), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width], normalised."""
        norm = self._norm
        if self._parts is not None and x.shape[-1] <= MOST_WIDTH:
            return self._parts.norm(x, self._kind, norm, self._epsilon)
        if self._kind is NormKind.LAYER_NORM:
            return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self._epsilon)
        return rms_norm(x, x.shape[-1:], norm.weight, self._epsilon)

    def of_sum(self, x: Tensor, update: Tensor) -> Tensor:
        """Add `update` to x, both [T, width], in place, and return x normalised."""
        if self._parts is not None and x.shape[-1] <= MOST_WIDTH and x.is_contiguous():
            return self._parts.norm(x, self._kind, self._norm, self._epsilon, update)
        x += update
        return self(x)


# ---- their proof and their timing


def _against(program: Program, device: torch.device) -> str:
    parts, generator = Parts(program), torch.Generator().manual_seed(1)
    for kind in NormKind:
        x, weight, bias = (
            torch.randn(*shape, generator=generator)
            for shape in ((5, PROOF_WIDTH), (PROOF_WIDTH,), (PROOF_WIDTH,))
        )
        own = Norm(weight.to(device), bias.to(device) if kind is NormKind.LAYER_NORM else None)
        exact = _norm(x.double(), kind, weight.double(), bias.double())

        def normed(x: Tensor, kind: NormKind = kind, own: Norm = own) -> Tensor:
            return parts.norm(x.to(device), kind, own, 1e-5).cpu()

        if wrong := _wrong(normed, x, exact):
            return f"norm: {wrong}"
        if wrong := _wrong_sum(parts, own, kind, x, device):
            return f"norm of a sum: {wrong}"
    x = torch.randn(5, 2 * UNITS, generator=generator) * 4
    gate, up = x.double().chunk(2, dim=1)
    if wrong := _wrong(lambda x: parts.gate(x.to(device)).cpu(), x, silu(gate) * up):
        return f"gate: {wrong}"
    x = torch.cat([x.flatten() * 10.0**power for power in (-7, -3, 0, 4.5, 38)])
    for dtype in (HALF, torch.bfloat16):
        if not torch.equal(parts.narrow(x.to(device), dtype).cpu(), narrowed(x, dtype)):
            return f"numbers narrowed to {dtype} are not torch's"
    for dtype in (HALF, torch.float32):
        for weighed in (False, True):
            if wrong := _turned_wrongly(program, device, dtype, weighed=weighed):
                return f"rotation, cached as {dtype}: {wrong}"
    return _placed_wrongly(parts, device)


def _placed_wrongly(parts: Parts, device: torch.device) -> str:
    """Return any error with rows in separate caches; else empty."""
    generator, layers = torch.Generator().manual_seed(3), 2
    qkv, turns = (
        torch.randn(3, width, generator=generator).to(device)
        for width in ((HEADS + 2 * KV_HEADS) * WIDTH, HALF_TURN)
    )
    slots, angles = torch.tensor([4, 0, 7], device=device), (turns.cos(), turns.sin())
    turning = Turning(parts.program, HEADS, KV_HEADS, None, None, 1e-5)
    caches = [
        torch.zeros(layers, 2, KV_HEADS, SLOTS + more, WIDTH, dtype=HALF, device=device)
        for more in (0, 0, 5)
    ]
    places = torch.tensor(
        [[cache.data_ptr(), cache.shape[3], cache.shape[3]] for cache in caches[1:] + caches[2:]],
        device=device,
    )
    expected = turning(qkv, angles, slots, *caches[0][1])
    found = turning.placed(qkv, angles, slots, PlacedCaches(places, 1, KV_HEADS, SLOTS))
    together = caches[1][:, :, :, :SLOTS] + caches[2][:, :, :, :SLOTS]
    if not torch.equal(found.cpu(), expected.cpu()) or not torch.equal(
        together.cpu(), caches[0].cpu()
    ):
        return "rotation of rows of two sessions in one pass differs from that of each alone"
    there = torch.tensor([qkv[row].data_ptr() for row in (2, 0)], device=device)
    before, moved = qkv.cpu().clone(), parts.move(there, torch.empty_like(qkv[:2]), there=False)
    parts.move(there, moved.flip(0).contiguous(), there=True)
    swapped = torch.equal(moved.cpu(), before[[2, 0]]) and torch.equal(qkv.cpu(), before.flip(0))
    return "" if swapped else "rows go to other addresses"


def _norm(x: Tensor, kind: NormKind, weight: Tensor, bias: Tensor) -> Tensor:
    if kind is NormKind.LAYER_NORM:
        return layer_norm(x, weight.shape, weight, bias, 1e-5)
    return rms_norm(x, weight.shape, weight, 1e-5)


def _wrong_sum(parts: Parts, own: Norm, kind: NormKind, x: Tensor, device: torch.device) -> str:
    """Return whether the norm of x plus an update differs from that of their sum; empty if not."""
    update = x.flip(0).to(device)
    there, summed = x.to(device), x.to(device) + update
    found = parts.norm(there, kind, own, 1e-5, update)
    same = torch.equal(found, parts.norm(summed, kind, own, 1e-5)) and torch.equal(there, summed)
    return "" if same else "it differs from that of rows that were added before"


def _wrong(own: Callable[[Tensor], Tensor], x: Tensor, exact: Tensor) -> str:
    """Return how a function differs from the exact result, or a row alone from itself; empty if
    not."""
    found = own(x)
    apart = float((found - exact).abs().max() / exact.abs().max())
    if not apart < TOLERANCE:
        return f"differs from the exact result by {apart:.1e}"
    same = all(torch.equal(own(x[row : row + 1])[0], found[row]) for row in range(len(x)))
    return "" if same else "a row depends on others"


def _turned_wrongly(
    program: Program, device: torch.device, dtype: torch.dtype, *, weighed: bool
) -> str:
    generator, rows, rotary = torch.Generator().manual_seed(2), 4, _ROTARY
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * WIDTH, generator=generator)
    angles = torch.rand(rows, HALF_TURN, generator=generator) * 6
    weights = [torch.randn(WIDTH, generator=generator) if weighed else None for _ in range(2)]
    slots = torch.tensor([4, 0, 7, 2])
    cache = torch.zeros(2, KV_HEADS, SLOTS, WIDTH, dtype=dtype)
    own_weights = [None if weight is None else weight.to(device) for weight in weights]
    turning = Turning(program, HEADS, KV_HEADS, own_weights[0], own_weights[1], 1e-5)

    def turned(which: slice) -> tuple[Tensor, Tensor]:
        there = cache.to(device)
        own = [turn[which].contiguous().to(device) for turn in (angles.cos(), angles.sin())]
        query = turning(
            qkv[which].to(device), (own[0], own[1]), slots[which].to(device), there[0], there[1]
        )
        return query.cpu(), there.cpu()

    heads = qkv.view(rows, -1, WIDTH).double()
    exact = _turned(heads, angles.double(), rotary, weights)
    query, found = turned(slice(None))
    apart = float((query.transpose(0, 1) - exact[:, :HEADS]).abs().max() / exact.abs().max())
    if not apart < TOLERANCE:
        return f"queries differ from the exact result by {apart:.1e}"
    expected = cache.clone()
    for at, part in enumerate((exact[:, HEADS : HEADS + KV_HEADS], exact[:, HEADS + KV_HEADS :])):
        expected[at][:, slots] = rounded(part.float().transpose(0, 1), dtype)
    if float((found.float() - expected.float()).abs().max()) > (1e-2 if dtype == HALF else 1e-4):
        return "keys or values are wrong, or in wrong slots"
    if not torch.equal(found == 0, expected == 0):
        return "slots of other rows are written"
    alone, beside = turned(slice(1, 2))
    same = torch.equal(alone[:, 0], query[:, 1]) and torch.equal(beside[:, :, 0], found[:, :, 0])
    return "" if same else "a row depends on others"


_ROTARY = Rotary(torch.empty(0), torch.empty(0))


def _turned(heads: Tensor, angles: Tensor, rotary: Rotary, weights: list[Tensor | None]) -> Tensor:
    """Return heads [T, heads + 2 kv_heads, width], queries and keys normed and turned by torch."""
    turn = Turn({id(rotary): (angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))})
    parts = list(torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1))
    for at, weight in enumerate(weights):
        if weight is not None:
            parts[at] = rms_norm(parts[at], weight.shape, weight.to(heads.dtype), 1e-5)
        parts[at] = turn.of(parts[at], rotary)
    return torch.cat(parts, dim=1)


def _pairs(
    program: Program, device: torch.device
) -> Iterator[tuple[Product, Callable[[], Product]]]:
    """Yield a norm, a rotation with caching and a gate for at most `TIMED_ROWS` rows x [T,
    width]."""
    parts, width = Parts(program), TIMED_SHAPE[1]
    head = min(TIMED_WIDTH, width // 4)
    heads = width // head // 2
    sizes, rotary = [heads, heads // 2, heads // 2], _ROTARY
    norm = Norm(torch.ones(width, device=device))
    turning = Turning(program, sizes[0], sizes[1], None, None, 1e-5)
    cache = torch.zeros(2, sizes[1], TIMED_ROWS, head, dtype=HALF, device=device)
    angles = torch.rand(TIMED_ROWS, head // 2, device=device)
    places = torch.arange(TIMED_ROWS, device=device)

    def ours(x: Tensor) -> Tensor:
        x, turns, slots = (
            parts.norm(x, NormKind.RMS, norm, 1e-5),
            angles[: len(x)],
            places[: len(x)],
        )
        turning(x, (turns, turns), slots, cache[0], cache[1])
        return parts.gate(x)

    def torchs(x: Tensor) -> Tensor:
        x, turns, slots = (
            rms_norm(x, (width,), norm.weight, 1e-5),
            angles[: len(x)],
            places[: len(x)],
        )
        both = turns.unsqueeze(1)
        query, key, value = torch.split(x.view(len(x), -1, head), sizes, dim=1)
        turned = Turn({id(rotary): (both, both)}).of(torch.cat([query, key], dim=1), rotary)
        for rows, part in zip(cache, (turned[:, heads:], value), strict=True):
            rows.index_copy_(1, slots, rounded(part.transpose(0, 1), HALF))
        turned[:, :heads].transpose(0, 1).contiguous()
        gate, up = x.chunk(2, dim=1)
        return silu(gate) * up

    for _ in range(TIMED_TURNS):
        yield ours, lambda: torchs


CONTEST = Contest(
    Function.PARTS, "functions compute the work between products", SOURCE, _against, _pairs
)
