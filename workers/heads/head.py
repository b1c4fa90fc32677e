"""A draft head, ready to compute: EAGLE-1/2, EAGLE-3, Dovetail, Jakiro and Jakiro*, each from its
public checkpoint.

Row j of a head takes the feature of position j and the token of position j + 1, stands at rotary
position j, and predicts the token of position j + 2. A feature is the target's, or what the head
itself made of its previous row. Logits are over the target's vocabulary. Knows rows, positions and
slots; nothing of trees, sampling, or which rows deserve to stay in a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import BACKENDS
from dovetail.workers.heads import experts, fusion
from dovetail.workers.heads.arithmetic import (
    KINDS,
    TYPES,
    Arithmetic,
    FixedRows,
    Geometry,
    KernelArithmetic,
    Layer,
    LayerWeights,
    Product,
    TorchArithmetic,
)
from dovetail.workers.heads.checkpoint import HeadCheckpoint, classify, open_head_checkpoint
from dovetail.workers.heads.spec import HeadSpec
from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends import fused
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.models.substitutes.quantised import against_int4
from dovetail.workers.progress import beat

__all__ = ["FixedRows", "Head", "HeadSpec", "Predicted", "classify", "open_head"]

WEIGHTS = ("auto", "fp32", "fp16", "bf16", "int8", "int4")
"""`auto` is what is stored: on a CPU matrix by matrix, on a GPU one 16-bit type."""
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Predicted:
    """What a pass says of its R rows."""

    logits: Tensor
    """float32 [R, V], over the target's vocabulary; -inf where the draft vocabulary has no such
    token."""
    states: Tensor
    """[R, H]: the recurrent states, features of the next step."""
    contrast: Tensor | None
    """float32 [R, V], where asked for and where there is one: logits of the token after the one
    that a row predicts."""


@dataclass(frozen=True)
class _Outcome:
    """What the layers leave for the output head."""

    states: Tensor
    """[R, H]: recurrent."""
    branches: tuple[Tensor, ...]
    """[R, H] each: what the output head reads."""
    share: Tensor | None = None
    """[R, 1]: of the first of two branches in the mixture of both."""
    contrast: Tensor | None = None
    """[R, H]: what the output head reads for the token after the next."""


@dataclass(frozen=True)
class _Inputs:
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
        """Those of states [T, H] that are asked for [R, H]."""
        return states if self.rows is None else states[self.rows]


_Body = Callable[[_Inputs], _Outcome]


class Head:
    """A head on one device; T rows of a pass, R rows asked for, V the target's vocabulary, H the
    head's width, W the width of a feature."""

    def __init__(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic, *, weights: str) -> None:
        self.spec, self.source = checkpoint.spec, checkpoint.source
        self.device: torch.device = arithmetic.device
        self.checkpoint_digest, self.trained_for = checkpoint.digest, checkpoint.trained_for
        self.weights, self.arithmetic = weights, arithmetic.name
        self.vocabulary_size = self.spec.vocabulary_size
        self._arithmetic = arithmetic
        self._body = _BODIES[self.spec.kind](checkpoint, arithmetic)
        self._table = _table(checkpoint.embedding, arithmetic)
        shares = checkpoint.output is checkpoint.embedding and self._table.dtype == arithmetic.dtype
        self._output = arithmetic.linear(self._table if shares else checkpoint.output)
        self._tokens = None if checkpoint.tokens is None else checkpoint.tokens.to(self.device)

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for one session of at least `capacity` rows, those of trees included."""
        return self._arithmetic.new_cache(capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        true: bool,
        rows: Tensor | None = None,
        contrast: bool = False,
    ) -> Predicted:
        """tokens, positions int64 [T] (the rows of all segments, one after the other), features [T,
        W] of the target if `true`, else recurrent [T, H].

        `rows`: which of the T are predicted, None: all. Keys and values of all rows go into the
        caches.
        """
        if not true and features.shape[1] != self.spec.hidden:
            raise ValueError(
                f"recurrent features of width {features.shape[1]}, where the head has "
                f"{self.spec.hidden}"
            )
        if true and features.shape[1] != self.spec.feature_width:
            raise ValueError(
                f"features of width {features.shape[1]}, where the head reads "
                f"{self.spec.feature_width}"
            )
        return self._predict(
            tokens,
            features,
            self._arithmetic.arrange(positions, segments),
            true=true,
            rows=rows,
            contrast=contrast,
        )

    @torch.inference_mode()
    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        cache: KVCache,
        *,
        contrast: bool = False,
    ) -> Predicted:
        """A pass of recurrent rows in shapes that depend on nothing but T, for CUDA graphs: no
        value is read back from the device. Torch's cache only.

        tokens, positions, slots int64 [T], features [T, H], mask [T, capacity] of 0 and -inf; a row
        sees itself by its slot.
        """
        seen = self._arithmetic.arrange(positions, FixedRows(cache, slots, mask))
        return self._predict(tokens, features, seen, true=False, rows=None, contrast=contrast)

    def _predict(
        self,
        tokens: Tensor,
        features: Tensor,
        seen: Any,
        *,
        true: bool,
        rows: Tensor | None,
        contrast: bool,
    ) -> Predicted:
        beat()
        device, dtype = self.device, self._arithmetic.dtype
        embedded = embedding(tokens.to(device), self._table).to(dtype)
        rows = None if rows is None else rows.to(device)
        out = self._body(
            _Inputs(
                embedded,
                features.to(device, dtype).contiguous(),
                seen,
                rows,
                contrast and self.spec.contrast,
                true,
            )
        )
        if out.states.shape[0] == 0:
            empty = torch.empty(0, self.vocabulary_size, device=device)
            return Predicted(empty, out.states, None if out.contrast is None else empty)
        read = [*out.branches, *([] if out.contrast is None else [out.contrast])]
        logits = (
            self._output(read[0] if len(read) == 1 else torch.cat(read))
            .float()
            .view(len(read), len(out.states), -1)
        )
        first = logits[0] if out.share is None else _mixed(logits[0], logits[1], out.share.float())
        return Predicted(
            self._spread(first),
            out.states,
            None if out.contrast is None else self._spread(logits[-1]),
        )

    def _spread(self, logits: Tensor) -> Tensor:
        """[R, Vd] -> [R, V]."""
        if self._tokens is None:
            return logits
        spread = torch.full(
            (logits.shape[0], self.vocabulary_size), float("-inf"), device=logits.device
        )
        return spread.index_copy_(1, self._tokens, logits)


def _mixed(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """The logarithm of the mixture of two distributions; any constant would do, so that these are
    logits like all others."""
    return torch.logaddexp(
        first.log_softmax(dim=-1) + share.log(), second.log_softmax(dim=-1) + torch.log1p(-share)
    )


def _table(weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The embedding as it is looked up: on a CPU in the type that it is stored in, on a GPU in that
    of the states."""
    return (
        weight
        if arithmetic.device.type == "cpu"
        else weight.to(arithmetic.device, arithmetic.dtype)
    )


# ---- the bodies: fusion, layers, and what the output head reads of them ----


@dataclass(frozen=True)
class _Parts:
    """Takes the parts of a head out of its checkpoint."""

    checkpoint: HeadCheckpoint
    arithmetic: Arithmetic

    def linear(self, *names: str) -> Product:
        """Matrices with the same inputs, below each other, with their biases if they have any."""
        return self.arithmetic.linear(self.stacked(*names), self.bias(*names))

    def stacked(self, *names: str) -> Tensor:
        """The weights of linears, below each other."""
        found = [self.checkpoint.tensors[f"{name}.weight"] for name in names]
        return found[0] if len(found) == 1 else torch.cat(found)

    def bias(self, *names: str) -> Tensor | None:
        """The biases of linears, which have all or none."""
        found = [
            self.checkpoint.tensors[f"{name}.bias"]
            for name in names
            if f"{name}.bias" in self.checkpoint.tensors
        ]
        return torch.cat(found) if found else None

    def transposed(self, name: str) -> Product:
        """A matrix that is stored as [in, out]."""
        return self.arithmetic.linear(self.checkpoint.tensors[name].t().contiguous())

    def norm(self, name: str) -> Product:
        """A norm."""
        return self.arithmetic.norm(
            self.checkpoint.tensors[f"{name}.weight"], self.checkpoint.spec.epsilon
        )

    def tensor(self, name: str) -> Tensor | None:
        """A tensor that need not be there."""
        return self.checkpoint.tensors.get(name)

    def exact(self, name: str) -> Product:
        """A small matrix that is never quantised: what it decides would change with the neighbours'
        rounding."""
        weight = self.checkpoint.tensors[f"{name}.weight"].to(
            self.arithmetic.device, self.arithmetic.dtype
        )
        return lambda x: linear(x, weight)

    def layer_weights(self, layer: str, index: int, *, mlp: bool) -> LayerWeights:
        """The numbers of a decoder layer whose names begin with `layer`."""
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

    def concatenation(self) -> fusion.Fusion:
        """EAGLE's fusion."""
        return fusion.concatenated(self.linear("fc"))

    def gating(self) -> fusion.Fusion:
        """Dovetail's."""
        spec = self.checkpoint.spec
        return fusion.gated(
            norm=self.norm("input_layernorm") if spec.dgf_embed_norm else None,
            feature=self.transposed("W_1"),
            embedding=self.transposed("W_2"),
            gate=self.transposed("W_z"),
            activated=spec.dgf_silu,
        )


def _layered(fuse: fusion.Fusion, layers: Sequence[Layer]) -> _Body:
    """EAGLE-1/2 and Dovetail: a fusion and decoder layers."""

    def body(inputs: _Inputs) -> _Outcome:
        states = fuse(inputs.embedded, inputs.features)
        for layer in layers:
            states = layer(states, inputs.seen)
        states = inputs.asked(states)
        return _Outcome(states, (states,))

    return body


def _eagle(checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> _Body:
    parts = _Parts(checkpoint, arithmetic)
    return _layered(
        parts.concatenation(), [arithmetic.layer(parts.layer_weights("layers.0", 0, mlp=True))]
    )


def _dovetail(checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> _Body:
    parts = _Parts(checkpoint, arithmetic)
    return _layered(
        parts.gating(),
        [
            arithmetic.layer(parts.layer_weights(f"layers.{i}", i, mlp=True))
            for i in range(checkpoint.spec.blocks)
        ],
    )


def _attention_half(
    parts: _Parts, layer: str
) -> tuple[Callable[[Tensor, Tensor, Any], Tensor], Product]:
    """(inputs of the attention, states, rows) -> states behind the attention, and the norm in front
    of what stands in the MLP's place."""
    weights, arithmetic = parts.layer_weights(layer, 0, mlp=False), parts.arithmetic
    qkv, output, mix = (
        arithmetic.linear(weights.qkv, weights.qkv_bias),
        arithmetic.linear(weights.output, weights.output_bias),
        arithmetic.mix(weights),
    )
    return lambda inputs, states, seen: states + output(mix(qkv(inputs), seen)), parts.norm(
        f"{layer}.post_attention_layernorm"
    )


def _jakiro(checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> _Body:
    parts, count, at = _Parts(checkpoint, arithmetic), checkpoint.spec.experts, "layers.0.mlp_moe"
    fuse = parts.concatenation()
    attend, norm = _attention_half(parts, "layers.0")
    wide = [f"{at}.experts.{i}.{name}_proj" for name in ("gate", "up") for i in range(count)]
    down = torch.cat([parts.stacked(f"{at}.experts.{i}.down_proj") for i in range(count)], dim=1)
    mixture = experts.Gated(
        count,
        checkpoint.spec.contrast,
        parts.exact(f"{at}.gate"),
        parts.linear(*wide),
        arithmetic.gated,
        arithmetic.linear(down),
    )

    def body(inputs: _Inputs) -> _Outcome:
        states = fuse(inputs.embedded, inputs.features)
        states = inputs.asked(attend(states, states, inputs.seen))
        mixed, contrast = (
            mixture(norm(states), contrast=inputs.contrast)
            if len(states)
            else (states, states if inputs.contrast else None)
        )
        return _Outcome(
            states + mixed,
            (states + mixed,),
            contrast=None if contrast is None else states + contrast,
        )

    return body


def _jakiro_star(checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> _Body:
    parts, count, at = _Parts(checkpoint, arithmetic), checkpoint.spec.experts, "layers.0.mlp_moe"
    fuse = parts.concatenation()
    attend, norm = _attention_half(parts, "layers.0")
    up = parts.linear(*(f"{at}.experts.{i}.fc" for i in range(count)))
    down = arithmetic.linear(
        torch.cat([parts.stacked(f"{at}.experts.{i}.proj") for i in range(count)], dim=1)
    )
    branches = experts.Branched(count, parts.exact(f"{at}.gate"), up, down)

    def body(inputs: _Inputs) -> _Outcome:
        states = fuse(inputs.embedded, inputs.features)
        states = inputs.asked(attend(states, states, inputs.seen))
        if not len(states):
            return _Outcome(states, (states, states))
        first, second, share = branches(norm(states))
        mixed = states + share.to(first.dtype) * first + (1.0 - share).to(first.dtype) * second
        return _Outcome(mixed, (states + first, states + second), share)

    return body


def _eagle3(checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> _Body:
    parts, spec = _Parts(checkpoint, arithmetic), checkpoint.spec
    norms = (
        [parts.norm(f"fc_norm.{i}") for i in range(max(1, len(spec.taps)))] if spec.fc_norm else []
    )
    fuse = fusion.tapped(
        parts.linear("fc") if parts.tensor("fc.weight") is not None else None, norms
    )
    attend, norm = _attention_half(parts, "midlayer")
    hidden_norm, embedding_norm, final_norm = (
        parts.norm(name) for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    )
    gate_up, down = (
        parts.linear("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
        parts.linear("midlayer.mlp.down_proj"),
    )

    def body(inputs: _Inputs) -> _Outcome:
        states = fuse(inputs.features) if inputs.true else inputs.features
        normed = hidden_norm(states)
        both = torch.cat([embedding_norm(inputs.embedded), normed], dim=-1)
        states = inputs.asked(
            attend(both, normed if spec.norm_before_residual else states, inputs.seen)
        )
        if not len(states):
            return _Outcome(states, (states,))
        states = states + down(arithmetic.gated(gate_up(norm(states))))
        final = final_norm(states)
        return _Outcome(final if spec.norm_output else states, (final,))

    return body


_BODIES: dict[str, Callable[[HeadCheckpoint, Arithmetic], _Body]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "dovetail": _dovetail,
    "jakiro": _jakiro,
    "jakiro*": _jakiro_star,
}


def open_head(
    source: str,
    *,
    target: str,
    weights: str = "auto",
    device: str = "cpu",
    allow_bin: bool = False,
    backend: str = "auto",
) -> Head:
    """The head in `source` for the model in `target` (folders, hub ids, id@revision), with weights
    of a type in `WEIGHTS` on cpu or cuda:N.

    `allow_bin`: pickled weights may be opened. `backend`: kernels, library (torch), or auto, the
    kernels on a CPU that has them. `CheckpointError` in one line for whatever is wrong with it or
    does not fit.
    """
    if weights not in WEIGHTS:
        raise CheckpointError(
            f"there are no weights of type {weights!r} for a draft head; choose "
            f"{', '.join(WEIGHTS)}"
        )
    if backend not in BACKENDS:
        raise CheckpointError(f"there is no back end {backend!r}; choose {' or '.join(BACKENDS)}")
    checkpoint = open_head_checkpoint(source, target=target, weights=weights, allow_bin=allow_bin)
    return Head(
        checkpoint, _arithmetic(checkpoint, weights, torch.device(device), backend), weights=weights
    )


def _arithmetic(
    checkpoint: HeadCheckpoint, weights: str, device: torch.device, backend: str
) -> Arithmetic:
    """Kernels where that is wanted and can be, else torch."""
    spec = checkpoint.spec
    geometry = Geometry(
        spec.blocks,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.epsilon,
        checkpoint.frequencies,
        checkpoint.rope_scaling,
    )
    if weights == "int4" and (against := _against_int4(checkpoint)):
        raise CheckpointError(f"{checkpoint.source}: {against}")
    why_not = (
        f"they compute on a CPU, not on {device}"
        if device.type != "cpu"
        else "the settings say so"
        if backend == "library"
        else ""
    )
    why_not = why_not or fused.reason_against(KINDS.get(weights, Kind.FP32))
    if not why_not:
        return KernelArithmetic(geometry, weights=weights)
    if backend == "kernels":
        raise CheckpointError(
            f"{checkpoint.source}: no C++ kernels for this head: {why_not}; or use backend library"
        )
    dtype = (
        torch.float32
        if device.type == "cpu" or weights == "fp32"
        else TYPES.get(weights, HALF[spec.dtype])
    )
    return TorchArithmetic(geometry, weights=weights, device=device, dtype=dtype)


def _against_int4(checkpoint: HeadCheckpoint) -> str:
    """The first reason why a matrix of the head cannot have 4 bits."""
    gates = ("mlp_moe.gate.weight",)
    shapes = [
        tuple(t.shape)
        for name, t in checkpoint.tensors.items()
        if t.ndim == 2 and not name.endswith(gates)
    ]
    return next(filter(None, map(against_int4, [*shapes, tuple(checkpoint.output.shape)])), "")
