"""The engine of draft heads against the head itself, run over each path by itself."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.devices import open_device
from dovetail.workers.head_drafter import NOISE_SHARE, HeadDrafter
from dovetail.workers.head_levels import Capture
from dovetail.workers.models.heads import Head, Predicted, open_head
from dovetail.workers.models.segment import Segment
from dovetail.workers.speculation.growth import NO_ROW
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.wire import TYPES, to_array
from support.heads import write_head
from support.models import VOCABULARY, cache_row, reference_law, reference_processed

KEY = bytes(range(16))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPE = Shape(12, 4, 4)
TREE = TreeSettings(gamma=12, depth=4, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.5, top_k=20)
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7, "logit_bias": ((3, 4.0), (7, -5.0)), "min_tokens": 9}
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": Sampling(**PENALTIES), "all": SAMPLED.model_copy(update=PENALTIES)}
END = (1, 30)
CAPACITY = 60


KINDS = ("eagle", "eagle3", "dovetail-3", "jakiro", "jakiro-star")


@pytest.fixture(scope="module")
def open_kind(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Callable[..., Head]:
    @cache
    def opened(name: str, backend: str = "auto") -> Head:
        folder = write_head(tmp_path_factory.mktemp(name), name)
        return open_head(str(folder), target=str(llama_folder), weights="fp32", device="cpu", backend=backend)

    return opened


@pytest.fixture(scope="module")
def head(open_kind: Callable[..., Head]) -> Head:
    return open_kind("eagle")


@pytest.fixture(scope="module")
def contrasting(open_kind: Callable[..., Head]) -> Head:
    return open_kind("jakiro")


class Story:
    """A session and the truth about it: its log, and a feature of every position but the root's."""

    def __init__(
        self,
        head: Head,
        *,
        contrast: bool = False,
        sampling: Sampling = GREEDY,
        capacity: int = CAPACITY,
        tree: TreeSettings = TREE,
        seed: int = 0,
        capture: Capture | None = None,
    ) -> None:
        self.head, self.engine = head, HeadDrafter(head, Spans(), contrast=contrast, capture=capture)
        self.random = torch.Generator().manual_seed(seed)
        self.log = list(PROMPT)
        self.features = self.some(len(PROMPT))
        self.session = self.engine.open(PROMPT, capacity=capacity, vocabulary_size=VOCABULARY, key=KEY, sampling=sampling, tree=tree, end=END)

    def some(self, count: int) -> Tensor:
        """Features [count, W] as they travel."""
        reads = HeadDrafter(self.head, Spans(), contrast=False).reads
        return torch.randn(count, reads.row, generator=self.random).to(TYPES[reads.dtype])

    def fed(self, *cuts: int) -> "Story":
        """The prompt's features, in parts that end at `cuts` and at its end."""
        start = 0
        for stop in (*cuts, len(PROMPT)):
            self.engine.feed(self.session, start, to_array(self.features[start:stop]))
            start = stop
        return self

    def draft(self, accepted: Sequence[int] = (), bonus: int = 2, shape: Shape = SHAPE, deadline_ns: int | None = None) -> Proposal:
        """A round, with the features of the last root and the accepted nodes from the second one on."""
        tokens = [int(self.session.tree.tokens[self.session.offered[node]]) for node in accepted]
        if len(self.log) > len(PROMPT):
            new = self.some(1 + len(accepted))
            self.features = torch.cat((self.features, new))
            self.engine.check_features(self.session, len(accepted), to_array(new))
            self.engine.take_features(self.session, to_array(new))
        self.log += [*tokens, bonus]
        return self.engine.draft(self.session, accepted, bonus, shape, deadline_ns)

    def alone(self, path: Sequence[int]) -> tuple[Tensor, list[Predicted]]:
        """The last row of the cache [...] and what each row predicts, the root's first, from a plain pass over the log and one for each token of `path`."""
        count = len(self.log) - 1
        cache = self.head.new_cache(count + len(path))
        contrast = self.head.spec.contrast
        rows = torch.tensor([count - 1])
        tokens, segment = torch.tensor(self.log[1:]), Segment(cache, 0, count)
        predicted = [self.head.forward(tokens, self.features[:count], torch.arange(count), [segment], true=True, rows=rows, contrast=contrast)]
        cache.keep(range(count), count)
        for place, token in enumerate(path, start=count):
            segment = Segment(cache, place, 1)
            predicted.append(self.head.forward(torch.tensor([token]), predicted[-1].states, torch.tensor([place]), [segment], true=False, contrast=contrast))
            cache.keep([place], 1)
        return cache_row(cache, cache.length - 1), predicted

    def gain(self, path: Sequence[int], logits: Tensor) -> float:
        """The log-probability of the last token of `path` by the `logits` [V] before it, processed and sharpened in plain numbers."""
        session, above = self.session, path[:-1]
        sampling = session.ranking.sampling
        said = [*self.log[len(PROMPT) :], *above]
        processed = reference_processed(logits.tolist(), sampling, PROMPT, said, END)
        if sampling.temperature > 0:
            law = reference_law(processed, sampling)
            processed = [math.log(p) + NOISE_SHARE * gumbel(KEY, len(self.log) + len(above), v) if p else -math.inf for v, p in enumerate(law)]
        return float(torch.log_softmax(torch.tensor(processed) / session.ranking.sharpening, 0)[path[-1]])

    def check(self, shape: Shape = SHAPE, *, contrast: bool = False) -> None:
        """Every node has the score, and every row that was computed the numbers, that the head by itself gives."""
        tree, session = self.session.tree, self.session
        assert session.log == self.log
        assert session.rows == len(self.log) - 1
        torch.testing.assert_close(cache_row(session.cache, session.cache.length - 1), self.alone(())[0], rtol=1e-2, atol=3e-3)
        for node in range(len(tree)):
            path, parent = tree.path_tokens(node), int(tree.parents[node])
            row, predicted = self.alone(path)
            found = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent])
            foretold = predicted[-3].contrast if contrast and len(path) == shape.depth > 1 else predicted[-2].logits
            assert foretold is not None
            assert found == pytest.approx(self.gain(path, foretold[0]), rel=2e-3, abs=1e-2)
            if tree.rows[node] != NO_ROW and not (contrast and len(path) == shape.depth - 1):
                torch.testing.assert_close(cache_row(session.cache, session.cache.length + int(tree.rows[node])), row, rtol=1e-2, atol=3e-3)


def walk(story: Story, seed: int, rounds: int, *, contrast: bool = False, shape: Shape = SHAPE) -> None:
    """Rounds with random verdicts, each compared with the head by itself."""
    random = np.random.default_rng(seed)
    session = story.session
    accepted: tuple[int, ...] = ()
    bonus = int(random.integers(VOCABULARY))
    for _ in range(rounds):
        known = session.tree.child(session.offered[accepted[-1]] if accepted else ROOT, bonus)
        proposal = story.draft(accepted, bonus, shape)
        assert proposal.hit == (known is not None)
        proposal.tree.check(VOCABULARY)
        assert max(proposal.tree.depths) <= shape.depth
        story.check(shape, contrast=contrast)
        path = proposal.tree.path(int(random.integers(len(proposal.tree))))
        accepted = path[: random.integers(len(path) + 1)]
        last = session.offered[accepted[-1]] if accepted else ROOT
        below = session.tree.tokens[session.tree.parents == last]
        bonus = int(random.choice(below)) if len(below) and random.random() < 0.7 else int(random.integers(VOCABULARY))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1 << 32), sampling=st.sampled_from([*SAMPLINGS.values()]))
@settings(deadline=None, max_examples=8)
def test_every_node_is_what_the_head_gives_over_its_path_wherever_the_root_moves(
    open_kind: Callable[..., Head], kind: str, seed: int, sampling: Sampling
) -> None:
    walk(Story(open_kind(kind), sampling=sampling, seed=seed).fed(3, 4), seed, rounds=4)


@pytest.mark.parametrize(("kind", "contrast"), [("eagle", False), ("eagle3", False), ("jakiro", True), ("jakiro-star", False)])
def test_levels_in_fixed_shapes_are_the_same(open_kind: Callable[..., Head], kind: str, contrast: bool) -> None:
    captured = []

    def capture(function: Callable[[], Predicted]) -> Callable[[], Predicted]:
        captured.append(function)
        return function

    story = Story(open_kind(kind, "library"), contrast=contrast, sampling=SAMPLED, capture=capture).fed()
    walk(story, 1, rounds=4, contrast=contrast)
    assert 1 <= len(captured) <= 6


@pytest.mark.parametrize("policy", ["dynamic", "static", "beam", "budget"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_last_level_comes_from_the_contrast_of_the_parents_and_takes_no_pass(contrasting: Head, policy: str, depth: int) -> None:
    shape = Shape(12, depth, 4)
    tree = TreeSettings(policy=policy, gamma=12, depth=depth, width=4)
    story = Story(contrasting, contrast=True, tree=tree).fed()
    walk(story, depth, rounds=3, contrast=True, shape=shape)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_levels_that_a_gpu_replays_are_what_it_computes_one_by_one(kind: str, tmp_path: Path, llama_folder: Path) -> None:
    device = open_device("cuda:0", 1)
    head = open_head(str(write_head(tmp_path, kind)), target=str(llama_folder), weights="fp16", device=device.name)
    assert device.capture is not None
    replayed, launched = (Story(head, contrast=head.spec.contrast, capture=capture).fed() for capture in (device.capture, None))
    for bonus in range(2, 8):
        found, expected = replayed.draft(bonus=bonus), launched.draft(bonus=bonus)
        assert found.tree == expected.tree
        assert found.scores == pytest.approx(expected.scores, abs=0.05)


def test_a_last_level_that_is_foretold_saves_one_pass_of_the_head(contrasting: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []
    real = contrasting.forward
    monkeypatch.setattr(contrasting, "forward", lambda *a, true, **k: (passes.append(true), real(*a, true=true, **k))[1])
    for contrast, levels in ((False, 3), (True, 2)):
        story = Story(contrasting, contrast=contrast).fed()
        passes.clear()
        assert max(story.draft().tree.depths) == SHAPE.depth
        assert passes == [True] + [False] * levels


def test_features_in_parts_of_any_size_give_the_same(head: Head) -> None:
    expected = Story(head).fed().draft().tree
    for cuts in ((1,), (2, 5), (1, 2, 3, 4, 5, 6, 7), (7,)):
        assert Story(head).fed(*cuts).draft().tree == expected


def test_features_that_do_not_follow_are_refused_and_change_nothing(head: Head) -> None:
    story = Story(head)
    session, engine, features = story.session, story.engine, story.features
    engine.feed(session, 0, to_array(features[:3]))
    row = features.shape[1]
    wrong = [
        (4, features[4:6], RequestError, "features from position 4 on follow those of 3 positions"),
        (2, features[2:5], RequestError, "features from position 2 on follow those of 3 positions"),
        (3, torch.cat((features[3:], features[:1])), RequestError, "features of 9 positions have come, of a log of 8 tokens"),
        (0, features[:3], StaleError, "have come before"),
        (3, features[3:4].float(), RequestError, rf"features of type float32 and shape \[1, {row}\]"),
        (3, features[3:4, :-1], RequestError, rf"this head reads {engine.reads.dtype} in rows of {row}"),
        (3, features[3], RequestError, "this head reads"),
    ]
    for start, part, error, words in wrong:
        with pytest.raises(error, match=words):
            engine.feed(session, start, to_array(part))
        assert (session.fed, session.rows) == (3, 3)
    engine.feed(session, 3, to_array(features[3:]))
    assert story.draft().tree == Story(head).fed().draft().tree


def test_a_round_whose_features_are_missing_or_too_many_is_refused(head: Head) -> None:
    story = Story(head)
    with pytest.raises(RequestError, match="features of 0 positions have come, and this round goes on from 8"):
        story.engine.check_features(story.session, 0, None)
    story.fed().engine.check_features(story.session, 0, None)
    story.draft()
    for rows in (0, 1, 3):
        with pytest.raises(RequestError, match=f"features of {8 + rows} positions have come, and this round goes on from 10") as refusal:
            story.engine.check_features(story.session, 1, to_array(story.some(rows)))
        assert refusal.value.code == "prefix"
    story.engine.check_features(story.session, 1, to_array(story.some(2)))


def test_rounds_without_a_proposal_are_caught_up_with_later(head: Head) -> None:
    story = Story(head).fed()
    for token in (7, 8, 9):
        assert len(story.draft(bonus=token, shape=Shape(0, 4, 4)).tree) == 0
    story.draft(bonus=10)
    story.check()


def test_what_a_session_proposes_does_not_depend_on_the_sessions_beside_it(head: Head) -> None:
    def proposals(besides: Callable[[], object]) -> list[Proposal]:
        story = Story(head, sampling=SAMPLED).fed()
        found = [story.draft()]
        for _ in range(3):
            besides()
            found.append(story.draft(found[-1].tree.path(1)[:1], 5))
        return found

    other = Story(head, seed=1).fed(4)
    assert proposals(lambda: other.draft()) == proposals(tuple)


def test_an_order_bounds_nodes_depth_and_width(head: Head) -> None:
    for shape in (Shape(0, 3, 3), Shape(1, 4, 4), Shape(5, 1, 9), Shape(7, 3, 1), Shape(30, 4, 3)):
        tree = Story(head).fed().draft(shape=shape).tree
        assert len(tree) <= shape.nodes
        assert max(tree.depths, default=0) <= shape.depth
        assert max((len(c) for c in tree.children.values()), default=0) <= shape.width


def test_growth_ends_with_the_first_level_that_ends_after_the_deadline(head: Head) -> None:
    story = Story(head).fed()
    ticks = iter(range(100))
    story.engine._clock = lambda: next(ticks)
    assert max(story.draft(shape=Shape(40, 6, 4), deadline_ns=1).tree.depths) == 3


def test_near_the_end_of_the_sequence_no_level_is_drafted_that_it_has_no_place_for(head: Head) -> None:
    story = Story(head, capacity=len(PROMPT) + 5).fed()
    depths = [max(story.draft(bonus=token, shape=Shape(12, 9, 2)).tree.depths, default=0) for token in range(6)]
    assert depths == [3, 2, 1, 0, 0, 0]


def test_noise_is_computed_ahead_and_changes_nothing(head: Head) -> None:
    prepared, unprepared = Story(head, sampling=SAMPLED).fed(), Story(head, sampling=SAMPLED).fed()
    while prepared.engine.prepare(prepared.session):
        pass
    assert prepared.draft() == unprepared.draft()
    assert not prepared.engine.prepare(Story(head).session)


def test_beyond_the_length_it_was_trained_with_a_head_sees_the_last_rows_at_their_own_positions(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "spec", replace(head.spec, context=20))
    story = Story(head, capacity=200).fed()
    session = story.session
    assert session.window == 16
    lengths = []
    for token in range(2, 40):
        story.draft(bonus=token)
        assert session.rows == len(story.log) - 1
        lengths.append(session.cache.length)
        check_window(story)
    assert max(lengths) == 16
    assert min(lengths[9:]) == 14
    assert session.cache.capacity == 16 + 2 * TREE.depth * TREE.width


def check_window(story: Story) -> None:
    """The root's children are ranked as by a head whose first row is the oldest that is left; in a head of one block rows do not depend on others."""
    session = story.session
    first, count = session.dropped, session.rows - session.dropped
    cache = story.head.new_cache(count)
    predicted = story.head.forward(
        torch.tensor(story.log[1:])[first:],
        story.features[first : first + count],
        torch.arange(first, first + count),
        [Segment(cache, 0, count)],
        true=True,
        rows=torch.tensor([count - 1]),
    )
    cache.keep(range(count), count)
    torch.testing.assert_close(session.states[0], predicted.states[0], rtol=1e-2, atol=3e-3)
    for slot in range(count):
        torch.testing.assert_close(cache_row(session.cache, slot), cache_row(cache, slot), rtol=1e-2, atol=3e-3)


def test_a_prompt_longer_than_the_window_leaves_its_last_rows(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "spec", replace(head.spec, context=9))
    story = Story(head, capacity=200).fed()
    story.draft()
    assert (session := story.session).window == 5
    assert (session.rows, session.cache.length) == (8, 5)
    check_window(story)


def test_a_token_that_the_target_has_no_row_for_is_refused(head: Head) -> None:
    with pytest.raises(RequestError, match="token 48 is beyond the vocabulary of 48 of the target that this head is for"):
        HeadDrafter(head, Spans(), contrast=False).check_tokens([5, VOCABULARY])


def test_a_head_says_what_it_reads(head: Head) -> None:
    reads = HeadDrafter(head, Spans(), contrast=False).reads
    assert (reads.taps, reads.width, reads.dtype, reads.vocabulary_size) == (head.spec.taps, head.spec.target_width, head.spec.dtype, VOCABULARY)
    assert reads.row == head.spec.feature_width
