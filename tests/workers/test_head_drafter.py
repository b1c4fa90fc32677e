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
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.devices.base import Capture
from dovetail.workers.devices.memory import captured_if_possible
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.head import FORETOLD, NOISE_SHARE, HeadDrafter
from dovetail.workers.heads.head import Head, Predicted, open_head
from dovetail.workers.models.segment import Segment
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.growth import NO_ROW
from dovetail.workers.speculation.proposal import FREE, Order, Proposal, Shape
from support.cases import everyday
from support.heads import write_head
from support.levels import levels_of
from support.models import VOCABULARY, cache_row, reference_law, reference_processed
from support.opening import opening

KEY = bytes(range(16))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SHAPE = Shape(12, 4, 4)
TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.5, top_k=20)
PENALTIES = {
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.7,
    "logit_bias": ((3, 4.0), (7, -5.0)),
    "min_tokens": 9,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": Sampling(**PENALTIES),
    "all": SAMPLED.model_copy(update=PENALTIES),
}
END = (1, 30)
CAPACITY = 60
GAIN_ERROR = 1e-4
"""The error of the logarithm of a probability, ten times what fp32 brings about."""
ROW_ERROR = {"rtol": 1e-4, "atol": 1e-4}

KINDS = ("eagle", "eagle3", "dovetail-3", "jakiro", "jakiro-star")


@pytest.fixture(scope="module")
def open_kind(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Callable[..., Head]:
    """Heads whose states stay small, however often they read their own.

    With states that grow, attention decides between scores of hundreds, and what fp32 rounds off
    differently in passes of other shapes comes out as differences of up to 0.2 in a
    log-probability, on torch's operations as on the kernels; with these it is less than 1e-5.
    """

    @cache
    def opened(name: str, backend: str = "auto") -> Head:
        file = write_head(tmp_path_factory.mktemp(name), name) / "model.safetensors"
        scales = {"fc.weight": 0.4, "W_1": 0.4}
        save_file(
            {
                name: tensor * scales[name] if name in scales else tensor
                for name, tensor in load_file(file).items()
            },
            file,
        )
        return open_head(
            str(file.parent),
            target=str(llama_folder),
            weights="fp32",
            device="cpu",
            backend=backend,
        )

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
        ahead: bool = False,
        honest: bool = False,
    ) -> None:
        """`honest`: from the first verdict on the target's features are what the head guesses."""
        self.head, self.engine, self.honest = (
            head,
            HeadDrafter(head, Spans(), contrast=contrast, capture=capture, ahead=ahead),
            honest,
        )
        if ahead:  # how long things take must not decide what grows
            self.engine._clock = lambda: 0
        self.random = torch.Generator().manual_seed(seed)
        self.log = list(PROMPT)
        self.features = self.some(len(PROMPT))
        self.session = self.engine.open(
            opening(
                1,
                PROMPT,
                capacity=capacity,
                vocabulary_size=VOCABULARY,
                key=KEY,
                sampling=sampling,
                tree=tree,
                end=END,
            )
        )

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

    def draft(
        self,
        accepted: Sequence[int] = (),
        bonus: int = 2,
        shape: Shape = SHAPE,
        deadline_ns: int | None = None,
        *,
        more: Sequence[int] = (),
        ahead: bool = False,
    ) -> Proposal:
        """A round, with the features of the last root and of all that is committed but the new
        root, from the second one on."""
        tokens = [
            *(int(self.session.tree.tokens[self.session.offered[node]]) for node in accepted),
            bonus,
            *more,
        ]
        self.commit(tokens)
        return self.engine.draft(
            self.session, accepted, bonus, shape, deadline_ns, more=more, ahead=ahead
        )

    def commit(self, tokens: Sequence[int]) -> None:
        """Put tokens behind the log, and bring their features."""
        if len(self.log) > len(PROMPT):
            new = (
                torch.cat([row.states for row in self.alone(tokens[:-1])[1]])
                if self.honest
                else self.some(len(tokens))
            )
            self.features = torch.cat((self.features, new))
            if self.honest:  # as they are, not rounded for a journey
                self.session.waiting.append(new)
            else:
                self.engine.check_features(self.session, len(tokens) - 1, to_array(new))
                self.engine.take_features(self.session, to_array(new))
        self.log += tokens

    def alone(self, path: Sequence[int]) -> tuple[Tensor, list[Predicted]]:
        """The last row of the cache [...] and what each row predicts, the root's first, from a
        plain pass over the log and one for each token of `path`."""
        count = len(self.log) - 1
        cache = self.head.new_cache(count + len(path))
        contrast = self.head.spec.contrast
        rows = torch.tensor([count - 1])
        tokens, segment = torch.tensor(self.log[1:]), Segment(cache, 0, count)
        predicted = [
            self.head.forward(
                tokens,
                self.features[:count],
                torch.arange(count),
                [segment],
                true=True,
                rows=rows,
                contrast=contrast,
            )
        ]
        cache.keep(range(count), count)
        for place, token in enumerate(path, start=count):
            segment = Segment(cache, place, 1)
            predicted.append(
                self.head.forward(
                    torch.tensor([token]),
                    predicted[-1].states,
                    torch.tensor([place]),
                    [segment],
                    true=False,
                    contrast=contrast,
                )
            )
            cache.keep([place], 1)
        return cache_row(cache, cache.length - 1), predicted

    def gain(self, path: Sequence[int], logits: Tensor) -> float:
        """The log-probability of the last token of `path` by the `logits` [V] before it, processed
        and sharpened in plain numbers."""
        session, above = self.session, path[:-1]
        sampling = session.ranking.sampling
        said = [*self.log[len(PROMPT) :], *above]
        processed = reference_processed(logits.tolist(), sampling, PROMPT, said, END)
        if sampling.temperature > 0:
            law = reference_law(processed, sampling)
            processed = [
                math.log(p) + NOISE_SHARE * gumbel(KEY, len(self.log) + len(above), v)
                if p
                else -math.inf
                for v, p in enumerate(law)
            ]
        return float(
            torch.log_softmax(torch.tensor(processed) / session.ranking.scales[0].sharpening, 0)[
                path[-1]
            ]
        )

    def check(self, shape: Shape = SHAPE, *, contrast: bool = False, step: int = 1) -> None:
        """Every node has the score, and every row that was computed the numbers, that the head by
        itself gives; looks at each `step`-th node."""
        tree, session = self.session.tree, self.session
        assert session.log == self.log
        assert session.rows == len(self.log) - 1
        torch.testing.assert_close(
            cache_row(session.cache, session.cache.length - 1), self.alone(())[0], **ROW_ERROR
        )
        for node in range(0, len(tree), step):
            path, parent = tree.path_tokens(node), int(tree.parents[node])
            row, predicted = self.alone(path)
            found = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent])
            foretold = (
                predicted[-3].contrast
                if contrast and len(path) == shape.depth > 1
                else predicted[-2].logits
            )
            assert foretold is not None
            assert found == pytest.approx(self.gain(path, foretold[0]), abs=GAIN_ERROR)
            if tree.rows[node] != NO_ROW and not (contrast and len(path) == shape.depth - 1):
                torch.testing.assert_close(
                    cache_row(session.cache, session.cache.length + int(tree.rows[node])),
                    row,
                    **ROW_ERROR,
                )


def walk(
    story: Story, seed: int, rounds: int, *, contrast: bool = False, shape: Shape = SHAPE
) -> list[int]:
    """Rounds with random verdicts, each compared with the head by itself; the deepest level of each
    that was compared."""
    deepest: list[int] = []
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
        deepest.append(
            max(len(session.tree.path_tokens(node)) for node in range(len(session.tree)))
        )
        path = proposal.tree.path(int(random.integers(len(proposal.tree))))
        accepted = path[: random.integers(len(path) + 1)]
        last = session.offered[accepted[-1]] if accepted else ROOT
        below = session.tree.tokens[session.tree.parents == last]
        bonus = (
            int(random.choice(below))
            if len(below) and random.random() < 0.7
            else int(random.integers(VOCABULARY))
        )
    return deepest


@pytest.mark.parametrize("kind", everyday(KINDS, "eagle3", "dovetail-3"))
@given(seed=st.integers(0, 1 << 32), sampling=st.sampled_from([*SAMPLINGS.values()]))
@settings(deadline=None, max_examples=2)
def test_every_node_is_what_the_head_gives_over_its_path_wherever_the_root_moves(
    open_kind: Callable[..., Head], kind: str, seed: int, sampling: Sampling
) -> None:
    assert (
        min(walk(Story(open_kind(kind), sampling=sampling, seed=seed).fed(3, 4), seed, rounds=4))
        > 1
    )


@pytest.mark.parametrize(
    ("kind", "contrast"),
    everyday(
        [("eagle", False), ("eagle3", False), ("jakiro", True), ("jakiro-star", False)],
        ("jakiro", True),
        ("eagle", False),
    ),
)
def test_levels_in_fixed_shapes_are_the_same(
    open_kind: Callable[..., Head], kind: str, contrast: bool
) -> None:
    captured = []

    def capture(function: Callable[[], Predicted]) -> Callable[[], Predicted]:
        captured.append(function)
        return function

    story = Story(
        open_kind(kind, "library"), contrast=contrast, sampling=SAMPLED, capture=capture
    ).fed()
    walk(story, 1, rounds=4, contrast=contrast)
    assert 1 <= len(captured) <= 6


def refuse(_: Callable[[], Predicted]) -> Callable[[], Predicted]:
    raise RuntimeError("it waits for the device")


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)])
@pytest.mark.parametrize("kind", ["eagle3", "jakiro"])
def test_children_ranked_behind_a_level_are_those_that_its_logits_give(
    kind: str,
    sampling: Sampling,
    open_kind: Callable[..., Head],
) -> None:
    """This holds where levels cannot be captured, too."""
    head = open_kind(kind, "library")
    for capture in (lambda function: function, captured_if_possible(refuse)):
        found, expected = (
            Story(head, contrast=head.spec.contrast, sampling=sampling, capture=how).fed()
            for how in (capture, None)
        )
        for bonus in (2, 9, 4):
            one, other = found.draft(bonus=bonus, ahead=True), expected.draft(bonus=bonus)
            assert one.tree == other.tree
            assert one.scores == pytest.approx(other.scores, abs=1e-4)


@pytest.mark.parametrize("policy", ["dynamic", "static", "beam", "budget"])
@pytest.mark.parametrize(
    "depth", [1, 3, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (2, 5))]
)
def test_the_last_level_comes_from_the_contrast_of_the_parents(
    contrasting: Head, policy: str, depth: int
) -> None:
    shape = Shape(25, depth, 4)
    tree = TreeSettings(policy=policy, gamma=25, depth=depth, width=4)
    story = Story(contrasting, contrast=True, tree=tree).fed()
    assert walk(story, depth, rounds=3, contrast=True, shape=shape) == [depth] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_levels_that_a_gpu_replays_are_what_it_computes_when_they_are_launched(
    kind: str, tmp_path: Path, llama_folder: Path
) -> None:
    device = open_device("cuda:0", 1)
    head = open_head(
        str(write_head(tmp_path, kind)),
        target=str(llama_folder),
        weights="fp16",
        device=device.name,
    )
    assert device.capture is not None
    replayed, launched = (
        Story(head, contrast=head.spec.contrast, capture=capture).fed()
        for capture in (device.capture, launched_each_time)
    )
    for bonus in range(2, 8):
        found, expected = replayed.draft(bonus=bonus), launched.draft(bonus=bonus)
        assert found.tree == expected.tree
        assert found.scores == pytest.approx(expected.scores, abs=1e-4)


def launched_each_time(function: Callable[[], Predicted]) -> Callable[[], Predicted]:
    """Return the function of a pass of fixed shape as it is: a capture that captures nothing."""
    return function


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "weights"),
    [*(("eagle3", weights) for weights in ("bf16", "int8", "int4")), *((k, "fp16") for k in KINDS)],
)
def test_levels_on_a_gpu_are_nearly_what_they_are_on_the_cpu_one_by_one(
    kind: str, weights: str, tmp_path: Path, llama_folder: Path
) -> None:
    gpu, folder = open_device("cuda:0", 1), write_head(tmp_path, kind, gain=1.0)
    expected, found = (
        levels_of(
            open_head(str(folder), target=str(llama_folder), weights=weights, device=where), how
        )
        for where, how in (("cpu", None), (gpu.name, gpu.capture))
    )
    there = expected.isfinite()
    assert torch.equal(found.isfinite(), there)
    assert float((found - expected)[there].norm() / expected[there].norm()) < 3e-2


def sharing() -> Capture:
    """Return a capture whose replays spoil what others have returned, as graphs with one memory
    do."""
    returned: list[Tensor] = []

    def capture(function: Callable[[], Predicted]) -> Callable[[], Predicted]:
        def replay() -> Predicted:
            for tensor in returned:
                tensor.fill_(float("nan"))
            found = function()
            returned[:] = [found.logits, found.states]
            return found

        return replay

    return capture


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_sessions_whose_graphs_share_memory_propose_what_each_does_alone(
    where: str, sampling: Sampling, tmp_path: Path, llama_folder: Path
) -> None:
    head = open_head(
        str(write_head(tmp_path, "eagle", gain=1.0)),
        target=str(llama_folder),
        weights="fp32",
        device=where,
        backend="library",
    )
    # a GPU's passes of other shapes round otherwise, which may decide between equals
    shared, own = (
        (sharing(), None) if where == "cpu" else (open_device(where, 1).capture, launched_each_time)
    )
    together, alone = (
        [Story(head, sampling=sampling, seed=seed, capture=how).fed() for seed in range(3)]
        for how in (shared, own)
    )
    for bonus in range(2, 6):
        for story in together:
            story.commit([bonus])
        orders = [
            Order(story.session, (), bonus, SHAPE, None, (), FREE, False) for story in together
        ]
        for place, found in together[0].engine.draft_all(orders):
            assert isinstance(found, Proposal)
            assert found.tree == alone[place].draft(bonus=bonus).tree


def test_a_last_level_that_is_foretold_saves_one_pass_of_the_head(
    contrasting: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[bool] = []
    real = contrasting.forward
    monkeypatch.setattr(
        contrasting,
        "forward",
        lambda *a, true, **k: (passes.append(true), real(*a, true=true, **k))[1],
    )
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
        (4, features[4:6], RequestError, "features from position 4 on came after 3 positions"),
        (2, features[2:5], RequestError, "features from position 2 on came after 3 positions"),
        (
            3,
            torch.cat((features[3:], features[:1])),
            RequestError,
            "features of 9 positions were received for a log of 8 tokens",
        ),
        (0, features[:3], StaleError, "were received before"),
        (
            3,
            features[3:4].float(),
            RequestError,
            rf"features of type float32 and shape \[1, {row}\]",
        ),
        (
            3,
            features[3:4, :-1],
            RequestError,
            rf"this head reads {engine.reads.dtype} in rows of {row}",
        ),
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
    with pytest.raises(
        RequestError, match="features of 0 positions have arrived, but this round needs 8"
    ):
        story.engine.check_features(story.session, 0, None)
    story.fed().engine.check_features(story.session, 0, None)
    story.draft()
    for rows in (0, 1, 3):
        with pytest.raises(
            RequestError,
            match=f"features of {8 + rows} positions have arrived, but this round needs 10",
        ) as refusal:
            story.engine.check_features(story.session, 1, to_array(story.some(rows)))
        assert refusal.value.code == "prefix"
    story.engine.check_features(story.session, 1, to_array(story.some(2)))


def test_rounds_without_a_proposal_are_caught_up_with_later(head: Head) -> None:
    story = Story(head).fed()
    for token in (7, 8, 9):
        assert len(story.draft(bonus=token, shape=Shape(0, 4, 4)).tree) == 0
    story.draft(bonus=10)
    story.check()


def test_beyond_the_length_it_was_trained_with_a_head_sees_the_last_rows_at_their_own_positions(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """The root's children are ranked as by a head whose first row is the oldest that is left; in a
    head of one block rows do not depend on others."""
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
    torch.testing.assert_close(session.states[0], predicted.states[0], **ROW_ERROR)
    for slot in range(count):
        torch.testing.assert_close(
            cache_row(session.cache, slot), cache_row(cache, slot), **ROW_ERROR
        )


def test_a_prompt_longer_than_the_window_leaves_its_last_rows(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "spec", replace(head.spec, context=9))
    story = Story(head, capacity=200).fed()
    story.draft()
    assert (session := story.session).window == 5
    assert (session.rows, session.cache.length) == (8, 5)
    check_window(story)


# -- ahead -----------------------------------------------------------------------------------------


SMALL = Shape(8, 3, 3)
SMALL_TREE = TreeSettings(policy="dynamic", gamma=8, depth=3, width=3)


def test_a_token_that_the_target_has_no_row_for_is_refused(head: Head) -> None:
    with pytest.raises(
        RequestError, match="token 48 is beyond the vocabulary of 48 of this head's target"
    ):
        HeadDrafter(head, Spans(), contrast=False).check_tokens([5, VOCABULARY])


def verdict(
    story: Story, proposal: Proposal, random: np.random.Generator
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Accepted nodes, a bonus that is mostly in the pool, and sometimes more tokens, which follow
    the pool for a while."""
    tree, path = story.session.tree, proposal.tree.path(int(random.integers(len(proposal.tree))))
    accepted = path[: random.integers(len(path) + 1)]
    node, tokens = story.session.offered[accepted[-1]] if accepted else ROOT, list[int]()
    for _ in range(1 + int(random.choice([0, 0, 1, 3]))):
        below = [] if node is None else tree.tokens[tree.parents == node]
        tokens.append(
            int(random.choice(below))
            if len(below) and random.random() < 0.8
            else int(random.integers(VOCABULARY))
        )
        node = None if node is None else tree.child(node, tokens[-1])
    return accepted, tokens[0], tuple(tokens[1:])


def rounds_ahead(story: Story, seed: int, rounds: int, after: Callable[[], None]) -> int:
    """Rounds with random verdicts and a random number of passes ahead in each; `after` each
    proposal and the passes. How many rounds began with a hit."""
    random, hits = np.random.default_rng(seed), 0
    accepted, bonus, more = (), int(random.integers(VOCABULARY)), ()
    for _ in range(rounds):
        proposal = story.draft(accepted, bonus, SMALL, more=more, ahead=True)
        proposal.tree.check(VOCABULARY)
        assert max((len(c) for c in proposal.tree.children.values()), default=0) <= SMALL.width
        hits += proposal.hit
        after()
        for _ in range(int(random.integers(5))):
            story.engine.grow_all_ahead([story.session])
        after()
        accepted, bonus, more = verdict(story, proposal, random)
    return hits


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS["all"]], ids=["greedy", "all"])
@pytest.mark.parametrize("kind", ["eagle", "dovetail-3", "jakiro"])
def test_where_all_guesses_come_true_a_tree_that_survived_is_what_the_head_gives_over_its_paths(
    open_kind: Callable[..., Head], kind: str, sampling: Sampling
) -> None:
    story = Story(
        open_kind(kind), sampling=sampling, tree=SMALL_TREE, ahead=True, honest=True
    ).fed()
    assert rounds_ahead(story, 3, 4, lambda: story.check(SMALL, step=5)) > 0


def test_in_fixed_shapes_too_what_survived_is_what_the_head_gives(
    open_kind: Callable[..., Head],
) -> None:
    story = Story(
        open_kind("eagle", "library"),
        tree=SMALL_TREE,
        ahead=True,
        honest=True,
        capture=lambda function: function,
    ).fed()
    assert rounds_ahead(story, 5, 4, lambda: story.check(SMALL, step=5)) > 0


class Followed:
    """The known rows and children of a session's nodes, by their paths from the beginning, so that
    they can be found when the root has moved."""

    def __init__(self, story: Story) -> None:
        self.story, self.moved = story, 0
        self.known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def check(self) -> None:
        """The log's rows are true, the root's children ranked by the true logits, and whatever has
        a row that it had before still has the same."""
        story, session = self.story, self.story.session
        tree, cache, count = session.tree, session.cache, len(story.log) - 1
        assert session.rows == count
        fresh, tokens = story.head.new_cache(count), torch.tensor(story.log[1:])
        story.head.forward(
            tokens,
            story.features[:count],
            torch.arange(count),
            [Segment(fresh, 0, count)],
            true=True,
            rows=torch.tensor([0]),
        )
        for slot in range(cache.length):
            torch.testing.assert_close(
                cache_row(cache, slot), cache_row(fresh, session.dropped + slot), **ROW_ERROR
            )
        logits = story.alone(())[1][0].logits[0]
        children = np.flatnonzero(tree.parents == ROOT)
        assert [float(tree.gains[n]) for n in children] == pytest.approx(
            [story.gain([int(tree.tokens[n])], logits) for n in children], abs=GAIN_ERROR
        )
        assert len(children) == SMALL.width
        for parent in {ROOT, *tree.parents.tolist()}:
            tokens = tree.tokens[tree.parents == parent].tolist()
            assert len(set(tokens)) == len(tokens)
        self._check_rows()

    def _check_rows(self) -> None:
        session = self.story.session
        tree, cache, known = session.tree, session.cache, self.known
        rows = tree.rows[tree.rows >= 0].tolist()
        assert sorted(set(rows)) == sorted(rows)
        assert max(rows, default=-1) < tree.rows_used
        self.known = {}
        for node in np.flatnonzero(tree.rows >= 0).tolist():
            path, row = (*self.story.log, *tree.path_tokens(node)), int(tree.rows[node])
            self.known[path] = (
                cache_row(cache, cache.length + row).clone(),
                session.states[1 + row].clone(),
            )
            assert tree.parents[node] == ROOT or tree.rows[tree.parents[node]] >= 0
            for found, expected in zip(self.known[path], known.get(path, ()), strict=False):
                torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
                self.moved += 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_the_log_are_true_whatever_was_guessed_and_those_of_survivors_move_with_them(
    open_kind: Callable[..., Head], kind: str
) -> None:
    moved = 0
    for seed, sampling in enumerate((GREEDY, SAMPLINGS["all"])):
        story = Story(
            open_kind(kind),
            contrast=kind == "jakiro",
            sampling=sampling,
            seed=seed,
            tree=SMALL_TREE,
            ahead=True,
        ).fed(3)
        followed = Followed(story)
        rounds_ahead(story, seed, 6, followed.check)
        moved += followed.moved
    assert moved > 20


def test_in_a_sliding_window_too(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "spec", replace(head.spec, context=17))
    story = Story(head, capacity=200, tree=SMALL_TREE, ahead=True).fed()
    session = story.session
    followed = Followed(story)
    hits, bonus = 0, 2
    for _ in range(24):
        hits += story.draft((), bonus, SMALL, ahead=True).hit
        check_window(story)
        followed._check_rows()
        for _ in range(4):
            story.engine.grow_all_ahead([session])
        followed._check_rows()
        bonus = int(session.tree.tokens[0])
    assert hits > 20
    assert session.dropped > 8
    assert followed.moved > 40


def test_what_was_foretold_is_computed_when_something_below_it_is_to_be_used(
    contrasting: Head,
) -> None:
    story = Story(contrasting, contrast=True, tree=SMALL_TREE, ahead=True).fed()
    story.draft(shape=SMALL, ahead=True)
    tree = story.session.tree
    foretold = np.flatnonzero(tree.rows == FORETOLD)
    assert len(foretold)
    offered = [tree.path_tokens(node) for node in story.session.offered]
    while story.engine.grow_all_ahead([story.session]):
        pass
    assert (tree.rows[foretold] >= 0).all()
    assert tree.levels.max() > SMALL.depth
    assert [tree.path_tokens(node) for node in story.session.offered] == offered
    row, predicted = story.alone(tree.path_tokens(int(foretold[0])))
    torch.testing.assert_close(
        cache_row(story.session.cache, story.session.cache.length + int(tree.rows[foretold[0]])),
        row,
        **ROW_ERROR,
    )
    best = [n for n in np.flatnonzero(tree.parents == foretold[0]) if tree.ranks[n] < SMALL.width]
    path = tree.path_tokens(int(foretold[0]))
    assert [float(tree.gains[n]) for n in best] == pytest.approx(
        [story.gain([*path, int(tree.tokens[n])], predicted[-1].logits[0]) for n in best],
        abs=GAIN_ERROR,
    )


@pytest.mark.parametrize("seed", range(4))
def test_orders_that_stop_to_ask_for_growth_ahead_find_no_child_twice(
    head: Head, seed: int
) -> None:
    story = Story(head, capacity=200, tree=SMALL_TREE, ahead=True).fed()
    rng, bonus, kept = np.random.default_rng(seed), 9, 0
    for _ in range(12):
        kept += len(story.session.tree) > 0
        story.draft((), bonus, SMALL, ahead=bool(rng.integers(2)))
        tree = story.session.tree
        pairs = [*zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)]
        assert len(pairs) == len({*pairs})
        while story.session.waiting_time.ahead and story.engine.grow_all_ahead([story.session]):
            pass
        bonus = int(tree.tokens[0])
    assert kept


def test_without_growth_ahead_a_tree_is_grown_anew_every_round(head: Head) -> None:
    story, fresh = Story(head).fed(), Story(head).fed()
    first, same = story.draft(), fresh.draft()
    assert first == same
    assert story.session.tree.rows_used
    second = story.draft(first.tree.path(1)[:1], int(first.tree.tokens[2]))
    assert second.grown == len(story.session.tree)


def test_a_pass_ahead_that_fails_leaves_the_tree_and_the_features_as_they_were(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise ArithmeticError

    story = Story(head, tree=SMALL_TREE, ahead=True).fed()
    story.draft(
        shape=Shape(0, 3, 3), ahead=True
    )  # nothing is drafted, and the first pass ahead is the root's
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(head, "forward", fail)
            with pytest.raises(ArithmeticError):
                story.engine.grow_all_ahead([story.session])
        story.session.waiting_time.done = False
        assert story.engine.grow_all_ahead([story.session])
    assert story.engine.grow_all_ahead([story.session])
    story.check(SMALL)
    story.draft((), int(story.session.tree.tokens[0]), SMALL, ahead=True)
    Followed(story).check()
