"""The parts that the forward passes of heads are put together from: what comes in, what goes out,
and how matrices, norms and layers are taken from a checkpoint.

T rows of a pass, R rows asked for, V the target's vocabulary, H the head's width, W the width of a
feature. Knows no kind of head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dovetail.workers.heads.arithmetic import Arithmetic, LayerWeights, Product
from dovetail.workers.heads.spec import HeadSpec


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head that is whole and fits its target."""

    source: str
    digest: str
    trained_for: str
    """Digest of the target that it was trained for; empty if config.json lacks it."""
    spec: HeadSpec
    frequencies: Tensor
    """float32 [rotary_dim / 2]: the frequencies of the rotary positions."""
    rope_scaling: float
    tensors: Mapping[str, Tensor]
    """All tensors by the names of their kind, but for the next three."""
    embedding: Tensor
    """[V, H]."""
    output: Tensor
    """[Vd, H]; the same object as the embedding where the two are equal."""
    tokens: Tensor | None
    """int64 [Vd]: the target's ids of the draft vocabulary, ascending; None: row v is token v."""


@dataclass(frozen=True)
class Outcome:
    """The states that the layers leave for the output head."""

    states: Tensor
    """[R, H]: the recurrent states."""
    branches: tuple[Tensor, ...]
    """[R, H] each: the states that the output head reads."""
    share: Tensor | None = None
    """[R, 1]: the share of the first of two branches in the mixture of both."""
    contrast: Tensor | None = None
    """[R, H]: the states that the output head reads for the token after the next."""


@dataclass(frozen=True)
class Inputs:
    """The rows of a pass on the head's device."""

    embedded: Tensor
    """[T, H]."""
    features: Tensor
    """[T, W], or recurrent [T, H]."""
    seen: Any
    rows: Tensor | None
    contrast: bool
    true: bool

    def asked(self, states: Tensor) -> Tensor:
        """Return those of states [T, H] that are asked for, [R, H]."""
        return states if self.rows is None else states[self.rows]

    @staticmethod
    def outcome(states: Tensor, *branches: Tensor, **more: Tensor | None) -> Outcome:
        """Return what the output head reads: `branches`, or the states themselves."""
        return Outcome(states, branches or (states,), **more)


Body = Callable[[Inputs], Outcome]
"""The forward pass of a kind, from embedded tokens and features to what the output head reads."""
Fusion = Callable[[Tensor, Tensor], Tensor]
"""Embedded tokens [T, H] and features [T, H] -> what enters the first layer [T, H]."""


@dataclass(frozen=True)
class Parts:
    """Takes the parts of a head out of its checkpoint."""

    checkpoint: HeadCheckpoint
    arithmetic: Arithmetic

    def linear(self, *names: str) -> Product:
        """Return one product for matrices of the same inputs, with their biases, if any."""
        return self.arithmetic.linear(self.stacked(*names), self.bias(*names))

    def stacked(self, *names: str) -> Tensor:
        """Return the weights of linears, below each other."""
        found = [self.checkpoint.tensors[f"{name}.weight"] for name in names]
        return found[0] if len(found) == 1 else torch.cat(found)

    def bias(self, *names: str) -> Tensor | None:
        """Return the biases of linears, which have all or none."""
        found = [
            self.checkpoint.tensors[f"{name}.bias"]
            for name in names
            if f"{name}.bias" in self.checkpoint.tensors
        ]
        return torch.cat(found) if found else None

    def transposed(self, name: str) -> Product:
        """Return the product with a matrix that is stored as [in, out]."""
        return self.arithmetic.linear(self.checkpoint.tensors[name].t().contiguous())

    def norm(self, name: str) -> Product:
        """Return a norm."""
        return self.arithmetic.norm(
            self.checkpoint.tensors[f"{name}.weight"], self.checkpoint.spec.epsilon
        )

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor that need not be there."""
        return self.checkpoint.tensors.get(name)

    def exact(self, name: str) -> Product:
        """Return the product with a small matrix that is never quantised: what it decides would
        change with the rounding of its neighbours."""
        weight = self.checkpoint.tensors[f"{name}.weight"].to(
            self.arithmetic.device, self.arithmetic.dtype
        )
        return lambda x: linear(x, weight)

    def layer_weights(self, layer: str, index: int, *, mlp: bool) -> LayerWeights:
        """Return the numbers of a decoder layer whose names begin with `layer`."""
        at = f"{layer}.self_attn."
        qkv = [f"{at}{name}_proj" for name in "qkv"]
        return LayerWeights(
            index=index,
            qkv=self.stacked(*qkv),
            qkv_bias=self.bias(*qkv),
            output=self.stacked(f"{at}o_proj"),
            output_bias=self.bias(f"{at}o_proj"),
            query_norm=self.tensor(f"{at}q_norm.weight"),
            key_norm=self.tensor(f"{at}k_norm.weight"),
            attention_norm=self.tensor(f"{layer}.input_layernorm.weight"),
            mlp_norm=self.checkpoint.tensors[f"{layer}.post_attention_layernorm.weight"],
            gate_up=self.stacked(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj") if mlp else None,
            down=self.stacked(f"{layer}.mlp.down_proj") if mlp else None,
        )

    def concatenation(self) -> Fusion:
        """Return EAGLE's fusion: one matrix over both side by side, the embedding first."""
        fc = self.linear("fc")
        return lambda embedded, features: fc(torch.cat([embedded, features], dim=-1))

    def layered(self, fuse: Fusion) -> Body:
        """Return the body of a fusion and all decoder layers."""
        layers = [
            self.arithmetic.layer(self.layer_weights(f"layers.{index}", index, mlp=True))
            for index in range(self.checkpoint.spec.blocks)
        ]

        def body(inputs: Inputs) -> Outcome:
            states = fuse(inputs.embedded, inputs.features)
            for layer in layers:
                states = layer(states, inputs.seen)
            return inputs.outcome(inputs.asked(states))

        return body

    def attention_half(self, layer: str) -> tuple[Callable[[Tensor, Tensor, Any], Tensor], Product]:
        """Return the attention of a layer, (its inputs, states, rows) -> states behind it, and the
        norm in front of what comes in the place of the MLP."""
        weights, arithmetic = self.layer_weights(layer, 0, mlp=False), self.arithmetic
        qkv, output, mix = (
            arithmetic.linear(weights.qkv, weights.qkv_bias),
            arithmetic.linear(weights.output, weights.output_bias),
            arithmetic.mix(weights),
        )
        return lambda inputs, states, seen: states + output(mix(qkv(inputs), seen)), self.norm(
            f"{layer}.post_attention_layernorm"
        )

    def mlp(self, name: str) -> Product:
        """Return a gated MLP."""
        gate_up, down = (
            self.linear(f"{name}.gate_proj", f"{name}.up_proj"),
            self.linear(f"{name}.down_proj"),
        )
        return lambda x: down(self.arithmetic.gated(gate_up(x)))
