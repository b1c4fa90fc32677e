"""The description that a kind of draft head gives of itself: one class in the file of its name.

It names the tensors, puts the forward pass together, and has the figures that its paper reports.
`registry.py` lists the kinds. A command line reads these files, so that none of them imports torch,
which takes seconds, before it computes something. How a kind is trained stands under `training`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dovetail.workers.heads.config import HeadConfig, MisfitError
from dovetail.workers.heads.spec import (
    FeatureType,
    Group,
    HeadSpec,
    Shapes,
    TargetShape,
    attention_groups,
    gated_mlp,
    refuse_other_target,
    shared_groups,
)

if TYPE_CHECKING:
    from dovetail.workers.heads.parts import Body, HeadParts


@dataclass(frozen=True)
class Figures:
    """The accepted lengths that a paper reports of a kind, at T = 0 on MT-bench."""

    tokens: tuple[float, ...]
    """The lengths of heads with 1, 2, ... blocks."""
    tree: tuple[str, int, int, int]
    """Policy, gamma, depth and width."""
    source: str
    """Paper, table and target; `{blocks}` stands for the number of blocks."""


SERVER, GPU = ("dynamic", 15, 8, 10), ("dynamic", 59, 8, 10)
"""The trees of the papers' figures: on servers' CPUs, and on GPUs."""


class HeadKind(ABC):
    """A kind of head."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """The name that its paper gives it; empty: a variant of another kind."""
    setting: ClassVar[str] = ""
    """The name in `draft.kind`, if that differs."""
    figures: ClassVar[Figures | None] = None
    """Figures of its paper; None: a variant, which has those of the kind that it is one of."""
    config: ClassVar[type[HeadConfig]] = HeadConfig
    """The keys of its config.json."""
    silu: ClassVar[bool] = True
    """True if it computes with silu, and a config.json with another activation is wrong."""
    own_embedding: ClassVar[bool] = False
    """True if a head of this kind may have trained the embedding, so that it differs from the
    target's without being a mistake."""

    @abstractmethod
    def recognises(self, shapes: Shapes) -> bool:
        """Return whether tensors, by plain names, are those of a head of this kind."""

    def rename(self, plain: str) -> str:
        """Return the name by which this file knows a tensor of that plain name."""
        return plain

    @abstractmethod
    def read_spec(
        self, config: HeadConfig, shapes: Shapes, target: TargetShape, dtype: FeatureType
    ) -> HeadSpec:
        """Return the head of a config.json and its tensors' shapes; `MisfitError` where it cannot
        be one."""

    def check(
        self, spec: HeadSpec, config: HeadConfig, shapes: Shapes, target: TargetShape
    ) -> None:
        """Raise `MisfitError` where a head does not fit its target or needs what nothing here
        computes."""
        refuse_other_target(self.target_width(spec, shapes), spec, target)
        if self.silu and config.hidden_act not in ("silu", "swish"):
            raise MisfitError(f"has hidden_act {config.hidden_act!r}; heads compute with silu")

    def target_width(self, spec: HeadSpec, shapes: Shapes) -> int:
        """Return the width of the target that a head was made for, from its tensors."""
        return spec.target_width

    def groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        """Return all tensors of a head: its fusion, embedding, output head, and Llama layers, the
        first of which has no norm before its attention."""
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

    def fusion_groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        """Return what joins embedding and feature: EAGLE's one matrix over both."""
        hidden = spec.hidden
        return [
            Group({"fc.weight": (hidden, 2 * hidden)}),
            Group({"fc.bias": (hidden,)}, needed=config.bias),
        ]

    def mlp_group(self, spec: HeadSpec, layer: str) -> Group:
        """Return the MLP of a decoder layer, or what stands in its place."""
        return gated_mlp(spec, layer)

    @abstractmethod
    def body(self, parts: "HeadParts") -> "Body":
        """Return the forward pass between embedding and output head."""
