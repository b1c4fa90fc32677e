"""The interface of a kind of draft head: one class in a file of its own.

It names the tensors, builds the forward pass, and has the figures that its paper reports.
`registry.py` lists the kinds. The command line imports these files, so none imports torch (which
takes seconds) before it computes. Training recipes are under `training`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.workers.heads.config import HeadConfig, MisfitError
from dovetail.workers.heads.spec import (
    FeatureType,
    Group,
    HeadSpec,
    Shapes,
    TargetShape,
    attention_groups,
    common_fields,
    gated_mlp,
    refuse_other_target,
    shared_groups,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import Body, HeadParts, Pairs


@dataclass(frozen=True)
class Figures:
    """The accepted lengths that a kind's paper reports, at T = 0 on MT-bench."""

    tokens: tuple[float, ...]  # the lengths of heads with 1, 2, ... blocks
    tree: tuple[str, int, int, int]  # policy, gamma, depth and width
    source: str  # paper, table and target; `{blocks}` is replaced by the number of blocks


SERVER, GPU = ("dynamic", 15, 8, 10), ("dynamic", 59, 8, 10)
"""The trees of the papers' figures: on servers' CPUs, and on GPUs."""


class HeadKind(ABC):
    """A kind of head."""

    name: ClassVar[str]
    title: ClassVar[str] = ""  # its name in the paper; empty: a variant of another kind
    setting: ClassVar[str] = ""  # its name in `draft.kind`, if different
    figures: ClassVar[Figures | None] = None  # None: a variant, which has the figures of its kind
    config: ClassVar[type[HeadConfig]] = HeadConfig  # the keys of its config.json
    spec: ClassVar[type[HeadSpec]] = HeadSpec
    layer: ClassVar[str] = "layers.0."  # the prefix of its first decoder layer's tensors
    mlp: ClassVar[str] = "mlp.gate_proj"  # the matrix whose height is the width of its MLP
    silu: ClassVar[bool] = True
    """True if it computes with silu, so that another activation in config.json is an error."""
    own_embedding: ClassVar[bool] = False
    """True if heads of this kind may have trained the embedding, so that it may differ from the
    target's."""

    @abstractmethod
    def recognises(self, shapes: Shapes) -> bool:
        """Return whether tensors, by plain names, are those of a head of this kind."""

    def rename(self, plain: str) -> str:
        """Return this file's name of a tensor with that plain name."""
        return plain

    def read_spec(
        self, config: HeadConfig, shapes: Shapes, target: TargetShape, dtype: FeatureType
    ) -> HeadSpec:
        """Return the head described by a config.json and its tensors' shapes. Raises `MisfitError`
        if they are invalid."""
        common = common_fields(config, shapes, target, mlp=self.mlp, layer=self.layer)
        own = self.fields(config, shapes, target)
        return self.spec(**{"kind": self.name, "dtype": dtype} | common | own)

    def fields(self, config: Any, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        """Return the fields of its `spec` that only this kind has, or reads from elsewhere."""
        return {}

    def check(
        self, spec: HeadSpec, config: HeadConfig, shapes: Shapes, target: TargetShape
    ) -> None:
        """Raise `MisfitError` if a head does not fit its target or needs something unsupported."""
        refuse_other_target(self.target_width(spec, shapes), spec, target, config.made_for)
        if self.silu and config.hidden_act not in ("silu", "swish"):
            raise MisfitError(f"has hidden_act {config.hidden_act!r}; heads compute with silu")

    def notes(self, config: Any) -> list[str]:
        """Return warnings about defaults that a config.json leaves open."""
        return []

    def target_width(self, spec: HeadSpec, shapes: Shapes) -> int:
        """Return the width of the target that a head was made for, from its tensors."""
        return spec.target_width

    def groups(self, spec: Any, config: Any) -> list[Group]:
        """Return all tensors of a head: fusion, embedding, output head, and Llama layers, the first
        of which has no norm before its attention."""
        groups = [*self.fusion_groups(spec, config), *shared_groups(spec)]
        for index in range(spec.blocks):
            layer = f"layers.{index}."
            names = ("post_attention_layernorm", "input_layernorm")[: 1 if index == 0 else 2]
            groups += [
                Group({f"{layer}{name}.weight": (spec.hidden,) for name in names}),
                *attention_groups(spec, config, layer, spec.hidden),
                self.mlp_group(spec, layer),
            ]
        return groups

    def fusion_groups(self, spec: Any, config: Any) -> list[Group]:
        """Return the tensors that fuse embedding and feature: EAGLE's one matrix over both."""
        hidden = spec.hidden
        return [
            Group({"fc.weight": (hidden, 2 * hidden)}),
            Group({"fc.bias": (hidden,)}, needed=config.bias),
        ]

    def mlp_group(self, spec: Any, layer: str) -> Group:
        """Return the MLP of a decoder layer, or its replacement."""
        return gated_mlp(spec, layer)

    @abstractmethod
    def body(self, parts: "HeadParts") -> "Body":
        """Return the forward pass between embedding and output head."""

    def pairs(self, parts: "HeadParts") -> "Pairs | None":
        """Return what the previous token adds to the logits of a block; None: nothing."""
        return None

    def mask_features(self, parts: "HeadParts") -> "Tensor | None":
        """Return the features [1, W] of the rows of a block after the first, which is a true row;
        None: no row of a block has features."""
        return None
