"""Dovetail (section 3.2 of its paper): a gated fusion (DGF) of embedding and feature, then one to
six decoder layers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.kind import SERVER, Figures, HeadKind
from dovetail.workers.heads.spec import Group, HeadSpec, Shapes, TargetShape

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import Body, Fusion, HeadParts


class DovetailConfig(HeadConfig):
    """Keys of its config.json; the SiLU and the norm on the embedding are not in the paper, but its
    public weights need them."""

    dgf_silu: bool = True
    dgf_embed_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class DovetailSpec(HeadSpec):
    """A Dovetail head."""

    dgf_silu: bool
    dgf_embed_norm: bool


class Dovetail(HeadKind):
    """Dovetail in the format of its public checkpoints."""

    name, title, config, spec = "dovetail", "Dovetail", DovetailConfig, DovetailSpec
    figures = Figures(
        (4.06, 4.31, 4.53, 4.62, 4.73, 4.83),
        SERVER,
        "Dovetail paper, Table 6, number of blocks {blocks}, Llama-2 7B",
    )

    def recognises(self, shapes: Shapes) -> bool:
        return "W_z" in shapes

    def fields(self, config: DovetailConfig, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        dgf = {"dgf_silu": config.dgf_silu, "dgf_embed_norm": config.dgf_embed_norm}
        return {"blocks": config.num_hidden_layers, **dgf}

    def fusion_groups(self, spec: DovetailSpec, config: HeadConfig) -> list[Group]:
        hidden = spec.hidden
        norm = Group({"input_layernorm.weight": (hidden,)}, needed=spec.dgf_embed_norm)
        return [
            Group({"W_1": (hidden, hidden), "W_2": (hidden, hidden), "W_z": (2 * hidden, hidden)}),
            norm,
        ]

    def body(self, parts: "HeadParts") -> "Body":
        return parts.layered(_gated(parts))


def _gated(parts: "HeadParts") -> "Fusion":
    """Return the dynamic gating fusion: z h1 + (1 - z) h2 with h1 from the feature, h2 from the
    embedding, and z the sigmoid of a matrix over both. The norm of the embedding and the SiLU on h2
    are not in the paper (section 3.2), but its weights were trained with them."""
    import torch
    from torch.nn.functional import silu

    spec = parts.checkpoint.spec
    assert isinstance(spec, DovetailSpec)
    norm = parts.norm("input_layernorm") if spec.dgf_embed_norm else None
    feature, embedding, gate = (parts.transposed(name) for name in ("W_1", "W_2", "W_z"))

    def fuse(embedded: "Tensor", features: "Tensor") -> "Tensor":
        first, second = feature(features), embedding(embedded if norm is None else norm(embedded))
        if spec.dgf_silu:
            second = silu(second)
        return torch.lerp(second, first, torch.sigmoid(gate(torch.cat([first, second], dim=-1))))

    return fuse


DOVETAIL = Dovetail()
