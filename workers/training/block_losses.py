"""The loss and the simulated acceptance of block drafters.

A block's root may be any token of a sequence. Its rows see the features of the tokens before the
root, and each other; level l predicts the l-th token after the root. It counts if that token is to
be learned and in the same sequence."""

import torch
from torch import Tensor
from torch.nn import functional

from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.heads.block import BlockHead
from dovetail.workers.training.losses import (
    Acceptance,
    Chains,
    Held,
    Wanted,
    predicted,
    read_features,
    soft_cross_entropy,
)
from dovetail.workers.training.plan import Recipe
from dovetail.workers.training.target_parts import Frozen


def block_states(head: BlockHead, frozen: Frozen, batch: Batch, roots: Tensor) -> Tensor:
    """Return the states [B, A, D, H] of all levels of the blocks whose roots are in the columns
    `roots` [B, A]."""
    shape, (rows, count) = head.shape, roots.shape
    size, columns = shape.block_size, batch.tokens.shape[1]
    of_block = torch.arange(count, device=roots.device).repeat_interleave(size)
    root = roots[:, of_block]  # [B, R] of each row of a block
    slot = torch.arange(size, device=roots.device).repeat(count)
    tokens = torch.where(slot == 0, batch.tokens.gather(1, root), shape.mask_token)
    before = torch.arange(columns, device=roots.device) < root[:, :, None]
    same = batch.sequence[:, None, :] == batch.sequence.gather(1, root)[:, :, None]
    own = (of_block[:, None] == of_block).expand(rows, -1, -1)
    positions = batch.position, batch.position.gather(1, root) + slot
    states: Tensor = head(
        functional.embedding(tokens, frozen.embedding).float(),
        read_features(head, batch),
        positions,
        torch.cat([before & same, own], -1)[:, None],
    )
    return states.view(rows, count, size, -1)[:, :, size - shape.levels :]


def drawn(batch: Batch, size: int, random: torch.Generator) -> Tensor:
    """Return the columns [B, A] of the roots of blocks that have a token to learn; there are as
    many as blocks of this size fit into a row."""
    weights = predicted(batch, 1).float() + 1e-9
    count = max(1, weights.shape[1] // size)
    return torch.multinomial(weights, count, replacement=True, generator=random)


def block_loss(
    head: BlockHead, frozen: Frozen, batch: Batch, recipe: Recipe, random: torch.Generator | None
) -> Tensor:
    """Return the cross entropy of a batch: the mean over the levels of all blocks that count, each
    level weighted by `recipe.decay` of the one before."""
    random = random or torch.Generator(batch.tokens.device).manual_seed(0)
    roots, wanted = drawn(batch, head.shape.block_size, random), Wanted(head, frozen, batch)
    states, columns = block_states(head, frozen, batch, roots), batch.tokens.shape[1]
    first = torch.arange(len(roots), device=roots.device)[:, None] * columns + roots
    flat, own, goals, weights = batch.tokens.flatten(), [], [], []
    for level in range(head.shape.levels):
        rows = predicted(batch, level + 1).gather(1, roots)
        own.append(states[:, :, level][rows])
        goals.append(first[rows] + level)
        weights.append(torch.full((len(goals[-1]),), recipe.decay**level, device=flat.device))
    goal, index = torch.cat(goals), wanted.at[torch.cat(goals)]
    counts = torch.cat(weights) * wanted.inside[index]
    counts = counts / counts.sum().clamp(min=1e-9)
    factors = head.output(torch.cat(own), flat[goal], frozen.head)
    return recipe.cross_entropy * soft_cross_entropy(*factors, wanted.distributions, index, counts)


@torch.no_grad()
def simulate_blocks(head: BlockHead, frozen: Frozen, held: Held, depth: int) -> Acceptance:
    """Draft a chain of the likeliest tokens of each level from every root, and count what the
    target would have accepted. `held`: batches with their `best_tokens`."""
    chains, size = Chains(min(depth, head.shape.levels)), head.shape.block_size
    for batch, best in held:
        for offset in range(min(size, batch.tokens.shape[1])):
            roots = torch.arange(offset, batch.tokens.shape[1], size, device=best.device)
            _follow(head, frozen, batch, best, roots.expand(len(best), -1), chains)
    return chains.acceptance()


def _follow(
    head: BlockHead, frozen: Frozen, batch: Batch, best: Tensor, roots: Tensor, chains: Chains
) -> None:
    states, last = block_states(head, frozen, batch, roots), batch.tokens.shape[1] - 1
    alive, previous = torch.ones_like(roots, dtype=torch.bool), batch.tokens.gather(1, roots)
    for level in range(len(chains.tried)):
        alive = alive & predicted(batch, level + 1).gather(1, roots)
        at = (roots + level).clamp(max=last)
        rows, matrix = head.output(states[:, :, level][alive], previous[alive], frozen.head)
        chosen = functional.linear(rows.to(matrix.dtype), matrix).float().argmax(-1)
        previous = torch.zeros_like(previous)
        previous[alive] = chosen if head.known is None else head.known[chosen]
        chains.tried[level] += int(alive.sum())
        alive = alive & (previous == best.gather(1, at))
        chains.taken[level] += int(alive.sum())
        alive = alive & (previous == batch.tokens.gather(1, (at + 1).clamp(max=last)))
