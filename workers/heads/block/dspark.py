"""DSpark (DeepSeek 2026): DFlash with a Markov head, the product of two tables of low rank, which
adds to a token's logit a score that depends on the previous token. A confidence head is accepted
but not computed: proposals are pruned by calibrated scores."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.workers.heads.block.config import BlockSpec, DFlashConfig
from dovetail.workers.heads.block.dflash import DFlash
from dovetail.workers.heads.config import MisfitError
from dovetail.workers.heads.spec import Group, Shapes, TargetShape

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import HeadParts, Pairs


class DSparkConfig(DFlashConfig):
    """Keys of its config.json."""

    markov_head_type: str = "vanilla"
    confidence_head_with_markov: bool = True
    dspark_bonus_anchor: bool = False
    transformer_layer_config: Any = None


@dataclass(frozen=True, kw_only=True)
class DSparkSpec(BlockSpec):
    """A DSpark drafter."""

    rank: int  # of the Markov head


class DSpark(DFlash):
    """DSpark in the formats of its public checkpoints."""

    name, title, config, spec = "dspark", "DSpark", DSparkConfig, DSparkSpec
    sign = "markov_head.markov_w1.weight"

    def anchored(self, config: DSparkConfig) -> bool:
        """Return the default of llama.cpp's converter: true, but false for speculators' files."""
        theirs = config.transformer_layer_config or config.aux_hidden_state_layer_ids
        return not (theirs or config.dspark_bonus_anchor)

    def fields(self, config: DSparkConfig, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        table = shapes.get(self.sign, ())
        rank = table[1] if len(table) == 2 else 0
        return {**super().fields(config, shapes, target), "rank": rank}

    def check(self, spec: Any, config: Any, shapes: Shapes, target: TargetShape) -> None:
        if config.markov_head_type != "vanilla":
            raise MisfitError(
                f"has markov_head_type {config.markov_head_type!r} in config.json; only 'vanilla' "
                "is supported"
            )
        super().check(spec, config, shapes, target)

    def groups(self, spec: DSparkSpec, config: DSparkConfig) -> list[Group]:
        read = spec.hidden + (spec.rank if config.confidence_head_with_markov else 0)
        markov, proj = "markov_head.markov_w", "confidence_head.proj"
        return [
            *super().groups(spec, config),
            Group(
                {
                    f"{markov}1.weight": (spec.vocabulary_size, spec.rank),
                    f"{markov}2.weight": (spec.draft_vocabulary, spec.rank),
                }
            ),
            Group({f"{proj}.weight": (1, read)}, needed=False),
            Group({f"{proj}.bias": (1,)}, needed=False),
        ]

    def pairs(self, parts: "HeadParts") -> "Pairs":
        before, after = parts.table("markov_head.markov_w1"), parts.table("markov_head.markov_w2")

        def pairs(states: "Tensor", previous: "Tensor", candidates: "Tensor") -> "Tensor":
            return before[previous].float() @ after[parts.rows_of(candidates)].float().T

        return pairs


DSPARK = DSpark()
