"""The description that a kind of draft head gives of itself: one class in the file of its name.

Serving asks it which tensors it has and how they compute; training asks it for a module, a recipe
and the fields of a config.json. `registry.py` lists the kinds.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.workers.heads.arithmetic import Arithmetic
from dovetail.workers.heads.config import HeadConfig, MisfitError
from dovetail.workers.heads.parts import Body, HeadCheckpoint
from dovetail.workers.heads.spec import (
    FeatureType,
    Group,
    HeadSpec,
    Shape,
    Shapes,
    TargetShape,
    attention_groups,
    gated_mlp,
    refuse_other_target,
    shared_groups,
)
from dovetail.workers.heads.trainable import HeadShape, TrainableHead
from dovetail.workers.training.plan import Plan, Recipe


class HeadKind(ABC):
    """A kind of head that can be served."""

    name: ClassVar[str]
    config: ClassVar[type[HeadConfig]] = HeadConfig
    """The keys of its config.json."""
    silu: ClassVar[bool] = True
    """True if it computes with silu, and a config.json that says otherwise is wrong."""
    own_embedding: ClassVar[bool] = False
    """True if a head of this kind may have trained the embedding, so that it differs from the
    target's without being a mistake."""

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
        """Return how wide the target is that a head was made for, as its tensors tell."""
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
    def body(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> Body:
        """Return the forward pass between embedding and output head."""


class TrainedKind(HeadKind):
    """A kind of head that `dovetail train` can train, too."""

    architecture: ClassVar[str]
    """`architectures` in its config.json."""
    paper: ClassVar[Plan]
    """The recipe of its paper."""
    trainable: ClassVar[type[TrainableHead]]

    def choices(
        self, options: Mapping[str, Any], *, taps: Sequence[int], vocabulary_size: int
    ) -> dict[str, Any]:
        """Return the fields of `HeadShape` that the options of this kind choose, for features with
        those `taps` of a target; `UserError` where they do not fit."""
        return dict(options)

    def intermediate(self, hidden: int, of_target: int) -> int:
        """Return how wide the MLP is unless somebody says otherwise."""
        return of_target

    def fields(self, shape: HeadShape, taps: Shape) -> dict[str, Any]:
        """Return the keys of config.json that only this kind has."""
        return {}

    def shape_words(self, shape: HeadShape) -> list[str]:
        """Return what a head's card says of its shape beside widths and blocks."""
        return []

    def loss_words(self, shape: HeadShape, recipe: Recipe) -> list[str]:
        """Return what a head's card says of its losses beside those of all kinds."""
        return []
