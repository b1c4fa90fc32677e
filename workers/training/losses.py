"""The losses of draft heads, which learn from a target: those of EAGLE, Jakiro and EAGLE-3 over
packed rows, and simulated acceptance.

Row j of step i predicts token t = j + 2 + i and the feature of position t - 1. It counts if token t
is to be learned (the target's own output) and in the same sequence; so the mask is that of the
predicted token, not of row j, and every mean is over the rows that count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dovetail.protocol.errors import UserError
from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.heads.trainable import (
    HeadOutput,
    Seen,
    TrainableDraft,
    TrainableHead,
    mask_of,
)
from dovetail.workers.training.plan import Recipe
from dovetail.workers.training.recipes import TRAINED
from dovetail.workers.training.target_parts import Frozen

Held = Sequence[tuple[Batch, Tensor]]  # batches with the target's `best_tokens`
NOISE_COLUMNS = 512  # columns of the rows for which `Recipe.noise` is given
CACHED_LOGITS = 1 << 20
"""Logits computed at a time on a CPU: few enough to stay in its caches, enough for fast
products."""
GPU_LOGITS = 1 << 26
BEST_AT_A_TIME = 4096  # tokens of the vocabulary whose logits are compared at a time


def read_features(head: TrainableDraft, batch: Batch) -> Tensor:
    """Return the inputs of a head [B, n, W]: the last hidden states, or residual streams."""
    if not head.reads_taps:
        return batch.g.float()
    if batch.taps is None:
        raise UserError(
            f"{TRAINED[head.shape.kind].what.split(':')[0]} reads residual streams of the target, "
            "but these features hold none: write them with --taps auto"
        )
    return batch.taps.float()


class _SoftCrossEntropy(torch.autograd.Function):
    """The cross entropies of rows and their gradients at once, computing the logits of a few rows
    at a time: those of all rows would not fit into a cache."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, weight: Tensor, wanted: Tensor, index: Tensor, counts: Tensor
    ) -> Tensor:
        kind = state.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else state.dtype
        rows, matrix, total = (
            state.to(dtype),
            weight.to(dtype),
            torch.zeros((), device=state.device),
        )
        of_state, of_weight = (
            torch.empty_like(rows),
            torch.zeros_like(weight) if ctx.needs_input_grad[1] else None,
        )
        for part in _parts(len(rows), weight):
            logits, goal, count = (rows[part] @ matrix.T).float(), wanted[index[part]], counts[part]
            spread = torch.logsumexp(logits, -1)
            total += ((spread - (goal * logits).sum(-1)) * count).sum()
            difference = (
                logits.sub_(spread[:, None]).exp_().sub_(goal).mul_(count[:, None]).to(dtype)
            )
            of_state[part] = difference @ matrix
            if of_weight is not None:
                of_weight += difference.T @ rows[part]
        ctx.save_for_backward(of_state.to(state.dtype), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_state, of_weight = ctx.saved_tensors
        return (
            gradients[0] * of_state,
            None if of_weight is None else gradients[0] * of_weight,
            None,
            None,
            None,
        )


def _parts(rows: int, weight: Tensor) -> list[slice]:
    """Return the slices of rows to multiply by the output matrix [V, H] at a time."""
    size = max(16, (CACHED_LOGITS if weight.device.type == "cpu" else GPU_LOGITS) // len(weight))
    return [slice(first, first + size) for first in range(0, rows, size)]


def soft_cross_entropy(
    state: Tensor, weight: Tensor, wanted: Tensor, index: Tensor, counts: Tensor
) -> Tensor:
    """Return the sum of counts [N] times the cross entropies in nats of softmax(state [N, H] @
    weight [V, H] transposed) against rows `index` of wanted [M, V]."""
    return cast(Tensor, _SoftCrossEntropy.apply(state, weight, wanted, index, counts))  # type: ignore[no-untyped-call]


def feature_loss(state: Tensor, wanted: Tensor) -> Tensor:
    """Return SmoothL1 [N], the mean over the width, of states against features [N, H]."""
    return functional.smooth_l1_loss(state, wanted, reduction="none").mean(-1)


@torch.no_grad()
def wanted_distributions(frozen: Frozen, g: Tensor) -> Tensor:
    """Return the target's distributions after g [N, H] over the head's vocabulary [N, Vd], each
    with sum 1; the logits of other tokens are not computed."""
    wanted = torch.empty(len(g), len(frozen.head), device=g.device)
    for part in _parts(len(g), frozen.head):
        rows = g[part].to(frozen.head.dtype)
        wanted[part] = torch.softmax(functional.linear(rows, frozen.head).float(), -1)
    return wanted


@torch.no_grad()
def best_tokens(batch: Batch, matrix: Tensor) -> Tensor:
    """Return the target's most likely tokens [B, n] after each column that a learned token follows,
    0 elsewhere; `matrix`: its output head [V, H], in any type."""
    rows = predicted(batch, 1)
    g = batch.g[rows].float()
    best = torch.full((len(g),), -torch.inf, device=g.device)
    token = torch.zeros(len(g), dtype=torch.int64, device=g.device)
    for first in range(0, len(matrix), BEST_AT_A_TIME):
        part = matrix[first : first + BEST_AT_A_TIME].to(g.device, torch.float32)
        logits, at = functional.linear(g, part).max(-1)
        token = torch.where(logits > best, at + first, token)
        best = torch.maximum(logits, best)
    tokens = torch.zeros_like(batch.tokens)
    tokens[rows] = token
    return tokens


def predicted(batch: Batch, ahead: int) -> Tensor:
    """Return bool [B, n]: which rows j predict, `ahead` tokens later, a token of their sequence
    that is learned."""
    count = batch.tokens.shape[1]
    found = torch.zeros_like(batch.learn)
    if ahead < count:
        same = batch.sequence[:, ahead:] == batch.sequence[:, : count - ahead]
        found[:, : count - ahead] = (
            batch.learn[:, ahead:] & same & (batch.sequence[:, : count - ahead] >= 0)
        )
    return found


class Wanted:
    """The target's distributions in a batch: every learned token's is computed once and looked up
    by all steps or levels."""

    def __init__(self, head: TrainableDraft, frozen: Frozen, batch: Batch) -> None:
        first = predicted(batch, 1)  # token t is predicted from position t - 1 by the target
        self.flat_g = batch.g.flatten(0, 1).float()
        sources = first.flatten().nonzero()[:, 0]
        self.distributions = wanted_distributions(frozen, self.flat_g[sources])
        written = batch.tokens.flatten()[sources + 1]
        self.inside = (
            torch.ones_like(written, dtype=torch.bool) if head.known is None else head.t2d[written]
        )
        self.at = torch.full((first.numel(),), -1, device=first.device)
        self.at[sources] = torch.arange(len(sources), device=first.device)


class Lesson(Wanted):
    """One batch for the losses of a head that drafts level by level."""

    def __init__(self, head: TrainableHead, frozen: Frozen, batch: Batch) -> None:
        super().__init__(head, frozen, batch)
        self.head, self.frozen, self.batch = head, frozen, batch
        self.seen = Seen(mask_of(batch.sequence))

    def step(self, state: Tensor, step: int) -> HeadOutput:
        """Compute step `step` on the text's own tokens: row j takes x_{j+1+step} (past the end any
        token: such a row predicts nothing)."""
        ahead = torch.roll(self.batch.tokens, -(1 + step), dims=1)
        found: HeadOutput = self.head(
            functional.embedding(ahead, self.frozen.embedding).float(),
            state,
            self.batch.position + step,
            self.seen,
        )
        return found

    def loss(self, state: Tensor, ahead: int, feature: float, cross_entropy: float) -> Tensor:
        """Return the weighted loss of states [B, n, H] whose row j predicts token j + ahead: means
        over the rows that count."""
        rows = predicted(self.batch, ahead).flatten().nonzero()[:, 0]
        if not len(rows):
            return state.sum() * 0
        own, goal = state.flatten(0, 1)[rows], rows + ahead - 1
        total = torch.zeros((), device=state.device)
        if feature:
            total = total + feature * feature_loss(own.float(), self.flat_g[goal]).mean()
        if cross_entropy:
            index = self.at[goal]
            counts = self.inside[index] / self.inside[index].sum().clamp(min=1)
            total = total + cross_entropy * soft_cross_entropy(
                *self.head.output(own, self.frozen.head), self.distributions, index, counts
            )
        return total


def head_loss(
    head: TrainableHead,
    frozen: Frozen,
    batch: Batch,
    recipe: Recipe,
    random: torch.Generator | None = None,
) -> Tensor:
    """Return the loss of a batch over all steps of the training-time test; `random` generates the
    noise on what the head reads, None: no noise."""
    lesson, read = Lesson(head, frozen, batch), read_features(head, batch)
    if recipe.noise and random is not None:
        width = recipe.noise * NOISE_COLUMNS / read.shape[1]
        read = read + (torch.rand(read.shape, generator=random, device=read.device) - 0.5) * width
    state, total = head.begin(read), torch.zeros((), device=read.device)
    for step in range(recipe.steps):
        found = lesson.step(state, step)
        loss = lesson.loss(found.state, step + 2, recipe.feature, recipe.cross_entropy)
        if found.contrast is not None:
            weights = (
                recipe.feature * recipe.contrast_feature,
                recipe.cross_entropy * recipe.contrast_cross_entropy,
            )
            loss = loss + lesson.loss(found.contrast, step + 3, *weights)
        total, state = total + recipe.decay**step * loss, found.state
    return total


@dataclass(frozen=True)
class Acceptance:
    """The accepted length of chains of the head's most likely tokens on text of the target."""

    length: float  # mean tokens a round including the target's own one, tau
    at: tuple[float, ...]
    """Share of drafted tokens accepted at depth 1, 2, ... among those whose parents were."""
    contrast: float | None = None  # the share accepted at depth 2 from Jakiro's contrast


class Chains:
    """Counts over batches. A chain continues while the text agrees with it; where a sampled text is
    not the target's most likely token, it ends uncounted."""

    def __init__(self, depth: int) -> None:
        self.tried, self.taken, self.contrast = [0] * depth, [0] * depth, [0, 0]

    def acceptance(self) -> Acceptance:
        at = tuple(
            taken / max(tried, 1) for taken, tried in zip(self.taken, self.tried, strict=True)
        )
        length, reached = 1.0, 1.0
        for share in at:
            reached *= share
            length += reached
        return Acceptance(
            length, at, self.contrast[0] / self.contrast[1] if self.contrast[1] else None
        )


@torch.no_grad()
def simulate(head: TrainableHead, frozen: Frozen, held: Held, depth: int) -> Acceptance:
    """Draft a chain of `depth` tokens from every row at once, on the head's own states and tokens,
    and count what the target would have accepted. `held`: batches with their `best_tokens`."""
    chains = Chains(depth)
    for batch, best in held:
        _follow(head, frozen, batch, best, chains)
    return chains.acceptance()


def _follow(
    head: TrainableHead, frozen: Frozen, batch: Batch, best: Tensor, chains: Chains
) -> None:
    seen, known = Seen(mask_of(batch.sequence)), head.known
    state, tokens, contrast = (
        head.begin(read_features(head, batch)),
        torch.roll(batch.tokens, -1, dims=1),
        None,
    )
    alive = torch.ones_like(batch.learn)
    for step in range(len(chains.tried)):
        found: HeadOutput = head(
            functional.embedding(tokens, frozen.embedding).float(),
            state,
            batch.position + step,
            seen,
        )
        alive &= predicted(batch, step + 2)
        drafted = _most_likely(head, frozen, found.state, alive, known)
        choice, written = (
            torch.roll(best, -(step + 1), dims=1),
            torch.roll(batch.tokens, -(step + 2), dims=1),
        )
        chains.tried[step] += int(alive.sum())
        if contrast is not None and step == 1:
            chains.contrast[0] += int((alive & (contrast == choice)).sum())
            chains.contrast[1] += int(alive.sum())
        if found.contrast is not None and step == 0:
            contrast = _most_likely(head, frozen, found.contrast, alive, known)
        alive &= drafted == choice
        chains.taken[step] += int(alive.sum())
        alive &= drafted == written
        state, tokens = found.state, drafted


def _most_likely(
    head: TrainableHead, frozen: Frozen, state: Tensor, rows: Tensor, known: Tensor | None
) -> Tensor:
    """Return the most likely token of the selected rows [B, n], 0 for the others."""
    chosen = head.logits(state[rows], frozen.head).argmax(-1)
    tokens = torch.zeros_like(rows, dtype=torch.int64)
    tokens[rows] = chosen if known is None else known[chosen]
    return tokens
