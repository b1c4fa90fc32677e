"""The draft that looks up what was said before: its search against a plain one, its proposals
against plain arithmetic."""

import math
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.errors import RequestError
from dovetail.protocol.lookup import CHARACTERS, LONGEST, OCCURRENCES, ODDS, SIZES, SearchedLog
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.drafters.ngram import LEAST, Lookup, LookupSession
from dovetail.workers.speculation.proposal import Price, Proposal, Shape
from support.opening import opening

SHAPE = Shape(15, 8, 4)
LOGS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def opened(
    prompt: list[int],
    *,
    sampling: Sampling | None = None,
    end: tuple[int, ...] = (),
    capacity: int = 10_000,
    sharpening: float | None = None,
    policy: str = "goodput",
) -> LookupSession:
    tree = TreeSettings(policy=policy, sharpening=sharpening or "auto")
    return Lookup().open(
        opening(
            1,
            prompt,
            capacity=capacity,
            vocabulary_size=1000,
            key=bytes(16),
            sampling=sampling or Sampling(),
            tree=tree,
            end=end,
        )
    )


def proposed(log: list[int], shape: Shape = SHAPE, **options: Any) -> Proposal:
    """Return the proposal for a log whose last token is the bonus of round 1."""
    return Lookup().draft(opened(log[:-1], **options), (), log[-1], shape)


def same_before(log: list[int], position: int) -> int:
    """Return how many tokens before `position` are the last ones of the log."""
    return next(
        (n for n in range(min(position, LONGEST)) if log[position - 1 - n] != log[-1 - n]),
        min(position, LONGEST),
    )


def searched(log: list[int]) -> list[tuple[int, int]]:
    """Return what should be found, by looking everywhere: those with the longest n-gram
    first, then the newest."""
    matches = {position: same_before(log, position) for position in range(1, len(log))}
    found: list[int] = []
    for size in SIZES:
        found += [
            p
            for p in sorted(matches, reverse=True)
            if matches[p] >= min(size, len(log)) and p not in found
        ]
    return [(p, matches[p]) for p in found[:OCCURRENCES]]


@settings(max_examples=300, deadline=None)
@given(log=LOGS)
def test_a_search_finds_what_a_look_at_every_token_finds(log: list[int]) -> None:
    grown: list[int] = []
    log_of_it = SearchedLog(grown)
    for token in log:
        grown.append(token)
        found = [(place, match) for _, place, match in log_of_it.occurrences()]
        assert found == searched(grown)


class Counted(list[int]):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += 1
        return super().__getitem__(key)


def test_a_look_up_looks_at_as_many_tokens_however_long_the_log_has_become() -> None:
    looks = []
    for length in (500, 20_000):
        log = Counted([1, 2, 3, 1, 2] * (length // 5))
        found = SearchedLog(log)
        found.occurrences()
        before = log.looks
        log.append(3)
        assert len(found.occurrences()) == OCCURRENCES
        looks.append(log.looks - before)
    assert looks[0] == looks[1] < 4 * OCCURRENCES * LONGEST


@settings(max_examples=100, deadline=None)
@given(log=LOGS.filter(lambda log: len(log) > 1))
def test_what_a_look_up_would_propose_is_known_without_asking(log: list[int]) -> None:
    proposal = proposed(log, Shape(8, 8, 1))
    chances = SearchedLog(log).chances(8, LEAST)
    assert chances == pytest.approx([math.exp(score) for score in proposal.scores])


def test_tokens_that_share_a_character_are_told_apart() -> None:
    assert SearchedLog([5, 6, 1, 5 + CHARACTERS]).occurrences() == []


def test_what_followed_the_same_tokens_before_is_proposed() -> None:
    tree = proposed([5, 6, 7, 8, 9, 10, 11, 4, 4, 5, 6, 7]).tree
    assert tree.tokens[:4] == (8, 9, 10, 11)
    assert tree.parents[:4] == (-1, 0, 1, 2)


def test_what_repeats_is_continued_beyond_the_end_of_the_log() -> None:
    tree = proposed([1, 2, 3] * 6).tree
    assert [tree.tokens[node] for node in tree.path(7)] == [1, 2, 3, 1, 2, 3, 1, 2]


def test_several_continuations_make_a_tree_and_the_more_frequent_comes_first() -> None:
    log = [5, 6, 7, 0, 5, 6, 8, 1, 5, 6, 8, 2, 5, 6]
    proposal = proposed(log)
    children = proposal.tree.children[ROOT]
    assert list(children)[:2] == [8, 7]
    assert children[8] == 0
    below = proposal.tree.children.get(children[8], {})
    assert {2, 1} & set(below)


def test_of_equal_votes_the_newest_comes_first() -> None:
    tree = proposed([5, 6, 7, 0, 5, 6, 8, 1, 5, 6]).tree
    assert list(tree.children[ROOT]) == [8, 7]


def test_a_longer_match_outweighs_a_newer_one() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 7, 9, 9, 0, 6, 8, 1, 2, 3, 4, 5, 6]).tree.tokens[0] == 7


def test_scores_are_the_logarithms_of_the_votes_shares() -> None:
    """Two matches of two tokens and one of one token; a level deeper each is one longer."""
    proposal = proposed([5, 6, 7, 0, 5, 6, 8, 1, 9, 6, 8, 2, 5, 6])
    total = 1 + 2 * ODDS[2] + ODDS[1]
    eight, seven = math.log((ODDS[2] + ODDS[1]) / total), math.log(ODDS[2] / total)
    children = proposal.tree.children[ROOT]
    assert proposal.scores[children[8]] == pytest.approx(eight)
    assert proposal.scores[children[7]] == pytest.approx(seven)
    one = proposal.tree.children[children[8]][1]
    assert proposal.scores[one] == pytest.approx(
        eight + math.log(ODDS[3] / (1 + ODDS[3] + ODDS[2]))
    )


def test_sharpening_divides_the_logits() -> None:
    log = [5, 6, 7, 0, 1, 5, 6]
    vote = math.exp(math.log(ODDS[2]) / 0.5)
    assert proposed(log, sharpening=0.5).scores[0] == pytest.approx(math.log(vote / (1 + vote)))
    for extreme in (1e-300, 5e-324, 100.0):
        assert all(math.isfinite(score) for score in proposed(log, sharpening=extreme).scores)


def test_where_nothing_was_said_before_nothing_is_proposed() -> None:
    assert proposed([1, 2, 3, 4]) == Proposal(TokenTree(), (), 0, False)
    assert proposed([1, 2]).tree == TokenTree()


@settings(max_examples=150, deadline=None)
@given(
    log=st.lists(st.integers(0, 5), min_size=2, max_size=50),
    nodes=st.integers(0, 20),
    depth=st.integers(1, 9),
    width=st.integers(1, 5),
)
def test_an_order_bounds_nodes_depth_and_width_and_every_prefix_is_a_tree(
    log: list[int], nodes: int, depth: int, width: int
) -> None:
    proposal = proposed(log, Shape(nodes, depth, width), policy="dynamic")
    tree = proposal.tree.check(1000)
    assert len(tree) <= min(nodes, proposal.grown)
    assert max(tree.depths, default=0) <= depth
    assert max((len(children) for children in tree.children.values()), default=0) <= width
    assert list(proposal.scores) == sorted(proposal.scores, reverse=True)
    assert all(math.log(LEAST) <= score <= 0.0 for score in proposal.scores)


@settings(max_examples=60, deadline=None)
@given(log=st.lists(st.integers(0, 3), min_size=3, max_size=40), data=st.data())
def test_a_session_that_grew_round_by_round_proposes_what_a_fresh_one_with_its_odds_does(
    log: list[int], data: st.DataObject
) -> None:
    engine, session, accepted = Lookup(), opened(log), ()
    for _ in range(5):
        bonus = data.draw(st.integers(0, 3))
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        fresh = opened(session.log[:-1])
        fresh.searched.odds = deepcopy(session.searched.odds)
        assert proposal == engine.draft(fresh, (), bonus, SHAPE)
        accepted = proposal.tree.path(data.draw(st.integers(-1, len(proposal.tree) - 1)))


def test_near_the_end_of_the_sequence_no_level_is_drafted_that_it_has_no_place_for() -> None:
    engine, prompt = Lookup(), [1, 2, 3] * 4
    session = opened(prompt, capacity=len(prompt) + 5)
    depths = [
        max(engine.draft(session, (), token, SHAPE).tree.depths, default=0)
        for token in (1, 2, 3, 1, 2)
    ]
    assert depths == [3, 2, 1, 0, 0]


def test_what_is_found_after_the_deadline_is_left_out() -> None:
    ticks = iter(range(100))
    engine = Lookup(clock=lambda: next(ticks))
    assert len(engine.draft(opened([1, 2, 3] * 6), (), 1, SHAPE, 2).tree) == 2


def test_tokens_that_were_committed_without_a_draft_are_indexed_too() -> None:
    session = opened([1, 2, 3, 4])
    engine = Lookup()
    engine.draft(session, (), 1, SHAPE)
    proposal = engine.draft(session, (), 9, SHAPE, more=(9, 5, 1, 2))
    assert session.log == [1, 2, 3, 4, 1, 9, 9, 5, 1, 2]
    fresh = opened(session.log[:-1])
    fresh.searched.odds = deepcopy(session.searched.odds)
    assert proposal == engine.draft(fresh, (), session.log[-1], SHAPE)
    assert not engine.grow_all_ahead([session])


def test_what_is_less_likely_than_the_floor_is_not_offered_and_a_price_makes_it_the_only_bound() -> (  # noqa: E501
    None
):
    log = [5, 6, 7, 0, 5, 6, 8, 1, 5, 6, 8, 2, 5, 6]
    sizes = []
    for price in (
        Price(0.0, 0.0),
        Price(0.0, 0.02),
        Price(),
        Price(None, 0.02),
        Price(0.0, 0.2),
        Price(None, 0.2),
    ):
        proposal = Lookup().draft(opened(log[:-1]), (), log[-1], Shape(200, 12, 9), price=price)
        least = max(price.floor, LEAST if price.rate is None else 1e-4)
        assert all(score >= math.log(least) for score in proposal.scores)
        sizes.append(len(proposal.tree))
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3] > sizes[4] == sizes[5] > 0


# -- processors ------------------------------------------------------------------------------------


def test_a_token_that_is_biased_away_is_not_proposed_and_one_that_is_wanted_comes_first() -> None:
    log = [5, 6, 7, 0, 5, 6, 8, 1, 5, 6]
    assert 8 not in proposed(log, sampling=Sampling(logit_bias=((8, -100.0),))).tree.tokens
    assert proposed(log, sampling=Sampling(logit_bias=((7, 2.0),))).tree.tokens[0] == 7


def test_what_the_reply_has_said_on_the_path_is_penalised() -> None:
    log = [1, 2, 3] * 6
    deepest = [
        max(proposed(log, sampling=Sampling(frequency_penalty=f)).tree.depths, default=0)
        for f in (0.0, 2.0)
    ]
    assert deepest[1] < deepest[0]


def test_an_end_is_not_proposed_too_early_and_nothing_follows_it() -> None:
    log = [5, 6, 1, 9, 9, 5, 6]
    early = proposed(log, end=(1,), sampling=Sampling(min_tokens=4))
    assert 1 not in early.tree.tokens
    at_last = proposed(log, end=(1,)).tree
    assert at_last.tokens == (1,)


def test_a_prompt_beyond_the_targets_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="token 1000, beyond the target's vocabulary of 1000"):
        opened([3, 1000])


# -- the worker ------------------------------------------------------------------------------------


def test_a_worker_of_this_kind_never_imports_torch() -> None:
    """Nor numpy and transformers: it starts at once and is small."""
    code = """
import sys
from dovetail.protocol.messages import Close, Draft, Open
from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.workers.drafters.registry import open_draft_worker
import dovetail.workers.loop
worker = open_draft_worker(DraftSettings(kind="ngram"), name="draft", threads=1, target="")
hello = worker.hello(1)
assert (hello.vocabulary, hello.tokenizer, hello.fingerprint) == (None, None, None)
opening = dict(key=bytes(16), prompt=(1, 2, 3, 1, 2), capacity=40, vocabulary_size=10, sampling=Sampling(min_tokens=2), tree=TreeSettings())
worker.handle(Open(epoch=1, session=1, **opening))
[drafted] = worker.handle(Draft(epoch=1, session=1, round=1, prefix=6, accepted=(), bonus=3, max_nodes=8, max_depth=4, max_width=2))
assert drafted.tokens[:3] == (1, 2, 3)
assert worker.idle() is False
worker.handle(Close(epoch=1, session=1))
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "imported"
"""  # noqa: E501
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
