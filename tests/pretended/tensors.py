"""Tensors of the pretended device: their numbers are on the CPU, and are computed there."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretended import counts, rules
from pretended.card import CARD
from pretended.int4 import lay_out, multiply
from pretended.memory import MEMORY
from pretended.recording import Recorded, recording
from pretended.rules import NAME
from pretended.times import CLOCK
from pretended.traffic import moved_by
from pretended.uses import USES
from pretended.values import changed, values_in

aten = torch.ops.aten
WHOLE = (aten.scaled_dot_product_attention,)
"""Operations that consist of others, and that a GPU does at once."""


class Elsewhere(Tensor):
    """A tensor on the pretended device; `held` are its numbers, on the CPU."""

    held: Tensor
    # a call less for each operation
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> "Elsewhere":
        with torch.inference_mode(False):  # views of tensors that are no inference tensors are none
            made = Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device(NAME, 0),
            )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(function, args, kwargs or {})

    def tolist(self) -> Any:
        """Return the numbers, which a GPU hands over if they are asked for by this name."""
        if recording() is not None:
            raise RuntimeError("tolist() waits for the device, and is being captured")
        counts.add(copies_out=1, synchronisations=1)
        return self.held.tolist()

    def data_ptr(self) -> int:
        """Return the address of the numbers, which only functions of ours read by it."""
        return self.held.data_ptr()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_indices(index, self.device))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index, self.device), value)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"


def _indices(index: Any, device: torch.device) -> Any:
    """Return an index with its lists as tensors on the device, to which torch copies them where a
    GPU is indexed."""
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.long, device=device)
    return tuple(_indices(part, device) for part in index) if isinstance(index, tuple) else index


def compute(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do an operation of torch on whichever device its tensors are; `RuntimeError` where CUDA would
    refuse it."""
    if function._can_decompose() and function.overloadpacket not in WHOLE:
        return function.decompose(*args, **kwargs)  # in inference mode these arrive whole
    packet, given = function.overloadpacket, values_in((args, kwargs))
    ours = [tensor for tensor in given if isinstance(tensor, Elsewhere)]
    asked = kwargs.get("device")
    asked_here = asked is not None and torch.device(asked).type == NAME
    if not ours and not asked_here:
        return function(*args, **kwargs)
    CARD.check(packet, given)
    CLOCK.count(packet, args)
    others = [t for t in given if isinstance(t, Tensor) and not isinstance(t, Elsewhere)]
    if ours and others:
        rules.check_devices(function, args, others)
    if (generator := kwargs.get("generator")) is not None:
        raise RuntimeError(
            f"{packet}: expected a generator of {NAME}, found one of {generator.device}"
        )
    if recording() is not None:
        rules.check_captured(function, args, kwargs, others)
    else:
        counts.count(function, args, kwargs)
    return _done(function, args, kwargs, ours, asked_here)


def _done(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ours: Sequence[Elsewhere],
    here: bool,
) -> Any:
    """Do the operation on the CPU, and say of its results where they are. `here`: the device was
    asked for by name."""
    packet = function.overloadpacket
    plain = {
        name: torch.device("cpu") if name == "device" and value is not None else value
        for name, value in kwargs.items()
        if name != "pin_memory"
    }
    call, held = _as_cuda(packet) or function, changed((tuple(args), plain), _held)
    result = call(*held[0], **held[1])
    if not function.is_view:
        USES.note([tensor.held for tensor in ours])
    if any(tensor.held.shape != tensor.shape for tensor in ours):
        raise NotImplementedError(f"{packet} resizes a tensor, which {NAME} cannot follow")
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if packet is aten._to_copy and kwargs.get("device") is not None:
        stays = here
    else:
        stays = here or (isinstance(first, Elsewhere) if packet is aten.copy_ else bool(ours))
    if not stays:
        return result
    results = [part for part in values_in(result) if isinstance(part, Tensor)]
    graph = recording()
    for part in results:
        CARD.check_result(part)
        MEMORY.take_for(part, captured=graph is not None)
    if graph is not None:
        moved = moved_by(function, held[0], results)
        graph.append(Recorded(call, held[0], held[1], results, moved))
    elif counts.are_open():
        counts.add(moved=moved_by(function, held[0], results))
    back = {id(tensor.held): tensor for tensor in ours}
    return changed(result, lambda part: _wrapped(part, back) if isinstance(part, Tensor) else part)


def _wrapped(part: Tensor, back: Mapping[int, Elsewhere]) -> Elsewhere:
    return back[id(part)] if id(part) in back else Elsewhere(part)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _as_cuda(packet: Any) -> Callable[..., Tensor] | None:
    """Return an operation whose result on CUDA differs from the CPU's, computed on the CPU as CUDA
    does; None for all others."""
    of: dict[Any, Callable[..., Tensor]] = {
        aten._convert_weight_to_int4pack: lay_out,
        aten._weight_int4pack_mm: multiply,
        aten.scaled_dot_product_attention: _attend,
    }
    return of.get(packet)


def _attend(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention whose sums are fp32, rounded once to the type of the queries."""
    wide = changed(((query, *args), kwargs), _widened)
    return aten.scaled_dot_product_attention(*wide[0], **wide[1]).to(query.dtype)  # type: ignore[no-any-return]


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
