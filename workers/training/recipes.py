"""The presets of training for each kind of head: as its paper did, or in minutes for a very small
target. Numbers only."""

from dataclasses import replace
from typing import Literal

from dovetail.workers.heads.registry import trained_kind
from dovetail.workers.training.plan import Plan

Preset = Literal["paper", "tiny"]
TINY_UP_TO = 1024
"""The widest target for which `auto` means the tiny preset."""


def plan_for(kind: str, hidden: int, preset: Preset | None = None) -> Plan:
    """The plan of a kind of head for a target so wide; `preset` None chooses by the width."""
    paper = trained_kind(kind).paper
    if (preset or ("tiny" if hidden <= TINY_UP_TO else "paper")) == "paper":
        return paper
    return _tiny(paper)


def _tiny(paper: Plan) -> Plan:
    """A plan for minutes on one core, as found on the embedded target (tau of simulated chains
    after 25 to 60 s, one decoder layer).

    A rate of 4e-3 (twice and half as much are worse), features weighed 5 (tau 2.07 for 1.93 with 1:
    a chain lives on its own states), and one step for the first part of the run, then two (2.53 for
    2.40 with one step all along, and a run with two from the beginning sees half the text).
    """
    pace = replace(paper.pace, rate=4e-3, warm_up=60, weight_decay=0.01, clip=1.0, decay="cosine")
    recipe = replace(
        paper.recipe,
        feature=5.0 if paper.recipe.feature else 0.0,
        cross_entropy=1.0,
        steps=2,
        noise=0.0,
    )
    return replace(paper, pace=pace, recipe=recipe, batch=4, length=256, alone=0.6)
