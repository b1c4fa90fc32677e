"""The kinds of heads that can be trained: for each, the help of `dovetail train`, its options, its
recipe, and its presets: as in its paper, or in minutes for a very small target.

The command line imports this file, so it does not import torch, which takes seconds; `recipe_of`
does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from dovetail.protocol.errors import UserError

if TYPE_CHECKING:
    from dovetail.workers.training.heads.recipe import HeadRecipe
    from dovetail.workers.training.plan import Plan

Preset = Literal["paper", "tiny"]
WHOLE_UP_TO = 32768  # tokens of a target up to which a head can propose all by default
DRAFT_VOCABULARY = 16384  # how many it can propose of more tokens by default
TINY_UP_TO = 1024  # the widest target for which `auto` means the tiny preset


@dataclass(frozen=True)
class Option:
    """An option of `dovetail train KIND` that only this kind has."""

    name: str
    help: str
    type: Literal["count", "flag", "weight"]
    least: int = 0
    most: int | None = None
    default: int | bool | None = None
    rare: bool = False  # True if only `--help-all` shows it
    recipe: str = ""
    """The field of the losses' `Recipe` that it sets; empty: a field of the head's shape."""

    @property
    def field(self) -> str:
        """The option as a Python name."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class TrainedKind:
    """A kind of head for the command line."""

    what: str  # its description in `dovetail train`
    recipe: "Callable[[], HeadRecipe]"  # imports torch
    options: tuple[Option, ...] = ()
    in_steps: bool = True  # False if one pass drafts all levels: no training-time test


def _recipe(module: str, name: str) -> "HeadRecipe":
    found = getattr(import_module(f"dovetail.workers.training.heads.{module}"), name)
    recipe: HeadRecipe = found()
    return recipe


BLOCK_OPTIONS = (
    Option(
        "--blocks",
        "Decoder layers; published drafters have five.",
        "count",
        least=1,
        most=8,
        default=5,
    ),
    Option(
        "--block-size",
        "Rows of a block, the root's included.",
        "count",
        least=2,
        most=64,
        default=8,
    ),
)
TRAINED: dict[str, TrainedKind] = {
    "dovetail": TrainedKind(
        "a Dovetail head: gated fusion and one to six decoder layers",
        partial(_recipe, "dovetail", "DovetailRecipe"),
        (
            Option("--blocks", "Decoder layers.", "count", least=1, most=6, default=1),
            Option(
                "--dgf-silu",
                "SiLU on the embedding's side (in the code, not in the paper).",
                "flag",
                default=True,
                rare=True,
            ),
            Option(
                "--dgf-embed-norm",
                "RMSNorm of the embedding (in the code, not in the paper).",
                "flag",
                default=True,
                rare=True,
            ),
        ),
    ),
    "jakiro": TrainedKind(
        "a Jakiro head: experts, and a contrast that predicts one token further",
        partial(_recipe, "jakiro", "JakiroRecipe"),
        (
            Option("--experts", "Experts, of which two run.", "count", least=2, most=4, default=2),
            Option(
                "--contrast",
                "The second prediction, for the tree's last level.",
                "flag",
                default=True,
                rare=True,
            ),
            Option(
                "--contrast-weight",
                "Of its feature loss: 0.5 in Jakiro's code, 1.0 in its paper.  [default: 0.5]",
                "weight",
                rare=True,
                recipe="contrast_feature",
            ),
        ),
    ),
    "eagle3": TrainedKind(
        "an EAGLE-3 head: three residual streams, one layer, its own output head",
        partial(_recipe, "eagle3", "Eagle3Recipe"),
    ),
    "eagle": TrainedKind(
        "an EAGLE-1/2 head: embedding and last hidden state through one decoder layer",
        partial(_recipe, "eagle", "EagleRecipe"),
    ),
    "mtp": TrainedKind(
        "an MTP layer: embedding and last hidden state through a layer of the target's kind",
        partial(_recipe, "mtp", "MtpRecipe"),
    ),
    "dflash": TrainedKind(
        "a DFlash drafter: layers over a block of mask tokens, all levels in one pass",
        partial(_recipe, "dflash", "DFlashRecipe"),
        BLOCK_OPTIONS,
        in_steps=False,
    ),
    "dspark": TrainedKind(
        "a DSpark drafter: DFlash with scores of neighbouring tokens",
        partial(_recipe, "dflash", "DSparkRecipe"),
        (
            *BLOCK_OPTIONS,
            Option(
                "--rank", "Rank of the table of pairs.", "count", least=1, default=256, rare=True
            ),
        ),
        in_steps=False,
    ),
}


def draft_vocabulary(asked: int | None, vocabulary_size: int) -> int:
    """Return how many tokens a head can propose; 0: all. Raises `UserError` for too many."""
    if asked is None:
        return DRAFT_VOCABULARY if vocabulary_size > WHOLE_UP_TO else 0
    if asked > vocabulary_size:
        raise UserError(
            f"--draft-vocabulary {asked} is more than the target's {vocabulary_size} tokens"
        )
    return 0 if asked == vocabulary_size else asked


def recipe_of(kind: str) -> "HeadRecipe":
    """Return the recipe of a kind of head; imports torch."""
    return TRAINED[kind].recipe()


def plan_for(kind: str, hidden: int, preset: Preset | None = None) -> "Plan":
    """Return the plan of a kind of head for a target of this width; `preset` None chooses by the
    width."""
    paper = recipe_of(kind).paper
    if (preset or ("tiny" if hidden <= TINY_UP_TO else "paper")) == "paper":
        return paper
    return _tiny(paper)


def _tiny(paper: "Plan") -> "Plan":
    """Return a plan for minutes on one core, as tuned on the embedded target (tau of simulated
    chains after 25 to 60 s, one decoder layer): a rate of 4e-3 (twice and half as much are worse),
    a weight of 5 for features (tau 2.07 for 1.93 with 1: a chain reads its own states), and one
    step for the first part of the run, then two (2.53 for 2.40 with one step throughout; with two
    from the beginning a run sees half the text)."""
    pace = replace(paper.pace, rate=4e-3, warm_up=60, weight_decay=0.01, clip=1.0, decay="cosine")
    recipe = replace(
        paper.recipe,
        feature=5.0 if paper.recipe.feature else 0.0,
        cross_entropy=1.0,
        steps=2,
        noise=0.0,
    )
    rows = replace(paper, batch=4, length=256, checks=12, check_rows=12)
    return replace(rows, pace=pace, recipe=recipe, alone=0.6)
