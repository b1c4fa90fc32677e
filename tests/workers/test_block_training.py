"""Training of block drafters: losses and simulated acceptance against slow loops over single
blocks."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dovetail.workers.training.block_losses import (
    block_loss,
    block_states,
    drawn,
    simulate_blocks,
)
from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.heads.block import BlockHead, BlockShape
from dovetail.workers.training.losses import best_tokens, predicted
from dovetail.workers.training.plan import Recipe
from dovetail.workers.training.target_parts import Frozen

H, V, N, TAPS = 16, 40, 14, 2
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
KINDS = {
    "dflash": {"blocks": 2},
    "dflash-reduced": {"draft_vocabulary": 30},
    "dspark": {"rank": 4, "anchored": True},
    "dspark-reduced": {"rank": 4, "anchored": True, "draft_vocabulary": 30},
}


def head_of(name: str) -> BlockHead:
    torch.manual_seed(3)
    own = {"taps": TAPS, "block_size": 4, "head_norms": True, **KINDS[name]}
    head = BlockHead(BlockShape("dflash", H, 4, 2, 4, 24, V, **own)).eval()
    if head.known is not None:
        head.learn_vocabulary(torch.arange(V)[torch.arange(V) % 4 != 1])
    if head.markov_head is not None:
        torch.nn.init.normal_(head.markov_head.markov_w2.weight, std=2.0)
    return head


def frozen_for(head: BlockHead) -> tuple[Frozen, Tensor]:
    """What the head gets from its target, and the target's whole output head."""
    random = torch.Generator().manual_seed(5)
    embedding, output = (torch.randn(V, H, generator=random) for _ in range(2))
    return Frozen(embedding, output if head.known is None else output[head.known]), output


def some_batch() -> Batch:
    """Two rows: three sequences with padding behind them, and one that begins in its middle."""
    random = torch.Generator().manual_seed(0)
    sequence = torch.tensor([[0] * 5 + [1] * 6 + [2] * 2 + [-1], [0] * N], dtype=torch.int32)
    position = torch.tensor([[*range(5), *range(6), *range(2), 0], [*range(3, 3 + N)]])
    return Batch(
        tokens=torch.randint(V, (2, N), generator=random),
        learn=torch.rand(2, N, generator=random) < 0.8,
        sequence=sequence,
        position=position,
        g=torch.randn(2, N, H, generator=random).half(),
        taps=torch.randn(2, N, TAPS * H, generator=random).half(),
    )


def alone(head: BlockHead, kept: Frozen, batch: Batch, row: int, column: int) -> Tensor:
    """The states [D, H] of one block, from the tokens up to its root alone."""
    first = int((batch.sequence[row] == batch.sequence[row, column]).nonzero()[0])
    part = slice(first, column + 1)
    assert batch.taps is not None
    taps = batch.taps[row : row + 1, part].clone()
    taps[:, -1] = torch.nan  # of the root, which the target has not computed yet
    own = Batch(
        batch.tokens[row : row + 1, part],
        batch.learn[row : row + 1, part],
        batch.sequence[row : row + 1, part],
        batch.position[row : row + 1, part],
        batch.g[row : row + 1, part],
        torch.nan_to_num(taps, nan=1e3),
    )
    return block_states(head, kept, own, torch.tensor([[column - first]]))[0, 0]


def logits_after(
    head: BlockHead, kept: Frozen, state: Tensor, previous: int
) -> tuple[Tensor, list[int]]:
    """The logits of a state after a token, and the ids that they are for."""
    logits = kept.head @ state
    if head.markov_head is not None:
        before = head.markov_head.markov_w1.weight[previous]
        logits = logits + head.markov_head.markov_w2.weight @ before
    known = torch.arange(V) if head.known is None else head.known
    return logits, known.tolist()


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_block_sees_its_sequence_up_to_its_root_and_nothing_of_other_blocks(name: str) -> None:
    head, batch = head_of(name), some_batch()
    kept, _ = frozen_for(head)
    roots = torch.tensor([[0, 3, 5, 9, 12], [0, 1, 6, 6, 13]])
    states = block_states(head, kept, batch, roots)
    assert states.shape == (2, 5, head.shape.levels, H)
    for row in range(2):
        for place, column in enumerate(roots[row].tolist()):
            expected = alone(head, kept, batch, row, column)
            torch.testing.assert_close(states[row, place], expected, **CLOSE)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_loss_is_that_of_the_formulas(name: str) -> None:
    head, batch = head_of(name), some_batch()
    kept, output = frozen_for(head)
    roots = drawn(batch, 4, torch.Generator().manual_seed(2))
    assert bool(predicted(batch, 1).gather(1, roots).all())
    total, weights = torch.zeros(()), 0.0
    for row in range(2):
        for column in roots[row].tolist():
            states = alone(head, kept, batch, row, column)
            for level, state in enumerate(states):
                token = column + level + 1
                if (
                    token >= N
                    or batch.sequence[row, token] != batch.sequence[row, column]
                    or not batch.learn[row, token]
                ):
                    continue
                logits, known = logits_after(head, kept, state, int(batch.tokens[row, token - 1]))
                if int(batch.tokens[row, token]) not in known:
                    continue
                wanted = torch.softmax((output @ batch.g[row, token - 1].float())[known], -1)
                total -= 0.7**level * (wanted * torch.log_softmax(logits, -1)).sum()
                weights += 0.7**level
    recipe = Recipe(cross_entropy=2.0, decay=0.7)
    found = block_loss(head, kept, batch, recipe, torch.Generator().manual_seed(2))
    torch.testing.assert_close(found, 2.0 * total / weights, **CLOSE)


def test_the_pairs_of_a_drafter_learn_and_the_output_head_of_the_target_does_not() -> None:
    head, batch = head_of("dspark"), some_batch()
    kept, _ = frozen_for(head)
    block_loss(head, kept, batch, Recipe(), None).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert kept.head.grad is None


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_simulated_acceptance_is_that_of_blocks_drafted_one_by_one(name: str) -> None:
    head, batch = head_of(name), some_batch()
    batch = dataclasses.replace(batch, learn=torch.ones_like(batch.learn))
    kept, output = frozen_for(head)

    def drafted(row: int, column: int) -> list[int]:
        found, previous = [], int(batch.tokens[row, column])
        for state in alone(head, kept, batch, row, column):
            logits, known = logits_after(head, kept, state, previous)
            previous = known[int(logits.argmax())]
            found.append(previous)
        return found

    for row, column in ((0, 6), (1, 0), (1, 8)):  # the text agrees with three blocks
        for place, token in enumerate(drafted(row, column), column + 1):
            if place < N and batch.sequence[row, place] == batch.sequence[row, column]:
                batch.tokens[row, place], batch.g[row, place - 1] = token, output[token].half()
    depth = head.shape.levels
    tried, taken = [0] * depth, [0] * depth
    for row in range(2):
        for column in range(N):
            for level, token in enumerate(drafted(row, column)):
                place = column + 1 + level
                root = int(batch.sequence[row, column])
                if root < 0 or place >= N or batch.sequence[row, place] != root:
                    break
                best = int((output @ batch.g[row, place - 1].float()).argmax())
                tried[level] += 1
                taken[level] += token == best
                if token != best or token != int(batch.tokens[row, place]):
                    break
    found = simulate_blocks(head, kept, [(batch, best_tokens(batch, output))], 9)
    assert min(taken) > 0
    assert found.at == pytest.approx([t / max(n, 1) for t, n in zip(taken, tried, strict=True)])
