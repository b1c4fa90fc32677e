"""Jakiro and Jakiro*: EAGLE's head with a mixture of experts in place of the MLP, two experts for
each row, weighted by a router.

Jakiro (no star) also subtracts them (the contrast), which predicts one token further; in Jakiro*
each of the two predicts separately, and drafting uses the exact mixture of their distributions.
With more than two experts, the router's first two choices count, as in Mixtral. All experts are
computed as one wide MLP whose middle is weighted by expert, so any number of them costs two
matrices."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.kind import GPU, Figures, HeadKind
from dovetail.workers.heads.spec import (
    EXPERTS,
    Group,
    HeadSpec,
    Shapes,
    TargetShape,
    rows_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import Body, HeadParts, Inputs, Outcome
    from dovetail.workers.models.backends.device.products import Product


@dataclass(frozen=True, kw_only=True)
class JakiroSpec(HeadSpec):
    """A Jakiro head."""

    experts: int


class _Mixed(HeadKind):
    """The common part of both kinds."""

    spec = JakiroSpec
    up: ClassVar[Sequence[str]]  # the matrices of an expert that read a row
    down: ClassVar[str]

    def recognises(self, shapes: Shapes) -> bool:
        return f"{EXPERTS}.experts.0.{self.up[0]}.weight" in shapes or (
            self.silu and f"{EXPERTS}.gate.weight" in shapes
        )

    def fields(self, config: HeadConfig, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        names = (name for name in shapes if name.startswith(f"{EXPERTS}.experts."))
        experts = len({name.split(".")[4] for name in names})
        gate = rows_of(shapes, f"{EXPERTS}.gate.weight", experts)
        return {"experts": experts, "contrast": self.silu and gate > experts}

    def mlp_group(self, spec: JakiroSpec, layer: str) -> Group:
        gate = {f"{layer}mlp_moe.gate.weight": (spec.experts + 2 * spec.contrast, spec.hidden)}
        hidden, wide = spec.hidden, spec.intermediate
        shapes = {**dict.fromkeys(self.up, (wide, hidden)), self.down: (hidden, wide)}
        experts = {
            f"{layer}mlp_moe.experts.{i}.{name}.weight": shape
            for i in range(max(2, spec.experts))
            for name, shape in shapes.items()
        }
        return Group(gate | experts)

    def body(self, parts: "HeadParts") -> "Body":
        import torch
        from torch.nn.functional import gelu

        spec = parts.checkpoint.spec
        assert isinstance(spec, JakiroSpec)
        experts = [f"{EXPERTS}.experts.{i}" for i in range(spec.experts)]
        fuse, gate = parts.concatenation(), parts.exact(f"{EXPERTS}.gate")
        up = parts.linear(*(f"{expert}.{name}" for name in self.up for expert in experts))
        down = parts.engine.linear(
            torch.cat([parts.stacked(f"{expert}.{self.down}") for expert in experts], dim=1)
        )
        activate = parts.engine.gated if self.silu else gelu
        layer = parts.layer("layers.0.", mlp=False)
        norm = parts.norm("layers.0.post_attention_layernorm")

        def body(inputs: "Inputs") -> "Outcome":
            states = fuse(inputs.embedded, inputs.features)
            states = layer(states, inputs.seen, inputs.rows)
            if not len(states):
                return inputs.outcome(states, contrast=states if inputs.contrast else None)
            read = norm(states)
            mixture = Mixture(activate(up(read)), down, gate(read), spec.experts)
            return self.outcome(inputs, states, mixture)

        return body

    @abstractmethod
    def outcome(self, inputs: "Inputs", states: "Tensor", mixture: "Mixture") -> "Outcome":
        """Return the input of the output head, from the states [R, H] after the attention."""


class Jakiro(_Mixed):
    """Jakiro in the format of its public checkpoints."""

    name, title, up, down = "jakiro", "Jakiro", ("gate_proj", "up_proj"), "down_proj"
    mlp = "mlp_moe.experts.0.gate_proj"
    figures = Figures((4.96,), GPU, "Jakiro paper, Table 1: Vicuna 7B")

    def outcome(self, inputs: "Inputs", states: "Tensor", mixture: "Mixture") -> "Outcome":
        mixed = states + mixture.of(mixture.shares)
        contrast = states + mixture.of(mixture.signed()) if inputs.contrast else None
        return inputs.outcome(mixed, contrast=contrast)


class JakiroStar(_Mixed):
    """Jakiro* in the format of its public checkpoints."""

    name, setting, up, down, silu = "jakiro*", "jakiro", ("fc",), "proj", False
    mlp = "mlp_moe.experts.0.fc"

    def outcome(self, inputs: "Inputs", states: "Tensor", mixture: "Mixture") -> "Outcome":
        single = mixture.shares.new_zeros(mixture.shares.shape)
        first, second = (
            mixture.of(single.scatter(1, mixture.order[:, which : which + 1], 1.0))
            for which in range(2)
        )
        share = mixture.shares.gather(1, mixture.order[:, :1])
        mixed = states + share.to(first.dtype) * first + (1.0 - share).to(first.dtype) * second
        return inputs.outcome(mixed, states + first, states + second, share=share)


class Mixture:
    """The E experts of R rows, of which the gate chooses two for each row."""

    def __init__(self, middle: "Tensor", down: "Product", gate: "Tensor", experts: int) -> None:
        """`middle` [R, E I]: the experts' activations between their two matrices; `gate` [R, E], or
        with a contrast [R, E + 2]."""
        self._middle, self._down, self._gate = middle, down, gate
        router = gate[:, :experts].float()
        self.order = router.argsort(dim=-1, descending=True, stable=True)[:, :2]
        """int64 [R, 2]: the experts with the largest shares."""
        chosen = router.gather(1, self.order).softmax(dim=-1)
        self.shares = router.new_zeros(router.shape).scatter(1, self.order, chosen)
        """[R, E]: shares of the experts in the mixture; 0 for all but two."""

    def signed(self) -> "Tensor":
        """Return the shares [R, E] in the contrast; that of the weaker expert, by the gate's last
        two outputs, is negative. They belong to experts 0 and 1 if there are only two, otherwise to
        the router's first and second choice."""
        experts = self.shares.shape[1]
        weights = self._gate[:, experts:].float().softmax(dim=-1)
        signs = (weights >= weights.flip(-1)) * 2.0 - 1.0
        signs[:, 1] = -signs[:, 0]  # of equal ones the first counts as the larger
        owners = self.order if experts > 2 else self.order.sort(dim=-1).values
        return self.shares.new_zeros(self.shares.shape).scatter(1, owners, weights * signs)

    def of(self, weights: "Tensor") -> "Tensor":
        """Return the experts' output [R, H], each weighted by its column of [R, E]."""
        rows, experts = weights.shape
        middle = self._middle.view(rows, experts, -1)
        return self._down((middle * weights.unsqueeze(-1).to(middle.dtype)).view(rows, -1))


JAKIRO, JAKIRO_STAR = Jakiro(), JakiroStar()
