"""DFlash-2 (Inco AI and z-lab 2026): DFlash with a local convolution around attention and MLP, and
a selector that scores each pair of candidates of neighbouring positions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dovetail.workers.heads.block.config import BlockSpec, DFlashConfig
from dovetail.workers.heads.block.dflash import DFlash
from dovetail.workers.heads.config import REMEDY, Factor, MisfitError, Size
from dovetail.workers.heads.spec import Group, Shapes, TargetShape

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.block.layer import BlockLayer
    from dovetail.workers.heads.parts import HeadParts, Pairs

SIDES = 2  # of a convolution: before and after a sublayer
PREDECESSOR, SUCCESSOR, PROJECTION = (
    f"candidate_selector.{name}"
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection")
)


class DFlash2Config(DFlashConfig):
    """Keys of its config.json."""

    conv_kernel_size: Size = 2
    conv_group_size: Size = 16
    selector_top_k: Annotated[int, Field(ge=1, le=1024)] = 16
    output_multiplier: Factor = 1.0
    final_logit_softcapping: Factor | None = None


@dataclass(frozen=True, kw_only=True)
class DFlash2Spec(BlockSpec):
    """A DFlash-2 drafter."""

    rank: int  # of the selector


class DFlash2(DFlash):
    """DFlash-2 in the format of its public checkpoints."""

    name, title, config, spec = "dflash2", "DFlash-2", DFlash2Config, DFlash2Spec
    sign = f"{PROJECTION}.weight"

    def rename(self, plain: str) -> str:
        renamed = super().rename(plain)
        return renamed.removesuffix(".weight") if "_codebook." in renamed else renamed

    def fields(self, config: DFlash2Config, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        projection = shapes.get(self.sign, ())
        return {
            **super().fields(config, shapes, target),
            "rank": projection[0] if projection else 0,
            "candidates": config.selector_top_k,
            "logit_scale": config.output_multiplier,
            "softcap": config.final_logit_softcapping or 0.0,
        }

    def check(self, spec: Any, config: Any, shapes: Shapes, target: TargetShape) -> None:
        if spec.hidden % config.conv_group_size:
            raise MisfitError(
                f"has conv_group_size {config.conv_group_size} in config.json, which does not "
                f"divide its width of {spec.hidden}; {REMEDY}"
            )
        super().check(spec, config, shapes, target)

    def groups(self, spec: DFlash2Spec, config: DFlash2Config) -> list[Group]:
        hidden, taps = spec.hidden, config.conv_kernel_size
        outputs = SIDES * taps * (hidden // config.conv_group_size)
        codebook = spec.vocabulary_size, spec.rank
        groups = [
            *super().groups(spec, config),
            Group({PREDECESSOR: codebook, SUCCESSOR: codebook, self.sign: (spec.rank, hidden)}),
        ]
        for index in range(spec.blocks):
            for name in ("attention_conv", "mlp_conv"):
                conv = f"layers.{index}.{name}"
                shapes = {
                    f"{conv}.base_kernel": (SIDES, taps, hidden),
                    f"{conv}.kernel_projection.weight": (outputs, hidden),
                }
                groups.append(Group(shapes))
        return groups

    def decoder_layer(self, parts: "HeadParts", index: int) -> "BlockLayer":
        from dovetail.workers.heads.block.layer import BlockLayer

        return BlockLayer(parts, index, convolved=True)

    def pairs(self, parts: "HeadParts") -> "Pairs":
        before, after = parts.table(PREDECESSOR), parts.table(SUCCESSOR)
        project = parts.exact(PROJECTION)

        def pairs(states: "Tensor", previous: "Tensor", candidates: "Tensor") -> "Tensor":
            weighed = before[previous].float() * project(states)
            return weighed @ after[candidates].float().T

        return pairs


DFLASH2 = DFlash2()
