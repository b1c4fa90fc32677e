"""P-EAGLE (AWS 2026): an EAGLE-3 head whose pass has, after the last true row, a row for each
further level. These rows have a mask token, and a learned row in place of the target's streams."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dovetail.workers.heads.config import REMEDY, MisfitError
from dovetail.workers.heads.eagle3 import Eagle3, Eagle3Config, Eagle3Spec
from dovetail.workers.heads.spec import Group, Shapes, TargetShape

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import HeadParts

MASK = "mask_hidden"
LEVELS = 8
"""Rows of a pass. A row sees only earlier ones, so their number does not change its prediction."""


class PEagleConfig(Eagle3Config):
    """Keys of its config.json."""

    mask_token_id: Annotated[int, Field(ge=0, lt=1 << 31)]


class PEagle(Eagle3):
    """P-EAGLE in the format of the speculators library."""

    name, title, config, spec = "peagle", "P-EAGLE", PEagleConfig, Eagle3Spec

    def recognises(self, shapes: Shapes) -> bool:
        return MASK in shapes and super().recognises(shapes)

    def fields(self, config: Any, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        block = {"block": LEVELS, "levels": LEVELS, "mask_token": config.mask_token_id}
        return {**super().fields(config, shapes, target), **block}

    def check(self, spec: Any, config: Any, shapes: Shapes, target: TargetShape) -> None:
        super().check(spec, config, shapes, target)
        if spec.mask_token >= spec.vocabulary_size:
            raise MisfitError(
                f"has mask_token_id {spec.mask_token} in config.json, which is outside the "
                f"vocabulary of {spec.vocabulary_size}; {REMEDY}"
            )

    def groups(self, spec: Any, config: Any) -> list[Group]:
        return [*super().groups(spec, config), Group({MASK: (1, 1, spec.feature_width)})]

    def mask_features(self, parts: "HeadParts") -> "Tensor":
        return parts.table(MASK).float().view(1, -1)


PEAGLE = PEagle()
