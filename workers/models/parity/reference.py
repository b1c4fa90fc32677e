"""The logits of a long text by transformers' eager forward in fp32, with one layer in memory: all
parts of a text pass a layer before the next is read. Models that transformers rearranges, or that
compute between layers, are loaded whole."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dovetail.protocol.memory import release_memory
from dovetail.workers.models import attention
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.configured import base_model, decoder_layers
from dovetail.workers.models.checkpoints.loader import Types, open_skeleton
from dovetail.workers.models.parity.following import (
    EAGER,
    Call,
    Recorder,
    UnprovableError,
    Widened,
    follow,
    implementation,
    stand_in,
)
from dovetail.workers.models.parity.oracle import ClaimedCache, Oracle
from dovetail.workers.models.transformers import DynamicCache

PART = 128  # tokens of a text that are read at a time
HEAD_ROWS = 8192  # rows of the head that are in fp32 at a time

Tell = Callable[[int, int], None]  # is called with the number of finished layers, and of all


class _TextCache(ClaimedCache):
    """Keys and values, or the state, of one layer for the parts read so far."""

    def __init__(self, config: Any) -> None:
        super().__init__(0)
        self.layers = DynamicCache(config=config).layers
        self._rows: tuple[Tensor, Tensor] | None = None

    get_conv_state, update_conv_state = DynamicCache.get_conv_state, DynamicCache.update_conv_state
    get_recurrent_state = DynamicCache.get_recurrent_state
    update_recurrent_state = DynamicCache.update_recurrent_state

    def update(
        self, key_states: Tensor, value_states: Tensor, *unused: Any, **also_unused: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        self._rows = (
            new  # type: ignore[assignment]
            if self._rows is None
            else tuple(torch.cat(pair, dim=-2) for pair in zip(self._rows, new, strict=True))
        )
        assert self._rows is not None
        self._length = self._rows[0].shape[-2]
        return self._rows


class _Head(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._weight, self._bias = head.weight, head.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., vocabulary]."""
        y = torch.cat(
            [linear(x, rows.float()) for rows in torch.split(self._weight, HEAD_ROWS)], dim=-1
        )
        return y if self._bias is None else y + self._bias.float()


@torch.inference_mode()
def reference_logits(
    checkpoint: Checkpoint,
    tokens: Sequence[int],
    context: int,
    tell: Tell = lambda _done, _all: None,
) -> Iterator[Tensor]:
    """Yield the logits [part, V] of a text; `UnprovableError` if transformers' forward cannot be
    followed."""
    attention.register()
    skeleton = open_skeleton(checkpoint)
    model, types = skeleton.model, Types(None, None)
    name, found = decoder_layers(model)
    layers = list(found)
    skeleton.fill(model, "", types, but=found)
    _widen_beside(model)
    oracle = Oracle(model, layers, context)
    if not oracle.isolated:
        raise UnprovableError(
            "transformers computes something between the layers of this model, or not each of "
            "them in turn"
        )
    text = torch.tensor(tokens)
    parts = [slice(start, min(start + PART, len(text))) for start in range(0, len(text), PART)]
    with implementation(model, EAGER, *layers):
        calls = [_calls(model, layers, text, part, tuples=oracle.tuples) for part in parts]
        states = [of_part[0].states for of_part in calls]
        for index, layer in enumerate(layers):
            tell(index, len(layers))
            skeleton.fill(layer, f"{name}.{index}", types)
            own, cache = stand_in(layer, {}), _TextCache(model.config)
            with implementation(own, EAGER):
                states = [
                    _run(own, of_part[index], rows, cache)
                    for of_part, rows in zip(calls, states, strict=True)
                ]
            del own
            layer.to_empty(device="meta")
            release_memory()
        tell(len(layers), len(layers))
        model.set_output_embeddings(_Head(model.get_output_embeddings()))
        for part, rows in zip(parts, states, strict=True):
            results = [rows.new_zeros(1).expand(rows.shape)] * (len(layers) - 1) + [rows]
            recorder = Recorder(layers, results, tuples=oracle.tuples)
            follow(
                model,
                recorder,
                text[part],
                torch.arange(len(text))[part],
                ClaimedCache(part.start),
                head=True,
            )
            if recorder.final is None:
                raise UnprovableError("transformers' own forward fails behind the last layer")
            yield recorder.final


def _widen_beside(model: Any) -> None:
    base = base_model(model)
    for name, part in list(base.named_children()):
        if type(part) is nn.Linear:
            setattr(base, name, Widened(part))


def _calls(
    model: Any, layers: Sequence[nn.Module], text: Tensor, part: slice, *, tuples: int
) -> dict[int, Call]:
    width = model.config.get_text_config().hidden_size
    nothing = torch.zeros(1).expand(1, part.stop - part.start, width)
    recorder = Recorder(layers, [nothing] * len(layers), tuples=tuples)
    follow(model, recorder, text[part], torch.arange(len(text))[part], ClaimedCache(part.start))
    return recorder.calls


def _run(layer: nn.Module, call: Call, states: Tensor, cache: ClaimedCache) -> Tensor:
    args, kwargs = call.of(states)

    def change(value: Any) -> Any:
        return cache if isinstance(value, ClaimedCache) else value

    output = layer(*map(change, args), **{name: change(value) for name, value in kwargs.items()})
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
