"""Follows transformers' own forward: how it calls each decoder layer. Stand-ins replace the layers,
which need no numbers, with a cache that only claims to hold rows."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dovetail.workers.models.checkpoints.configured import base_model

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import ClaimedCache

EAGER = "eager"
OLDER_CACHE_NAME = "past_key_values"
Path = tuple[str | int, ...]
UNFOLLOWED = "transformers' own forward cannot be followed"


class UnsupportedError(Exception):
    """The kernels cannot compute a model, or differ from transformers; names the place."""


class UnprovableError(Exception):
    """No back end can be proved to compute a model; names the place."""


@contextmanager
def foreign(kind: type[Exception], what: str) -> Iterator[None]:
    """Raise `kind`, beginning with `what`, for an error of transformers' code: that of an unknown
    model may fail in any way. Errors of a proof stay."""
    try:
        yield
    except (UnsupportedError, UnprovableError):
        raise
    except Exception as error:
        raise kind(f"{what} ({line_of(error)})") from error


@dataclass(frozen=True)
class Call:
    """The model's call of a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, states: Tensor, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call with other hidden states [1, T, width]."""
        kwargs = {**self.kwargs, **changes}
        states = as_given(states, self._given)
        if self.args:
            return (states, *self.args[1:]), kwargs
        return (), {**kwargs, "hidden_states": states}

    @property
    def states(self) -> Tensor:
        """The hidden states passed by the model, [1, T, width]."""
        return in_rows(self._given)

    @property
    def _given(self) -> Tensor:
        given: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return given

    def leaves(self) -> Iterator[tuple[Path, Tensor]]:
        """All tensors except the hidden states, and their places."""
        yield from _leaves(self.args[1:], ("args",))
        yield from _leaves(
            {name: part for name, part in self.kwargs.items() if name != "hidden_states"}, ()
        )


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(part, (*path, index))


@contextmanager
def implementation(model: nn.Module, name: str, *others: nn.Module) -> Iterator[None]:
    """Uses another implementation of attention for a model and other modules, temporarily."""
    found: Iterator[Any] = (
        getattr(module, "config", None) for part in (model, *others) for module in part.modules()
    )
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


class Recorder:
    """Replaces layers while a model's forward runs: records their calls, and returns given
    results."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        results: Sequence[Tensor] | None = None,
        *,
        tuples: int = 0,
    ) -> None:
        """`results`: of the layers; None: random. `tuples`: parts of a layer's result, states
        first."""
        self.calls: dict[int, Call] = {}
        self.results: list[Tensor] = []
        self.final: Tensor | None = None  # the model's final states in fp32, or None
        self.isolated = True  # whether each layer got the result of the one before
        self._layers, self._given, self._tuples = layers, results, tuples

    @property
    def complete(self) -> bool:
        """Return whether every layer has been called."""
        return len(self.calls) == len(self._layers)

    def __enter__(self) -> "Recorder":
        for index, layer in enumerate(self._layers):
            layer.forward = self._stand_in(index)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.__dict__.pop("forward", None)

    def _stand_in(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = Call(args, kwargs)
            before = self.results[-1] if self.results else None
            if index and call.states.shape != self.results[0].shape:
                raise TypeError("a layer is given states of another shape than the first")
            in_order = index == len(self.results)
            self.isolated &= in_order and (
                before is None or call.states is before or torch.equal(call.states, before)
            )
            self.calls[index] = call
            generator = torch.Generator().manual_seed(index)
            result = (
                torch.randn(call.states.shape, generator=generator)
                if self._given is None
                else self._given[index]
            )
            self.results.append(result)
            given = args[0] if args else kwargs["hidden_states"]
            return in_tuple(as_given(result, given), self._tuples)

        return forward


def follow(
    model: Any,
    recorder: Recorder,
    tokens: Tensor,
    positions: Tensor | None,
    cache: "ClaimedCache | None",
    *,
    head: bool = False,
    **given: Any,
) -> None:
    """Run a model's forward for tokens at positions [T] around its layers, in fp32; `head`: to the
    logits. Positions None: the model's own. `UnprovableError` if it fails before the last layer."""
    with ExitStack() as stack:
        embedding = model.get_input_embeddings()
        stack.callback(
            embedding.register_forward_hook(lambda _module, _given, rows: rows.float()).remove
        )
        stack.enter_context(recorder)
        try:
            output = (model if head else base_model(model))(
                input_ids=tokens.unsqueeze(0),
                position_ids=None if positions is None else positions.unsqueeze(0),
                **{cache_name(model): cache},
                use_cache=cache is not None,
                **given,
            )
            recorder.final = output[0][0]
        except Exception as error:  # transformers' code for an unknown model may raise anything
            if not recorder.complete:
                raise UnprovableError(f"{UNFOLLOWED} ({line_of(error)})") from error
    if not recorder.complete:
        raise UnprovableError(f"transformers' own forward calls only {len(recorder.calls)} layers")


def cache_name(model: Any) -> str:
    """Return the name of the forward's cache argument, `cache` since 5.24."""
    for part in (base_model(model), model):
        for name in ("cache", OLDER_CACHE_NAME):
            if name in signature(part.forward).parameters:
                return name
    return OLDER_CACHE_NAME


class Widened(nn.Module):
    """A linear of 16-bit weights that computes in fp32."""

    def __init__(self, part: nn.Linear) -> None:
        super().__init__()
        self._weight, self._bias = part.weight, part.bias

    @property
    def weight(self) -> Tensor:
        """Return the weights in fp32, for layers that ask for their type."""
        return self._weight.float()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return linear(x, self.weight, None if self._bias is None else self._bias.float())


def stand_in(layer: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return a layer that computes in fp32 with the same numbers, and `others` for some of its
    parts."""
    parts = dict(layer.named_modules())
    shared: dict[int, Any] = {id(parameter): parameter for parameter in layer.parameters()}
    shared |= {id(part.config): part.config for part in parts.values() if hasattr(part, "config")}
    own = copy.deepcopy(layer, shared)
    for name, part in parts.items():
        if part in others or type(part) is nn.Linear:
            own.set_submodule(name, others[part] if part in others else Widened(part))
    for part in own.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(part, Widened) and parameter.dtype in (torch.float16, torch.bfloat16):
                part.register_parameter(name, nn.Parameter(parameter.float(), requires_grad=False))
    return own


def in_tuple(states: Tensor, parts: int) -> Tensor | tuple[Tensor | None, ...]:
    """Return states as a layer's result: the first of `parts`, or alone for 0."""
    return (states, *[None] * (parts - 1)) if parts else states


def line_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def in_rows(states: Tensor) -> Tensor:
    """Return states [1, T, width]; of [streams, 1, T, hidden] those of a token side by side."""
    return states if states.ndim != 4 else states.permute(1, 2, 0, 3).flatten(2)


def as_given(rows: Tensor, given: Tensor) -> Tensor:
    """Return states [1, T, width] in the layout of `given`; the inverse of `in_rows`."""
    if given.ndim != 4:
        return rows
    apart = rows.view(*rows.shape[:2], len(given), given.shape[3])
    return apart.permute(2, 0, 1, 3).contiguous()


def first_of(output: Any) -> Tensor:
    """The states [T, width] that a layer returns, alone or first in a tuple."""
    return in_rows(output[0] if isinstance(output, tuple) else output)[0]


DENSE = 8  # positions at the beginning without gaps: smaller windows are really crossed
LANDMARK = re.compile("position|window|chunk|floor|context|block|length|segment|stride|scale_")
"""Names of settings that may be positions at which a function changes."""
MOST_LANDMARKS = 12
SHORT, BEYOND = 64, 4
"""A whole model is run over some tokens beyond the last landmark up to this position."""
SPREAD = (32, 256, 2048, 16384, 65536)  # positions that are always compared


@dataclass(frozen=True)
class LandmarkRun:
    """Positions first, first + 1, ... that exist."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """The first position after it."""
        return self.first + self.count


def runs_of(config: Mapping[str, Any], context: int) -> list[LandmarkRun]:
    """Return the positions of a proof, in runs."""
    marks = sorted({mark for mark in landmarks(config) if DENSE <= mark < context})[:MOST_LANDMARKS]
    wanted = {*range(min(DENSE, context)), *range(max(0, context - 2), context)}
    wanted |= {place for mark in marks for place in (mark - 1, mark)} | {
        place for place in SPREAD if place < context
    }
    runs: list[LandmarkRun] = []
    for position in sorted(wanted):
        if runs and runs[-1].stop == position:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(LandmarkRun(position, 1))
    return runs


def short_text(config: Mapping[str, Any], context: int) -> int:
    """The number of tokens that cross every near landmark of a configuration."""
    return min(
        context, max([DENSE, *(mark for mark in landmarks(config) if mark <= SHORT)]) + BEYOND
    )


def landmarks(value: Any, named: bool = False) -> Iterator[int]:
    """Yield all whole numbers whose names suggest positions, at any depth."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from landmarks(part, named or bool(LANDMARK.search(str(name))))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from landmarks(part, named)
    elif (
        named
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < 1 << 40
        and value == int(value)
    ):
        yield int(value)
