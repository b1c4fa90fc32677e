"""Trains a draft head on stored or streamed features of a frozen target, and measures it by
simulated acceptance during the run.

Weights and moments are kept in 32 bits; steps run in bf16 if asked for. The held-out part of the
features is fixed before the run begins and never trained on. `workers.training.folder` writes the
finished head."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dovetail.workers.kernels.probe import least_seconds
from dovetail.workers.training.data.features import Batch, Features
from dovetail.workers.training.heads.trainable import (
    HeadShape,
    TrainableDraft,
    most_frequent,
)
from dovetail.workers.training.losses import Acceptance, Held, best_tokens
from dovetail.workers.training.plan import Plan
from dovetail.workers.training.process_group import ALONE, ProcessGroup
from dovetail.workers.training.recipes import recipe_of
from dovetail.workers.training.run import Callback, Outcome, Run, Step, carry_out, silent
from dovetail.workers.training.target_parts import Frozen

WORTH_BF16 = 1.5
"""How much faster bf16 products must be on a CPU to be used: conversions slow down the rest."""
HELD_SEED = 1  # the held-out rows are the same in every run


@dataclass(frozen=True)
class Check:
    """A measurement during a run."""

    steps: int
    tokens: int
    spent_s: float
    loss: float
    length: float
    at: tuple[float, ...]
    contrast: float | None = None


@dataclass(frozen=True)
class Trained:
    """A finished head, and the record of its run."""

    head: TrainableDraft
    outcome: Outcome
    checks: tuple[Check, ...]
    plan: Plan
    tokens_held: int
    counts: Tensor  # int64 [V]: how often each token is learned
    draft_coverage: float = 1.0  # the share of the learned tokens in its draft vocabulary


def train_head(
    shape: HeadShape,
    features: Features,
    frozen: Frozen,
    plan: Plan,
    *,
    prepare: Callable[[TrainableDraft], object] = id,
    checkpoint: Path | None = None,
    about: Mapping[str, Any] | None = None,
    peers: ProcessGroup = ALONE,
    progress: Callback = silent,
) -> Trained:
    """Train a new head; `prepare` may change its initial random weights. `about` adds to the
    identity of its checkpoint."""
    learning, held = features.split(plan.held)
    device = plan.pace.device
    head, counts = new_head(shape, seed=plan.pace.seed), learning.counts()
    if head.known is not None:
        head.learn_vocabulary(most_frequent(counts, shape.own_vocabulary))
    head.begin_output(_of_head(head, frozen))
    prepare(head)
    covered = counts if head.known is None else counts[head.known]
    coverage = float(covered.sum() / counts.sum().clamp(min=1))
    batch = held.batch(np.random.default_rng(HELD_SEED), plan.check_rows, plan.length).to(device)
    watched = [(batch, best_tokens(batch, frozen.head))]
    number = torch.bfloat16 if plan.number == "bf16" else torch.float32
    own = _of_head(head, frozen)
    frozen = Frozen(own.embedding.to(device), own.head.to(device, number))
    run = Run(head, plan.pace, checkpoint, {**(about or {}), **_about(shape, plan)}, peers)
    watch = _Watch(
        run,
        head,
        frozen,
        watched,
        plan,
    )
    outcome = carry_out(
        f"training {shape.kind}",
        run,
        _step(head, frozen, learning, plan, peers),
        progress=progress,
        between=watch.look,
    )
    return Trained(head, outcome, tuple(watch.checks), plan, held.tokens, counts, coverage)


def _of_head(head: TrainableDraft, frozen: Frozen) -> Frozen:
    """Return the target's tensors with the rows of its output head for the head's vocabulary."""
    rows = frozen.head if head.known is None else frozen.head[head.known]
    return Frozen(frozen.embedding, rows)


def new_head(shape: HeadShape, *, seed: int) -> TrainableDraft:
    """Return a head of that shape with random weights."""
    torch.manual_seed(seed)
    return recipe_of(shape.kind).trainable(shape)


def _about(shape: HeadShape, plan: Plan) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the first, besides its pace. Not
    `number`: another one may be faster tomorrow."""
    recipe = {f"recipe.{name}": value for name, value in asdict(plan.recipe).items()}
    return {
        **asdict(shape),
        **recipe,
        "batch": plan.batch,
        "length": plan.length,
        "alone": plan.alone,
        "held": plan.held,
        "depth": plan.depth,
    }


def _step(
    head: TrainableDraft, frozen: Frozen, features: Features, plan: Plan, peers: ProcessGroup
) -> Step:
    def loss_of(batch: Batch, steps: int, random: torch.Generator) -> Tensor:
        recipe = replace(plan.recipe, steps=steps)
        return recipe_of(head.shape.kind).loss(head, frozen, batch, recipe, random)

    def step(number: int, done: float) -> tuple[Tensor, int]:
        rng = np.random.default_rng([plan.pace.seed, number, peers.rank])
        batch = features.batch(rng, plan.batch, plan.length).to(plan.pace.device)
        with in_numbers(plan.number, plan.pace.device):
            return loss_of(
                batch,
                steps_at(done, plan),
                torch.Generator(plan.pace.device).manual_seed(int(rng.integers(2**62))),
            ), batch.tokens.numel()

    return step


def use_threads(count: int) -> None:
    """Use this many threads of the CPU in this process."""
    torch.set_num_threads(count)


def steps_at(done: float, plan: Plan) -> int:
    """Return the steps of the training-time test when a share `done` of the run is over."""
    return plan.recipe.steps if done >= plan.alone else 1


def faster_number(device: str) -> Literal["fp32", "bf16"]:
    """Return the type in which a step is faster on this device, by multiplying matrices of a small
    head's size: not every CPU has bf16 instructions."""
    if torch.device(device).type != "cpu":
        return "bf16"
    left, right = torch.ones(1024, 256), torch.ones(256, 704)
    half = left.bfloat16(), right.bfloat16()
    narrow, wide = (least_seconds(partial(torch.mm, *both), 8) for both in (half, (left, right)))
    return "bf16" if narrow * WORTH_BF16 < wide else "fp32"


@contextmanager
def in_numbers(number: str, device: str) -> Iterator[None]:
    """Compute matrix products in bf16, or in 32 bits, within the block."""
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=number == "bf16"):
        yield


class _Watch:
    """Measures the head at even intervals of a run; the results are kept with the checkpoint."""

    def __init__(
        self, run: Run, head: TrainableDraft, frozen: Frozen, held: Held, plan: Plan
    ) -> None:
        self.run, self.head, self.frozen, self.held, self.plan = run, head, frozen, held, plan
        self.checks = [Check(**{**row, "at": tuple(row["at"])}) for row in run.notes]

    def look(self) -> str:
        """Measure if it is time, and return the last measurement."""
        due = int(self.run.done * self.plan.checks) + 1
        if len(self.checks) < due and not self.run.peers.rank:
            with in_numbers(self.plan.number, self.plan.pace.device):
                recipe = recipe_of(self.head.shape.kind)
                found = recipe.simulated(self.head, self.frozen, self.held, self.plan.depth)
            self.checks.append(self._check(found))
            self.run.notes[:] = [asdict(check) for check in self.checks]
        return f"tau {self.checks[-1].length:.2f}" if self.checks else ""

    def _check(self, found: Acceptance) -> Check:
        run = self.run
        return Check(
            run.steps, run.tokens, run.spent_s, run.loss, found.length, found.at, found.contrast
        )
