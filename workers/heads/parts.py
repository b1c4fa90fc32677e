"""The parts of heads' forward passes: inputs, outputs, and the matrices, norms and layers of a
checkpoint. T rows of a pass, R requested rows, V the target's vocabulary, H the head's width, W the
width of a feature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dovetail.workers.heads.engines import HeadEngine, HeadLayer, Rotation, module_of
from dovetail.workers.heads.spec import HeadSpec
from dovetail.workers.kernels.layer_plan import Activation
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.layer_parts import LayerParts
from dovetail.workers.models.families.description import (
    HEAD_NORMS,
    Attention,
    LayerSpec,
    Mlp,
    Norms,
)


@dataclass(frozen=True)
class HeadCheckpoint:
    """A complete head that fits its target."""

    source: str
    digest: str
    trained_for: str  # digest of the target that it was trained for; empty if config.json lacks it
    spec: HeadSpec
    rotation: Rotation
    tensors: Mapping[str, Tensor]  # all tensors by their kind's names, except the next three
    embedding: Tensor  # [V, H]
    output: Tensor  # [Vd, H]; the same object as the embedding if they are equal
    tokens: Tensor | None
    """int64 [Vd]: the target's ids of the draft vocabulary, ascending; None: row v is token v."""
    coded: bool = False  # True if its matrices are stored as 8-bit codes, or blocks of a GGUF file


@dataclass(frozen=True)
class Outcome:
    """The results of the layers for the output head."""

    states: Tensor  # [R, H]: the recurrent states
    branches: tuple[Tensor, ...]  # [R, H] each: the states that the output head reads
    share: Tensor | None = None  # [R, 1]: the share of the first of two branches in the mixture
    contrast: Tensor | None = None
    """[R, H]: the states that the output head reads for the token after the next."""


@dataclass(frozen=True)
class Inputs:
    """The rows of a pass on the head's device."""

    tokens: Tensor  # int64 [T]
    embedded: Tensor  # [T, H]
    features: Tensor  # [T, W], or recurrent [T, H]
    seen: Any
    rows: Tensor | None
    contrast: bool
    true: bool

    @staticmethod
    def outcome(states: Tensor, *branches: Tensor, **more: Tensor | None) -> Outcome:
        """Return the input of the output head: `branches`, or the states themselves."""
        return Outcome(states, branches or (states,), **more)


Body = Callable[[Inputs], Outcome]
"""The forward pass of a kind, from embedded tokens and features to the input of the output head."""
Pairs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The state [H] of a position, the tokens [N] before it and candidates [C] for it (ids of the
target) -> what is added to the candidates' logits, float32 [N, C]."""
Fusion = Callable[[Tensor, Tensor], Tensor]
"""Embedded tokens [T, H] and features [T, H] -> the input of the first layer [T, H]."""


@dataclass(frozen=True)
class HeadParts:
    """Builds the parts of a head from its checkpoint."""

    checkpoint: HeadCheckpoint
    engine: HeadEngine

    def linear(self, *names: str) -> Product:
        """Return one product for matrices of the same inputs, with their biases, if any."""
        found = [self.tensor(f"{name}.bias") for name in names]
        biases = [bias for bias in found if bias is not None]
        return self.engine.linear(self.stacked(*names), torch.cat(biases) if biases else None)

    def stacked(self, *names: str) -> Tensor:
        """Return the weights of linears, stacked."""
        found = [self.checkpoint.tensors[f"{name}.weight"] for name in names]
        return found[0] if len(found) == 1 else torch.cat(found)

    def transposed(self, name: str) -> Product:
        """Return the product with a matrix that is stored as [in, out]."""
        return self.engine.linear(self.checkpoint.tensors[name].t().contiguous())

    def norm(self, name: str) -> Product:
        weight = self.checkpoint.tensors[f"{name}.weight"]
        return self.engine.norm(weight, self.checkpoint.spec.epsilon)

    def tensor(self, name: str) -> Tensor | None:
        """Return an optional tensor."""
        return self.checkpoint.tensors.get(name)

    def exact(self, name: str) -> Product:
        """Return the product with a small matrix that is never quantised, because rounding could
        flip a decision."""
        weight = self.checkpoint.tensors[f"{name}.weight"].to(self.engine.device, torch.float32)
        return lambda x: linear(x, weight)

    def table(self, name: str) -> Tensor:
        """Return a table with a row per token, as stored, on the device."""
        tensors = self.checkpoint.tensors
        found = tensors[name] if name in tensors else tensors[f"{name}.weight"]
        return found.to(self.engine.device)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return the rows of the draft vocabulary for ids of the target, which it must have."""
        own = self.checkpoint.tokens
        return tokens if own is None else torch.searchsorted(own.to(tokens.device), tokens)

    def concatenation(self) -> Fusion:
        """Return EAGLE's fusion: one matrix over both concatenated, the embedding first."""
        fc = self.linear("fc")
        return lambda embedded, features: fc(torch.cat([embedded, features], dim=-1))

    def described(self, layer: str, spec: LayerSpec, index: int = 0) -> HeadLayer:
        """Return a decoder layer by its description; `layer` is the prefix of its tensors'
        names."""
        tensors = self.checkpoint.tensors.items()
        own = {name.removeprefix(layer): part for name, part in tensors if name.startswith(layer)}
        return self.engine.layer(LayerParts(module_of(own), spec), index)

    def layer(
        self, layer: str, index: int = 0, *, normed: bool = False, mlp: bool = True, given: int = 0
    ) -> HeadLayer:
        """Return a Llama decoder layer. `normed`: with a norm before its attention; `mlp`: False if
        the head replaces it; `given`: the width of the input of attention in place of the
        states."""
        head = self.checkpoint.spec
        norms = self.tensor(f"{layer}self_attn.q_norm.weight") is not None
        spec = LayerSpec(
            Attention(
                head.heads,
                head.kv_heads,
                head.head_dim,
                head.head_dim**-0.5,
                norms=HEAD_NORMS if norms else None,
            ),
            Mlp(Activation.SILU_GATED) if mlp else None,
            Norms(
                head.epsilon,
                pre_mixer="input_layernorm" if normed else None,
                pre_mlp="post_attention_layernorm" if mlp else None,
            ),
            given=given,
        )
        return self.described(layer, spec, index)

    def layered(self, fuse: Fusion) -> Body:
        """Return the body of a fusion and all decoder layers, the first without a norm before its
        attention."""
        count = self.checkpoint.spec.blocks
        *layers, last = (self.layer(f"layers.{i}.", i, normed=i > 0) for i in range(count))

        def body(inputs: Inputs) -> Outcome:
            states = fuse(inputs.embedded, inputs.features)
            for layer in layers:
                states = layer(states, inputs.seen)
            return inputs.outcome(last(states, inputs.seen, inputs.rows))

        return body
