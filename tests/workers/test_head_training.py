"""Training of draft heads: losses, training-time test and simulated acceptance against slow loops;
resuming; the folder that is written."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.protocol.settings import HEAD_KINDS
from dovetail.workers.heads.registry import KINDS, setting_of
from dovetail.workers.training import losses, run, trainer
from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.heads.trainable import (
    HeadShape,
    Seen,
    TrainableHead,
    mask_of,
    most_frequent,
)
from dovetail.workers.training.losses import best_tokens, head_loss, simulate
from dovetail.workers.training.plan import Recipe
from dovetail.workers.training.recipes import TRAINED, recipe_of
from dovetail.workers.training.target_parts import Frozen
from dovetail.workers.training.trainer import new_head
from support.cases import everyday

H, V, N = 16, 40, 14


def shape(kind: str, **own: Any) -> HeadShape:
    return recipe_of(kind).shape(kind, H, 4, 2, 4, 24, V, **own)


SHAPES = {
    "eagle": shape("eagle"),
    "eagle-reduced": shape("eagle", draft_vocabulary=30),
    "eagle3": shape("eagle3", draft_vocabulary=30),
    "dovetail": shape("dovetail", blocks=2),
    "dovetail-paper": shape("dovetail", dgf_silu=False, dgf_embed_norm=False),
    "mtp": shape("mtp"),
    "mtp-qwen3": shape("mtp", head_norms=True),
    "jakiro": shape("jakiro"),
    "jakiro-3": shape("jakiro", experts=3),
    "jakiro-plain": shape("jakiro", contrast=False),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def frozen(seed: int = 5) -> Frozen:
    random = torch.Generator().manual_seed(seed)
    return Frozen(torch.randn(V, H, generator=random), torch.randn(V, H, generator=random))


def some_batch(seed: int = 0) -> Batch:
    """Two rows: three sequences with padding behind them, and one sequence that begins in its
    middle."""
    random = torch.Generator().manual_seed(seed)
    sequence = torch.tensor([[0] * 5 + [1] * 6 + [2] * 2 + [-1], [0] * N], dtype=torch.int32)
    position = torch.tensor([[*range(5), *range(6), *range(2), 0], [*range(3, 3 + N)]])
    return Batch(
        tokens=torch.randint(V, (2, N), generator=random),
        learn=torch.rand(2, N, generator=random) < 0.7,
        sequence=sequence,
        position=position,
        g=torch.randn(2, N, H, generator=random).half(),
        taps=torch.randn(2, N, 3 * H, generator=random).half(),
    )


def head_of(name: str) -> TrainableHead:
    head = new_head(SHAPES[name], seed=3).eval()
    if head.known is not None:
        head.learn_vocabulary(torch.arange(V)[torch.arange(V) % 4 != 1])
    return head


def shared_with(head: TrainableHead, kept: Frozen) -> Frozen:
    """The tensors that a head gets from its target: the rows of its own vocabulary."""
    return Frozen(kept.embedding, kept.head if head.known is None else kept.head[head.known])


def begun(head: TrainableHead, batch: Batch) -> Tensor:
    return head.begin(losses.read_features(head, batch))


# The training-time test


def chain(
    head: TrainableHead,
    batch: Batch,
    kept: Frozen,
    row: int,
    column: int,
    tokens: list[int],
    start: Tensor,
) -> list[Any]:
    """A chain from one place, one step after the other: each step is a plain causal pass over the
    true rows of its sequence and the chain so far."""
    first = int((batch.sequence[row] == batch.sequence[row, column]).nonzero()[0])
    states, taken = (
        [*start[row, first : column + 1]],
        [*batch.tokens[row, first + 1 : column + 1].tolist(), tokens[0]],
    )
    positions, said = batch.position[row, first : column + 1].tolist(), []
    for step in range(len(tokens)):
        count = len(states)
        seen = Seen(mask_of(torch.zeros(1, count)))
        said.append(
            head(
                kept.embedding[torch.tensor([taken])],
                torch.stack(states)[None],
                torch.tensor([positions]),
                seen,
            )
        )
        states.append(said[-1].state[0, -1])
        positions.append(positions[-1] + 1)
        taken += tokens[step + 1 : step + 2]
    return [
        (one.state[0, -1], None if one.contrast is None else one.contrast[0, -1]) for one in said
    ]


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_a_step_of_the_training_time_test_is_a_step_of_the_chain_from_its_row(name: str) -> None:
    head, batch, kept = head_of(name), some_batch(), frozen()
    kept = shared_with(head, kept)
    lesson, start = losses.Lesson(head, kept, batch), begun(head, batch)
    state, found = start, []
    for step in range(4):
        found.append(lesson.step(state, step))
        state = found[-1].state
    for row, column in ((0, 0), (0, 2), (0, 6), (1, 0), (1, 9)):
        tokens = batch.tokens[row, column + 1 : column + 5].tolist()
        for step, (expected, contrast) in enumerate(
            chain(head, batch, kept, row, column, tokens, start)
        ):
            torch.testing.assert_close(found[step].state[row, column], expected, **CLOSE)
            if contrast is not None:
                said = found[step].contrast
                assert said is not None
                torch.testing.assert_close(said[row, column], contrast, **CLOSE)


# The losses


def slow_loss(head: TrainableHead, batch: Batch, kept: Frozen, recipe: Recipe) -> Tensor:
    """One row after the other, by the formulas."""
    start, total = begun(head, batch), torch.zeros(())
    known = torch.arange(V) if head.known is None else head.known
    own = shared_with(head, kept)

    def one(state: Tensor, row: int, token: int) -> tuple[Tensor, Tensor | None]:
        g = batch.g[row, token - 1].float()
        difference = (state - g).abs()
        smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
        if int(batch.tokens[row, token]) not in known.tolist():
            return smooth, None
        target = torch.softmax(own.head @ g, -1)
        return smooth, -(target * torch.log_softmax(head.logits(state, own.head), -1)).sum()

    def mean(found: list[tuple[Tensor, Tensor | None]], feature: float, entropy: float) -> Tensor:
        surprises = [e for _, e in found if e is not None]
        return (
            feature * torch.stack([s for s, _ in found]).mean()
            + entropy * torch.stack(surprises).mean()
        )

    places = [
        (row, column) for row in range(2) for column in range(N) if batch.sequence[row, column] >= 0
    ]
    for step in range(recipe.steps):
        main, further = [], []
        for row, column in places:
            tokens = [*batch.tokens[row, column + 1 : column + 2 + step].tolist()]
            if (
                len(tokens) <= step
                or batch.sequence[row, column] != batch.sequence[row, column + 1 + step]
            ):
                continue
            state, contrast = chain(head, batch, kept, row, column, tokens, start)[-1]
            for ahead, said, goal in ((2 + step, state, main), (3 + step, contrast, further)):
                token = column + ahead
                if (
                    said is not None
                    and token < N
                    and batch.sequence[row, token] == batch.sequence[row, column]
                    and batch.learn[row, token]
                ):
                    goal.append(one(said, row, token))
        loss = mean(main, recipe.feature, recipe.cross_entropy)
        if further:
            loss = loss + mean(
                further,
                recipe.feature * recipe.contrast_feature,
                recipe.cross_entropy * recipe.contrast_cross_entropy,
            )
        total = total + recipe.decay**step * loss
    return total


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_the_loss_is_that_of_the_formulas(name: str, steps: int) -> None:
    head, batch, recipe = (
        head_of(name),
        some_batch(),
        Recipe(steps=steps, contrast_feature=0.7, noise=0.0),
    )
    own = shared_with(head, frozen())
    torch.testing.assert_close(
        head_loss(head, own, batch, recipe), slow_loss(head, batch, frozen(), recipe), **CLOSE
    )


@pytest.mark.parametrize("numbers", [1, 1 << 20])
def test_cross_entropies_and_their_gradients_are_those_of_torch(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CACHED_LOGITS", numbers)  # 16 rows at a time, or all
    random = torch.Generator().manual_seed(4)
    state, weight = (torch.randn(rows, H, generator=random, requires_grad=True) for rows in (50, V))
    wanted, index = (
        torch.softmax(torch.randn(30, V, generator=random), -1),
        torch.randint(30, (50,), generator=random),
    )
    counts = torch.rand(50, generator=random)
    expected = (
        torch.nn.functional.cross_entropy(state @ weight.T, wanted[index], reduction="none")
        * counts
    ).sum()
    found = losses.soft_cross_entropy(state, weight, wanted, index, counts)
    torch.testing.assert_close(found, expected)
    for got, right in zip(
        torch.autograd.grad(3 * found, (state, weight)),
        torch.autograd.grad(3 * expected, (state, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, right)


def test_a_row_counts_where_what_it_predicts_is_learned() -> None:
    batch = some_batch()
    learn = torch.zeros_like(batch.learn)
    learn[0, 3] = True  # row 1 predicts token 3, and nothing else does
    only = dataclasses.replace(batch, learn=learn)
    assert losses.predicted(only, 2).nonzero().tolist() == [[0, 1]]
    learn[0, 6] = (
        # the second token of the second sequence: nothing of its own sequence predicts it two
        # tokens on
        True
    )
    assert losses.predicted(dataclasses.replace(batch, learn=learn), 2).nonzero().tolist() == [
        [0, 1]
    ]


def test_a_batch_without_anything_to_learn_costs_nothing() -> None:
    batch = dataclasses.replace(some_batch(), learn=torch.zeros(2, N, dtype=torch.bool))
    loss = head_loss(head_of("jakiro"), frozen(), batch, Recipe(steps=2))
    assert loss.item() == 0
    loss.backward()  # type: ignore[no-untyped-call]


def test_noise_moves_what_a_head_reads_and_not_what_it_learns() -> None:
    head, batch, kept, recipe = head_of("eagle"), some_batch(), frozen(), Recipe(noise=0.2)
    first, again = (
        head_loss(head, kept, batch, recipe, torch.Generator().manual_seed(1)).item()
        for _ in range(2)
    )
    assert first == again
    assert first != head_loss(head, kept, batch, recipe).item()


# Simulated acceptance


def test_the_best_tokens_are_those_of_all_logits_where_the_next_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, kept = some_batch(), frozen()
    monkeypatch.setattr(losses, "BEST_AT_A_TIME", 7)
    wanted = (batch.g.float() @ kept.head.T).argmax(-1) * losses.predicted(batch, 1)
    assert torch.equal(best_tokens(batch, kept.head), wanted)


@pytest.mark.parametrize("name", ["eagle", "eagle-reduced", "eagle3", "dovetail", "jakiro"])
@torch.no_grad()
def test_simulated_acceptance_is_that_of_chains_drafted_one_by_one(name: str) -> None:
    head, kept, depth = head_of(name), frozen(), 4
    batch = agreeing(head, some_batch(), kept)
    found = simulate(head, shared_with(head, kept), [(batch, best_tokens(batch, kept.head))], depth)
    tried, taken, further = [0] * depth, [0] * depth, [0, 0]
    start = begun(head, batch)
    for row in range(2):
        for column in range(N - 2):
            tokens = [int(batch.tokens[row, column + 1])]
            for step in range(depth):
                place = column + 2 + step
                if (
                    place >= N
                    or batch.sequence[row, place] != batch.sequence[row, column]
                    or batch.sequence[row, column] < 0
                    or not batch.learn[row, place]
                ):
                    break
                said = chain(head, batch, kept, row, column, tokens, start)
                best = int((kept.head @ batch.g[row, place - 1].float()).argmax())
                if step == 1 and said[0][1] is not None:
                    further[0] += drafted(head, kept, said[0][1]) == best
                    further[1] += 1
                token = drafted(head, kept, said[-1][0])
                tried[step] += 1
                taken[step] += token == best
                if token != best or token != int(batch.tokens[row, place]):
                    break
                tokens.append(token)
    assert min(taken) > 0
    at = [t / max(n, 1) for t, n in zip(taken, tried, strict=True)]
    assert found.at == pytest.approx(at)
    assert found.length == pytest.approx(1 + sum(np.cumprod(at)))
    assert found.contrast == (further[0] / further[1] if name == "jakiro" and further[1] else None)


def drafted(head: TrainableHead, kept: Frozen, state: Tensor) -> int:
    best = int(head.logits(state, shared_with(head, kept).head).argmax())
    return best if head.known is None else int(head.known[best])


def agreeing(head: TrainableHead, batch: Batch, kept: Frozen) -> Batch:
    """The batch with text and hidden states that agree with the chains from three places; in the
    last chain the text is not what the target would say."""
    batch = dataclasses.replace(batch, learn=torch.ones_like(batch.learn))
    for row, column in ((0, 5), (1, 0), (1, 6)):
        tokens, g, start = batch.tokens.clone(), batch.g.clone(), begun(head, batch)
        own = [int(tokens[row, column + 1])]
        for place in range(column + 2, column + 6):
            own.append(
                drafted(head, kept, chain(head, batch, kept, row, column, own, start)[-1][0])
            )
            tokens[row, place], g[row, place - 1] = own[-1], kept.head[own[-1]].half()
        batch = dataclasses.replace(batch, tokens=tokens, g=g)
    batch.tokens[1, 9] = (batch.tokens[1, 9] + 1) % V
    return batch


# The draft vocabulary


def test_the_most_frequent_tokens_are_kept_in_order() -> None:
    counts = torch.tensor([5, 0, 9, 9, 1, 7, 0])
    assert most_frequent(counts, 4).tolist() == [0, 2, 3, 5]
    head = new_head(dataclasses.replace(SHAPES["eagle3"], vocabulary=7, draft_vocabulary=4), seed=0)
    head.learn_vocabulary(most_frequent(counts, 4))
    assert (torch.arange(4) + head.d2t).tolist() == [0, 2, 3, 5]
    assert head.t2d.nonzero()[:, 0].tolist() == [0, 2, 3, 5]


# Whole runs


class Sequences:
    """Sequences in memory in which every token follows from the one before, with hidden states that
    say so. Stands in for stored features."""

    def __init__(self, count: int = 60, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        rows = [
            (int(rng.integers(V)) + np.arange(int(rng.integers(4, 12)))) % V for _ in range(count)
        ]
        self.ids = torch.from_numpy(np.concatenate(rows))
        self.sequence = torch.from_numpy(np.repeat(np.arange(count), [len(row) for row in rows]))
        self.position = torch.from_numpy(np.concatenate([np.arange(len(row)) for row in rows]))
        self.g = frozen().head[(self.ids + 1) % V] + 0.1 * torch.randn(
            len(self.ids), H, generator=torch.Generator().manual_seed(seed)
        )
        self.tokens = len(self.ids)

    def batch(self, rng: np.random.Generator, size: int, length: int) -> Batch:
        columns = torch.from_numpy(rng.integers(self.tokens - length, size=size))[
            :, None
        ] + torch.arange(length)
        sequence = self.sequence[columns]
        learn = torch.ones_like(columns, dtype=torch.bool)
        g = self.g[columns].half()
        return Batch(
            self.ids[columns],
            learn,
            (sequence - sequence[:, :1]).int(),
            self.position[columns],
            g,
            g.repeat(1, 1, 3),
        )

    def split(self, held: float) -> "tuple[Sequences, Sequences]":
        return self, Sequences(20, seed=1)

    def counts(self) -> Tensor:
        return torch.bincount(self.ids, minlength=V)


def quick(steps: int = 40, **otherwise: Any) -> trainer.Plan:
    pace = run.Pace(steps=steps, rate=1e-2, warm_up=4, seed=2, device="cpu")
    recipe = Recipe(cross_entropy=1.0, steps=2, noise=0.1)
    return trainer.Plan(
        dataclasses.replace(pace, **otherwise),
        recipe,
        batch=4,
        length=24,
        alone=0.4,
        checks=4,
        check_rows=4,
        depth=3,
    )


def taught(name: str, plan: trainer.Plan, **how: Any) -> trainer.Trained:
    return trainer.train_head(SHAPES[name], Sequences(), frozen(), plan, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", everyday(["eagle", "eagle-reduced", "eagle3", "dovetail", "mtp", "jakiro"], "eagle")
)
def test_a_head_learns_what_its_target_says(name: str) -> None:
    trained = taught(name, quick(steps=80))
    assert [check.steps for check in trained.checks] == [1, 20, 40, 60, 80]
    assert trained.checks[-1].length > trained.checks[0].length + 1
    assert trained.outcome.tokens == 80 * 4 * 24


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = taught("dovetail", quick())

    def stop(at: run.Progress) -> None:
        if at.steps == 13:
            raise KeyboardInterrupt

    often = quick(keep_every_s=-1.0)
    with pytest.raises(KeyboardInterrupt):
        taught("dovetail", often, checkpoint=tmp_path / "run", progress=stop)
    seen: list[run.Progress] = []
    resumed = taught("dovetail", often, checkpoint=tmp_path / "run", progress=seen.append)
    assert seen[0].steps == 13
    assert [check.steps for check in resumed.checks] == [check.steps for check in whole.checks]
    assert resumed.checks[-1].loss == pytest.approx(whole.checks[-1].loss, rel=1e-4)
    for expected, got in zip(whole.head.parameters(), resumed.head.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    assert run.read_checkpoint(tmp_path / "run")[1]["steps"] == 40
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_products_in_bf16_train_the_same_head_nearly() -> None:
    plan = quick()
    exact, rounded = (
        taught("eagle", plan),
        taught("eagle", dataclasses.replace(plan, number="bf16")),
    )
    assert rounded.checks[-1].loss == pytest.approx(exact.checks[-1].loss, rel=0.1)
    assert {p.dtype for p in rounded.head.parameters()} == {torch.float32}
    assert trainer.faster_number("cpu") in ("fp32", "bf16")


@pytest.mark.parametrize("kind", TRAINED)
def test_a_kind_of_head_that_can_be_trained_can_be_planned_with(kind: str) -> None:
    own = KINDS[kind]
    assert own.title
    assert TRAINED[kind].what.startswith(("a ", "an "))
    if own.figures is not None:
        assert own.figures.tokens == tuple(sorted(own.figures.tokens))
    assert kind in recipe_of(kind).architecture.lower()


def test_every_kind_of_head_has_a_name_in_the_settings() -> None:
    assert {setting_of(name) for name in KINDS} == {*HEAD_KINDS, "mtp"}
    assert set(TRAINED) < {*HEAD_KINDS, "mtp"}


def test_the_tables_of_heads_import_no_torch() -> None:
    asked = (
        "import sys, dovetail.workers.heads.registry, dovetail.workers.training.recipes; "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
