"""How each kind of head is trained unless somebody says otherwise: as its paper did, or in minutes
for a very small target. Numbers only."""

from dataclasses import replace
from typing import Literal

from dovetail.workers.training.heads import Kind
from dovetail.workers.training.losses import Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.trainer import Plan

Preset = Literal["paper", "tiny"]
TINY_UP_TO = 1024
"""The widest target for which `auto` means the tiny preset."""

PAPERS: dict[Kind, Plan] = {
    "eagle": Plan(
        Pace(rate=3e-5, warm_up=2000, weight_decay=0.01, clip=0.5), Recipe(), batch=4, length=2048
    ),
    "dovetail": Plan(
        Pace(rate=3e-5, warm_up=2000, weight_decay=0.01, clip=0.5), Recipe(), batch=4, length=2048
    ),
    "jakiro": Plan(
        Pace(rate=9e-5, warm_up=2000, weight_decay=1e-3, clip=0.5, decay="cosine"),
        Recipe(),
        batch=4,
        length=2048,
    ),
    "eagle3": Plan(
        Pace(rate=5e-5, warm_up=12000, weight_decay=0.0, clip=0.5),
        Recipe(feature=0.0, cross_entropy=1.0, steps=7, noise=0.0),
        batch=2,
        length=2048,
    ),
}
"""Losses, rates and batches of the papers' own programs (EAGLE main.py, EAGLE-3 ds_config.json,
Jakiro main.py, Dovetail main.py).

Gradients are clipped by norm, not number by number.
"""


def plan_for(kind: Kind, hidden: int, preset: Preset | None = None) -> Plan:
    """The plan of a kind of head for a target so wide; `preset` None chooses by the width."""
    if (preset or ("tiny" if hidden <= TINY_UP_TO else "paper")) == "paper":
        return PAPERS[kind]
    return _tiny(PAPERS[kind])


def _tiny(paper: Plan) -> Plan:
    """For minutes on one core, as found on the embedded target (tau of simulated chains after 25 to
    60 s, one decoder layer).

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
