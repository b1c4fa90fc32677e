"""The guesses of a look-up in the tree of a model or head: against plain passes and a plain search,
wherever the root moves."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.lookup import CLASSES, LONGEST, OCCURRENCES, SIZES
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.model import Drafter, DraftSession
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Segment
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.growth import NO_ROW
from dovetail.workers.speculation.proposal import Price, Shape
from support.heads import write_head
from support.models import VOCABULARY, cache_row, reference_logits
from support.opening import opening

SHAPE = Shape(12, 4, 4)
TREE = TreeSettings(gamma=12, depth=4, width=4)
PHRASE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
MS = 1_000_000


def opened(engine: Drafter, prompt: Sequence[int], **options: object) -> DraftSession:
    fields = {"sampling": Sampling(), "tree": TREE, "end": (), **options}
    return engine.open(
        opening(1, prompt, capacity=150, vocabulary_size=VOCABULARY, key=bytes(16), **fields)
    )


def voted(session: DraftSession, path: Sequence[int]) -> dict[int, tuple[float, int]]:
    """The probability that a plain search in log and `path` gives each next token, and the class of
    its longest match."""
    assert session.looked_up is not None
    log, odds = session.log, session.looked_up.searched.odds[True]
    found = []
    for place in range(1, len(log)):
        same = 0
        while same < min(place, LONGEST) and log[place - 1 - same] == log[-1 - same]:
            same += 1
        size = next((size for size in SIZES if same >= size), 0)
        found += [(-size, -place, same)] if size else []
    text = [*log, *path]
    votes: dict[int, float] = {}
    kinds: dict[int, int] = {}
    for _, place, same in sorted(found)[:OCCURRENCES]:
        if text[-place : -place + len(path)] == [*path]:
            token, kind = text[-place + len(path)], CLASSES[min(same + len(path), LONGEST)]
            votes[token] = votes.get(token, 0.0) + odds[kind]
            kinds[token] = max(kinds.get(token, 0), kind)
    total = 1.0 + sum(votes.values())
    return {token: (vote / total, kinds[token]) for token, vote in votes.items()}


def check(folder: Path, engine: Drafter, session: DraftSession) -> int:
    """Every node has the probability that a plain pass, a plain search or both give, every row
    equals that of a plain pass; return the number of nodes that were only guessed."""
    tree, only = session.tree, 0
    behind = cache(lambda path: reference_logits(folder, [*session.log, *path])[-1])
    for node in range(len(tree)):
        path = tree.path_tokens(node)
        parent, token = int(tree.parents[node]), path[-1]
        law = torch.softmax(behind((*path[:-1],)) / session.ranking.scales[0].sharpening, 0)
        own = float(law[token]) if tree.gains[node] > -np.inf else 0.0
        expected = own
        if tree.guessed[node] > -np.inf:
            guess, kind = voted(session, path[:-1])[token]
            assert math.exp(tree.guessed[node]) == pytest.approx(guess, abs=1e-4)
            share = engine.trust.by_kind[kind] if tree.is_expanded(parent) else 1.0
            expected += share * max(guess - own, 0.0)
        found = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent])
        assert math.exp(found) == pytest.approx(expected, abs=1e-3)
        only += own == 0.0
        if tree.rows[node] != NO_ROW:
            every = torch.tensor([*session.log, *path])
            plain = engine.model.new_cache(len(every))
            engine.model.forward(every, torch.arange(len(every)), [Segment(plain, 0, len(every))])
            row = session.cache.length + int(tree.rows[node])
            kept, computed = cache_row(session.cache, row), cache_row(plain, len(every) - 1)
            torch.testing.assert_close(kept, computed, rtol=1e-3, atol=1e-4)
    return only


@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=2)
def test_every_node_has_what_a_plain_pass_and_a_plain_search_give_wherever_the_root_moves(
    llama: LanguageModel, llama_folder: Path, seed: int
) -> None:
    random, only = np.random.default_rng(seed), 0
    engine = Drafter(llama, Spans(), merges=True)
    session = opened(engine, [*PHRASE, *PHRASE[: int(random.integers(2, 9))]])
    accepted: tuple[int, ...] = ()
    bonus = PHRASE[len(session.log) - len(PHRASE)]
    for _ in range(5):
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        proposal.tree.check(VOCABULARY)
        only += check(llama_folder, engine, session)
        path = proposal.tree.path(int(random.integers(len(proposal.tree))))
        accepted = path[: random.integers(len(path) + 1)]
        last = session.offered[accepted[-1]] if accepted else ROOT
        below = session.tree.tokens[session.tree.parents == last]
        bonus = int(random.choice(below) if len(below) else random.integers(VOCABULARY))
    assert only


def test_where_many_tokens_match_the_model_makes_no_pass_and_catches_up_later(
    llama: LanguageModel,
) -> None:
    """A pass takes a millisecond, which is worth half a token."""
    ticks = count(step=MS)
    engine = Drafter(llama, Spans(), merges=True, clock=lambda: next(ticks))
    price = Price(500.0, 0.05)
    session = opened(engine, [20, 21, *PHRASE, 22, 23, *PHRASE[:8]])
    engine.draft(session, (), 30, SHAPE)  # a pass is measured
    session = opened(engine, [20, 21, *PHRASE, 22, 23, *PHRASE[:9]])
    proposal = engine.draft(session, (), PHRASE[9], SHAPE, price=price)
    assert not proposal.passes
    assert proposal.tree.tokens[:2] == (*PHRASE[10:],)
    later = engine.draft(session, (0, 1), 40, SHAPE)
    fresh = opened(engine, session.log[:-1])
    assert later.passes
    assert later.tree == engine.draft(fresh, (), 40, SHAPE).tree


def test_a_path_that_was_found_may_be_longer_than_the_models_levels(llama: LanguageModel) -> None:
    engine = Drafter(llama, Spans(), merges=True)
    session = opened(engine, [*range(2, 46), *range(2, 22)])
    tree = engine.draft(session, (), 22, SHAPE, price=Price(0.0, 1.0 - 1e-6)).tree
    assert len(tree) == 0
    tree = engine.draft(session, (), 23, SHAPE, price=Price(0.0, 0.5)).tree
    assert tree.tokens == tuple(range(24, 36))
    assert max(tree.depths) > SHAPE.depth


@pytest.mark.parametrize(
    "tree",
    [TREE.model_copy(update={"policy": policy}) for policy in ("dynamic", "static", "beam")],
    ids=lambda tree: tree.policy,
)
def test_policies_of_papers_get_no_guesses(llama: LanguageModel, tree: TreeSettings) -> None:
    prompt, token = [*PHRASE, *PHRASE[:6]], PHRASE[6]
    both = [
        engine.draft(opened(engine, prompt, tree=tree), (), token, SHAPE)
        for engine in (Drafter(llama, Spans(), merges=merges) for merges in (False, True))
    ]
    assert both[0].tree == both[1].tree


def test_a_choice_that_the_look_up_alone_had_raises_the_trust_in_such_matches(
    llama: LanguageModel,
) -> None:
    trusts = []
    for bonus in (PHRASE[7], 47):  # what had followed before, and another token
        engine = Drafter(llama, Spans(), merges=True)
        session = opened(engine, [*PHRASE, *PHRASE[:6]])
        engine.draft(session, (), PHRASE[6], SHAPE)
        engine.draft(session, (), bonus, SHAPE)
        trusts.append(engine.trust.by_kind[7])
    assert trusts[0] > trusts[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "jakiro"])
def test_a_head_proposes_after_rounds_of_guesses_what_it_would_have_proposed_anyway(
    llama_folder: Path, tmp_path: Path, kind: str
) -> None:
    folder = str(write_head(tmp_path, kind))
    head = open_head(folder, target=str(llama_folder), weights="fp32", device="cpu")
    ticks = count(step=MS)
    engines = [
        HeadDrafter(
            head,
            Spans(),
            contrast=head.spec.contrast,
            merges=merges,
            clock=lambda: next(ticks),
        )
        for merges in (True, False)
    ]
    prompt = [*PHRASE, *PHRASE[:5]]
    random = torch.Generator().manual_seed(1)
    row = torch.randn(len(prompt) + 20, engines[0].reads.row, generator=random)
    half = row.to(TYPES[engines[0].reads.dtype])
    left_out, trees = [], []
    for engine in engines:
        session = engine.open(
            opening(
                1,
                prompt,
                capacity=100,
                vocabulary_size=VOCABULARY,
                key=bytes(16),
                sampling=Sampling(),
                tree=TREE,
                end=(),
            )
        )
        engine.feed(session, 0, to_array(half[: len(prompt)]))
        price = Price(1e6, 0.01)
        engine.draft(session, (), PHRASE[5], SHAPE)  # a pass is measured
        for place in range(6, 12):
            engine.take_features(session, to_array(half[len(session.log) - 1 :][:1]))
            left_out.append(not engine.draft(session, (), PHRASE[place], SHAPE, price=price).passes)
        engine.take_features(session, to_array(half[len(session.log) - 1 :][:1]))
        trees.append(engine.draft(session, (), 46, SHAPE).tree)
    assert any(left_out)
    assert trees[0] == trees[1]
    assert len(trees[0])
