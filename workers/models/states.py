"""Hidden states kept from a pass: those that enter given layers or the final norm, and those after
it."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dovetail.workers.models.checkpoints.configured import base_model
from dovetail.workers.models.segment import Segment

LAST = -1  # the place after the final norm


class Kept:
    """The states [T, hidden] of one pass at the `wanted` places: layers they enter, the number of
    layers (the final norm), and LAST."""

    def __init__(self, wanted: Collection[int] = ()) -> None:
        self.wanted = wanted
        self.states: dict[int, Tensor] = {}

    def keep(self, place: int, states: Tensor) -> None:
        """Copy the states of a place if they are wanted: layers compute in place."""
        if place in self.wanted:
            self.states[place] = states.clone()

    def keep_last(self, states: Tensor) -> None:
        """Store the states after the final norm (which nobody writes to) if they are wanted."""
        if LAST in self.wanted:
            self.states[LAST] = states


@dataclass(frozen=True)
class ModelPass:
    """T rows to compute: those of all segments in order."""

    tokens: Tensor  # int64 [T]; `positions` likewise
    positions: Tensor
    segments: Sequence[Segment] = ()
    rows: Tensor | None = None  # int64 [R]: the rows that have logits; None: all
    kept: Kept = field(default_factory=Kept)


@contextmanager
def keeping(model: Any, layers: Sequence[nn.Module], kept: Kept) -> Iterator[None]:
    """Keep wanted states of a transformers model's forward pass."""

    def listen(place: int) -> Any:
        def hook(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept.keep(place, (args[0] if args else kwargs["hidden_states"])[0])

        return layers[place].register_forward_pre_hook(hook, with_kwargs=True)

    def hear_last(_layer: nn.Module, _args: Any, output: Any) -> None:
        kept.keep(len(layers), (output[0] if isinstance(output, tuple) else output)[0])

    handles = [listen(place) for place in kept.wanted if place in range(len(layers))]
    if layers and len(layers) in kept.wanted:
        handles.append(layers[-1].register_forward_hook(hear_last))
    if LAST in kept.wanted:
        handles.append(
            base_model(model).register_forward_hook(
                lambda _model, _args, output: kept.keep(LAST, output.last_hidden_state[0])
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
