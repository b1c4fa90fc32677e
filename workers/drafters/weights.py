"""The choice of the type of a draft's weights on a device, of 16 or 32 bits: the fastest type whose
products are correct there.

A small product in each type is compared with the same one in double precision; then products of 1,
4 and 16 rows are timed, ours or torch's as `choice.py` has chosen. The checkpoint's own type is
taken unless another one is faster by more than a tenth. Fewer bits change what a draft proposes, so
only the user chooses them. Times are kept in the profile file, with the card, its driver and the
libraries."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.profile import TypeTimes, load_profile, rewrite_profile
from dovetail.workers.devices.base import Device, Program
from dovetail.workers.devices.memory import HELD, is_out_of_memory
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.backends.blob import ELEMENTS, Matrix, alone
from dovetail.workers.models.backends.device.choice import (
    ROUNDED,
    SHAPE,
    TIMED_BYTES,
    TIMED_ROWS,
    TIMED_SHAPE,
    choice_on,
    product_seconds,
    said_in_ms,
)
from dovetail.workers.models.backends.device.own import SOURCE, own_matrix
from dovetail.workers.models.backends.device.products import Product, narrowed, rounded_product
from dovetail.workers.models.language_model import LanguageModel, NotFiniteError
from dovetail.workers.models.segment import Segment

KINDS = {"fp16": Kind.FP16, "bf16": Kind.BF16, "fp32": Kind.FP32}
ORDERS = {
    "fp16": ("fp16", "bf16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp32": ("fp16", "bf16", "fp32"),
}
"""Type of a checkpoint -> the types that its weights may get, in order of preference."""
MARGIN = 1.1  # a type replaces a preferred one that takes this many times as long
TOLERANCE = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 1e-5}
"""The largest error of a product as a share of the largest result: a few roundings of the inputs,
which have 11, 8 and 24 bits."""
COUNTED_SHAPE = (64, 128)  # [out, in] where time is counted instead of measured
OVERFLOWS = "the model's numbers overflow it"
TOKENS = 64  # tokens of the trial of a model in fp16
_KNOWN: dict[tuple[str, ...], TypeTimes] = {}  # this process's times by key


@dataclass(frozen=True)
class Chosen:
    """A type of weights, and a sentence with the reason."""

    weights: str
    said: str


def chosen_type(
    device: Device, stored: str, profile: Path | None, *, excluded: Mapping[str, str] | None = None
) -> Chosen:
    """Return the type in which weights stored as `stored` (fp16, bf16, fp32) are fastest on a
    device.

    `profile`: the file that keeps times. `excluded`: types that may not be used -> why. Raises
    `SettingsError` if no product is correct on the device, `torch.OutOfMemoryError` if there is no
    memory for a small one."""
    times = _times(device, profile)
    refused = {**times.refused, **(excluded or {})}
    left = [name for name in ORDERS[stored] if name not in refused]
    if not left:
        raise SettingsError(
            f"no product is correct on {device.name}: {_listed(refused, ORDERS[stored])}; set "
            "draft.device to 'cpu'"
        )
    best = left[0]
    if not times.seconds:
        return Chosen(
            best,
            f"{device.name}: weights are {best}; not enough memory to time products of "
            "several types",
        )
    for name in left[1:]:
        if MARGIN * sum(times.seconds[name]) < sum(times.seconds[best]):
            best = name
    *few, most = TIMED_ROWS
    took = "; ".join(f"{said_in_ms(times.seconds[name])} ms in {name}" for name in left)
    asked = "" if best == stored else f" (stored as {stored})"
    why = _listed(refused, ORDERS[stored])
    return Chosen(
        best,
        f"{device.name}: weights are {best}{asked}; products of {', '.join(map(str, few))} and "
        f"{most} rows take {took}" + (f"; {why}" if why else ""),
    )


def check_type(device: Device, weights: str) -> None:
    """Raise `SettingsError` if products in the configured type of weights are wrong on a GPU. Types
    other than fp16, bf16 and fp32 are not checked."""
    place = device.torch_device
    if device.is_cpu or weights not in KINDS or not (wrong := against_type(place, weights)):
        return
    others = [name for name in KINDS if not against_type(place, name)]
    remedy = f"use {' or '.join(others)}" if others else "set draft.device to 'cpu'"
    raise SettingsError(
        f"draft.weights = {weights!r} is not possible on {device.name}: {wrong}; {remedy}"
    )


def against_type(device: torch.device, name: str) -> str:
    """Return why a draft's product in a type of weights is wrong on a device; empty if it is
    correct. Raises `torch.OutOfMemoryError` if there is no memory for it."""
    kind = KINDS[name]
    try:
        why_not = kind_of(device).against_bf16(device) if kind is Kind.BF16 else ""
        if why_not and _owner(kind, device) is None:
            return why_not
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(SHAPE, generator=generator).to(ELEMENTS[kind])
        x = torch.randn(TIMED_ROWS[1], SHAPE[1], generator=generator)
        found = _product(kind, weight, device)(x.to(device)).cpu().double()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return str(error).partition("\n")[0]
    expected = x.double() @ weight.double().t()
    apart = float((found - expected).abs().max() / expected.abs().max())
    return "" if apart <= TOLERANCE[name] else f"a product in {name} is off by {apart:.1e}"


def _owner(kind: Kind, device: torch.device) -> Program | None:
    """Return our GPU functions if they compute a draft's product of a kind there."""
    products, contest = choice_on(device), ROUNDED.get(kind)
    return None if products is None or contest is None else products.owner(contest)


def _product(kind: Kind, weight: Tensor, device: torch.device) -> Product:
    """Return the product with a weight [out, in] on the CPU, as a draft on a device computes it."""
    if (program := _owner(kind, device)) is None:
        matrix = Matrix(kind, weight.to(device, ELEMENTS[kind]), None, None)
        return lambda x: rounded_product(matrix, x, narrowed)
    packed = PackedMatrix(kind, *weight.shape)
    packed.pack(weight.to(ELEMENTS[kind]))
    lying, memory = alone(packed)
    return own_matrix(program, lying, memory.to(device))


def _key(device: Device) -> tuple[str, ...]:
    """Return everything that determines the times of products."""
    products = choice_on(device.torch_device)
    program = "torch's" if products is None else products.functions(SOURCE)
    own = program if isinstance(program, str) else program.key
    return device.library, device.kind.driver(device.torch_device), own


def _times(device: Device, profile: Path | None) -> TypeTimes:
    """Return the times of products on a device, from the profile file or measured now and stored.
    If there is no memory to measure them they are empty, and the next start tries again."""
    key = _key(device)
    known = _KNOWN.get(key) or (None if profile is None else load_profile(profile).types_of(key))
    if known is None or not _is_whole(known):
        known = _measured(device, key)
        if not _is_whole(known):
            return known
        if profile is not None:
            rewrite_profile(profile, lambda found: found.holding(known))
    _KNOWN[key] = known
    return known


def _is_whole(times: TypeTimes) -> bool:
    """Return whether each type is timed or refused."""
    rows = len(TIMED_ROWS)
    return all(name in times.refused or len(times.seconds.get(name, ())) == rows for name in KINDS)


def _measured(device: Device, key: tuple[str, ...]) -> TypeTimes:
    refused = {name: why for name in KINDS if (why := against_type(device.torch_device, name))}
    seconds = {}
    shape = COUNTED_SHAPE if device.kind.counts_time else TIMED_SHAPE
    for name in KINDS:
        if name in refused:
            continue
        try:
            products = list(_products(KINDS[name], device, shape))
            seconds[name] = tuple(
                product_seconds(products, rows, device, shape[1]) for rows in TIMED_ROWS
            )
        except RuntimeError as error:
            if is_out_of_memory(error):
                return TypeTimes(key=key, seconds={}, refused=refused)
            refused[name] = str(error).partition("\n")[0]
        finally:
            products = []
        HELD.give_back()
    return TypeTimes(key=key, seconds=seconds, refused=refused)


def _products(kind: Kind, device: Device, shape: tuple[int, int]) -> Iterator[Product]:
    """Yield products with matrices that together exceed any cache."""
    weight = torch.full(shape, 0.01)
    whole = 1 if device.kind.counts_time else TIMED_BYTES
    for _ in range(-(-whole // (weight.numel() * ELEMENTS[kind].itemsize))):
        yield _product(kind, weight, device.torch_device)


def _listed(refused: Mapping[str, str], order: Collection[str]) -> str:
    return "; ".join(f"{name}: {refused[name]}" for name in order if name in refused)


def within_fp16(load: Callable[[], LanguageModel]) -> LanguageModel | None:
    """Return the fp16 model that `load` loads; None if its logits, for tokens from all over the
    vocabulary, include NaN or infinity."""
    try:
        model = load()
    except NotFiniteError:
        return None
    count = min(TOKENS, model.vocabulary_size, model.context)
    tokens = torch.arange(count) * model.vocabulary_size // count
    logits = model.forward(tokens, torch.arange(count), [Segment(model.new_cache(count), 0, count)])
    return None if bool((logits.isnan() | logits.isposinf()).any()) else model
