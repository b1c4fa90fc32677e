"""Our attention on a GPU, directly over stored 16-bit keys and values
(`kernels/cuda/attention.cu`). A row's bytes depend only on the keys and values that it sees, in the
order of their slots."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from dovetail.workers.devices.base import Program
from dovetail.workers.models.attention import Attending, by_torch
from dovetail.workers.models.backends.device.choice import TIMED_SHAPE, Contest, Function, Products
from dovetail.workers.models.backends.device.own import bits_of, source_of
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.cache import HALF

SOURCE = source_of("attention")
ROWS, SLOTS, COLUMNS = 8, 64, 32  # rows, slots and columns of values of a block
PLACE = 3  # numbers of a place: address, slots, slots that may be read
THREADS = 128
FOUR = 4  # rows of scores begin at multiples of this many
WIDTHS = (128, 256)  # the most numbers of a key that a function takes
MULTIPLE = 8  # the width of a key is a multiple of this
MOST_SCORES = 1 << 24  # scores in memory at a time (64 MiB), unless one key head has more
TOLERANCE = 1e-5  # the largest difference to double precision, as a share of the output
PROOF_WIDTHS = (64, 128, 256)
TIMED_SLOTS, TIMED_HEAD, TIMED_GROUPS, TIMED_CACHES = 2048, 128, 4, 4


def attending(products: Products) -> Attending:
    """Return the attention function of a device: ours if chosen and possible, else torch's."""

    def attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        program = products.owner(CONTEST) if cap is None and fits(keys, values) else None
        if program is None:
            return by_torch(query, keys, values, mask, scale, cap, sinks)
        return own_attention(program, query, keys, values, mask, scale, sinks)

    return attend


def fits(keys: Tensor, values: Tensor) -> bool:
    """Return whether ours takes keys and values [kv_heads, S, width]: contiguous rows of halves."""
    width = keys.shape[-1]
    return (
        keys.dtype == values.dtype == HALF
        and values.shape == keys.shape
        and keys.stride() == values.stride()
        and keys.stride()[1:] == (width, 1)
        and takes_width(width)
    )


def takes_width(width: int) -> bool:
    """Return whether ours takes keys of this many numbers."""
    return width % MULTIPLE == 0 and width <= WIDTHS[-1]


@dataclass(frozen=True)
class PlacedCaches:
    """Keys and values [layers, 2, kv_heads, slots, width] of T tokens, each in its session's
    cache."""

    places: Tensor  # int64 [T, PLACE]: a cache's address, its slots, and the readable ones
    layer: int
    heads: int  # key heads
    slots: int  # the most slots that a token sees

    @property
    def first_key(self) -> int:
        """Return the number of heads before the layer's keys."""
        return 2 * self.layer * self.heads


def own_attention(
    program: Program,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [T, heads, width] as `by_torch` does, without widening keys and values."""

    def lying(part: slice) -> tuple[Tensor, Tensor, int, int, None]:
        return keys[part], values[part], keys.stride(0), keys.stride(0), None

    return _attend(program, query, len(keys), keys.shape[1], lying, mask, scale, sinks)


def placed_attention(
    program: Program,
    query: Tensor,
    placed: PlacedCaches,
    mask: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return the same bytes as `own_attention`, for tokens in caches of their own. The mask has to
    hide slots that may not be read."""

    def lying(part: slice) -> tuple[None, None, int, int, Tensor]:
        key = placed.first_key + part.start
        return None, None, key, key + placed.heads, placed.places

    return _attend(program, query, placed.heads, placed.slots, lying, mask, scale, sinks)


Lying = Callable[[slice], tuple[Tensor | None, Tensor | None, int, int, Tensor | None]]
"""Slice of key heads -> keys, values, strides of heads, no places; or no keys, first heads,
places."""


def _attend(
    program: Program,
    query: Tensor,
    heads: int,
    slots: int,
    lying: Lying,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    all_heads, of_head, width = query.shape
    groups = all_heads // heads
    rows, query = groups * of_head, query.contiguous().view(heads, -1, width)
    mask = None if mask is None else mask.view(mask.shape[-2:])
    at_once, blocks = min(heads, max(1, MOST_SCORES // (rows * slots))), -(-rows // ROWS)
    out = query.new_empty(of_head, all_heads, width)
    scores = query.new_empty(at_once, rows, -(-slots // FOUR) * FOUR)
    size = next(most for most in WIDTHS if width <= most)
    for first in range(0, heads, at_once):
        part = slice(first, min(heads, first + at_once))
        count = part.stop - part.start
        keys, values, of_keys, of_values, places = lying(part)
        program.launch(
            f"scores_{size}",
            (-(-slots // SLOTS), count * blocks),
            THREADS,
            (
                *(query[part], keys, of_keys, mask, 0 if mask is None else mask.stride(0)),
                *(scores, rows, slots, width, bits_of(scale), of_head, places),
            ),
        )
        own_sinks = None if sinks is None else sinks[first * groups :]
        program.launch(
            "values_of",
            (-(-width // COLUMNS), count * blocks),
            THREADS,
            (
                *(scores, values, of_values, own_sinks, out[:, first * groups :]),
                *(rows, slots, width, of_head, out.stride(0), places),
            ),
        )
    return out


# ---- its proof and its timing


def _against(program: Program, device: torch.device) -> str:
    """Return any error of our attention for the rows of a tree, alone and together; else empty."""
    for width in PROOF_WIDTHS:
        if wrong := _against_width(program, device, width):
            return f"keys of {width} numbers: {wrong}"
    return ""


def _against_width(program: Program, device: torch.device, width: int) -> str:
    generator, slots, rows = torch.Generator().manual_seed(width), 150, 5
    keys, values = torch.randn(2, 2, slots, width, generator=generator).to(HALF)
    query = torch.randn(4, rows, width, generator=generator)
    seen = torch.rand(2 * rows, slots, generator=generator)
    seen = seen < torch.linspace(0.1, 1.0, 2 * rows)[:, None]
    seen[:, 0] = True
    sinks, scale = torch.randn(4, generator=generator), width**-0.5

    def ours(query: Tensor, seen: Tensor, own: Tensor | slice, sinks: Tensor | None) -> Tensor:
        mask = torch.zeros(seen[:, own].shape).masked_fill(~seen[:, own], -torch.inf)
        return own_attention(
            program,
            query.to(device),
            keys[:, own].to(device),
            values[:, own].to(device),
            mask.to(device),
            scale,
            None if sinks is None else sinks.to(device),
        ).cpu()

    mask = torch.zeros(seen.shape, dtype=torch.double).masked_fill(~seen, -torch.inf)
    for own_sinks in (None, sinks):
        sunk = None if own_sinks is None else own_sinks.double()
        expected = by_torch(query.double(), keys.double(), values.double(), mask, scale, None, sunk)
        found = ours(query, seen, slice(None), own_sinks)
        apart = float((found - expected).abs().max() / expected.abs().max())
        if not apart < TOLERANCE:
            return f"differs from the exact result by {apart:.1e}"
    found = ours(query, seen, slice(None), None)
    for head, row in product(range(2), range(rows)):  # of the two that share a key head
        own = seen[head * rows + row]
        alone = ours(query[head::2, row : row + 1], own[None], own.nonzero().flatten(), None)
        if not torch.equal(alone[0], found[row, head::2]):
            return "a row depends on other rows, or on slots that it does not see"
    places, caches = _placed(keys, values, device)  # which hold the places' numbers
    placed, own_mask = PlacedCaches(places, 1, 2, slots), mask.float().to(device)
    for own_sinks in (None, sinks.to(device)):
        beside = placed_attention(program, query.to(device), placed, own_mask, scale, own_sinks)
        if not torch.equal(beside.cpu(), ours(query, seen, slice(None), own_sinks)):
            return f"rows of {len(caches)} sessions in one pass differ in bytes from those alone"
    return ""


def _placed(keys: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return places of five tokens of three sessions, and their caches: these keys in a second
    layer."""
    caches, places = [], list[list[int]]()
    for tokens, more in ((2, 0), (1, 30), (2, 7)):
        heads, slots, width = keys.shape
        cache = torch.full((2, 2, heads, slots + more, width), torch.nan, dtype=HALF)
        cache[1, 0, :, :slots], cache[1, 1, :, :slots] = keys, values
        caches.append(cache.to(device))
        places += [[caches[-1].data_ptr(), slots + more, slots]] * tokens
    return torch.tensor(places, device=device), caches


def _pairs(
    program: Program, device: torch.device
) -> Iterator[tuple[Product, Callable[[], Product]]]:
    """Yield attention over caches: x [T, heads width] -> the same shape."""
    width = min(TIMED_HEAD, TIMED_SHAPE[1])
    heads = max(1, TIMED_SHAPE[1] // width // TIMED_GROUPS)
    for _ in range(TIMED_CACHES):
        cache = torch.rand(2, heads, TIMED_SLOTS, width, device=device).to(HALF)
        yield (
            partial(_over, cache, partial(own_attention, program)),
            lambda cache=cache: partial(_over, cache, partial(by_torch, cap=None)),  # type: ignore[misc]
        )


def _over(cache: Tensor, attend: Callable[..., Tensor], x: Tensor) -> Tensor:
    _, heads, slots, width = cache.shape
    query = x.view(len(x), -1, width).transpose(0, 1)
    mask = torch.zeros(x.numel() // heads // width, slots, device=x.device)
    return attend(query, cache[0], cache[1], mask, width**-0.5, sinks=None).reshape(x.shape)


CONTEST = Contest(
    Function.ATTENTION, "attention reads keys and values of 16 bits", SOURCE, _against, _pairs
)
