"""A session that goes on from what is left of another is, byte for byte, the one that would have
been opened anew."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    AHEAD,
    Close,
    Closed,
    Draft,
    Drafted,
    Event,
    Feed,
    Open,
    Opened,
    Prefilled,
    Reads,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices.base import Capture
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.head_session import HeadLeft, HeadSession
from dovetail.workers.drafters.model import Drafter, DraftLeft, DraftSession
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.head import Head, open_head
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.sessions.prefix_cache import MEMORY_SHARE, KeptSessions, affordable_tokens
from dovetail.workers.sessions.results import First, Part, Verdict
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.target import TargetWorker
from dovetail.workers.verifier import Verifier
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import CONTEXT, VOCABULARY, cache_row
from support.opening import opening as order

TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4)
SHAPE = Shape(12, 4, 4)
GREEDY, WARM = Sampling(), Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.2)
END = (1,)
READS = Reads(taps=(0, 1), width=64, dtype="bfloat16", vocabulary_size=VOCABULARY)
PROMPT = (0, 3, 17, 9, 30, 8)
KEPT = 4000


@dataclass(frozen=True)
class OnlyLog(DraftLeft):
    """A kept session that has its log and no rows."""

    cache: Any = None

    def branch(self, kept: int) -> "OnlyLog":
        return OnlyLog(list(self.log[:kept]))


def test_beyond_its_limit_the_oldest_are_forgotten() -> None:
    held: KeptSessions[OnlyLog] = KeptSessions(10)
    for number, length in ((1, 4), (2, 3), (3, 3), (4, 4)):
        held.add(number, OnlyLog([7] * length))
    assert [number in held for number in (1, 2, 3, 4)] == [False, True, True, True]
    assert [held.takes(10), held.takes(11)] == [True, False]


@pytest.mark.parametrize(
    ("number", "prompt", "kept", "words"),
    [
        (9, (5, 6, 7, 1), 2, "session 9, which is not kept here"),
        (None, (5, 6, 7, 1), 2, "no session"),
        (1, (5, 6, 7, 1), 4, "a prompt of 4"),
        (1, (5, 6, 7, 1), 5, "a prompt of 4"),
        (1, (5, 6, 7, 8, 9), 4, "rows of 3"),
        (1, (5, 6, 1, 1), 3, "begins differently"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_and_stays(
    number: int | None, prompt: tuple[int, ...], kept: int, words: str
) -> None:
    held: KeptSessions[OnlyLog] = KeptSessions(10)
    held.add(1, OnlyLog([5, 6, 7]))
    with pytest.raises(RequestError, match=words) as refusal:
        held.base(order(2, prompt, base=number, kept=kept))
    assert refusal.value.code == "prefix"
    left = held.base(order(2, (5, 6, 1), base=1, kept=2))
    assert left is not None
    assert (list(left.log), 1 in held, held.base(order(3, (5,)))) == ([5, 6, 7], False, None)


def test_a_base_that_is_shared_stays() -> None:
    held: KeptSessions[OnlyLog] = KeptSessions(10)
    held.add(1, OnlyLog([5, 6, 7]))
    for number in (2, 3):
        left = held.base(order(number, (5, 6, 1), base=1, kept=2, shared=True))
        assert left is not None
        assert (left.log, 1 in held) == ([5, 6], True)
    running = OnlyLog([5, 6, 7, 8, 9])
    left = held.base(order(4, (5, 6, 7, 8, 1), base=8, kept=4, shared=True), running)
    assert left is not None
    assert left.log == [5, 6, 7, 8]
    with pytest.raises(RequestError, match="not kept here"):
        held.base(order(4, (5, 6, 7, 8, 1), base=8, kept=4), running)


def test_a_share_of_the_free_memory_is_promised() -> None:
    assert affordable_tokens(MEMORY_SHARE * 1000, 10) == 100


@dataclass
class Turn:
    """The results of a session of a target."""

    log: list[int]
    numbers: list[Any]
    """Tokens, margins and log-probabilities, in the order of rounds."""
    features: torch.Tensor
    """Features of the positions from the first that was read on."""


def turn(
    verifier: Verifier,
    number: int,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    capacity: int = CONTEXT,
    base: int | None = None,
    kept: int = 0,
) -> Turn:
    """A session of a few rounds over random trees, which are the same for the same seed."""
    rng, key = random.Random(seed), session_key(seed, 0, prompt)
    *parts, first = verifier.open(
        order(
            number,
            prompt,
            key=key,
            capacity=capacity,
            sampling=sampling,
            tree=TREE,
            end=END,
            features=READS,
            base=base,
            kept=kept,
            logprobs=3,
        )
    )
    assert isinstance(first, First)
    assert all(isinstance(part, Part) for part in parts)
    assert parts[0].start == kept
    log, numbers, features = (
        [*prompt, first.token],
        [(first.token, first.margin, first.logprobs)],
        [part.features for part in parts],
    )
    for round_ in range(1, 5):
        if len(log) > capacity:
            break
        width, depth = rng.randint(0, 3), rng.randint(1, 3)
        levels = [
            [*dict.fromkeys(rng.randrange(VOCABULARY) for _ in range(width))]
            for _ in range(depth if width else 0)
        ]
        tokens = tuple(token for level in levels for token in level)
        above = [-1, *(sum(map(len, levels[:i])) for i in range(len(levels)))]
        tree = TokenTree(
            tokens,
            tuple(parent for level, parent in zip(levels, above, strict=False) for _ in level),
        )
        item = VerifyItem(
            session=number, round=round_, prefix=len(log), tokens=tree.tokens, parents=tree.parents
        )
        verifier.check(item)
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        assert verdict.features is not None
        log += [*(tree.tokens[node] for node in verdict.item.accepted), verdict.item.bonus]
        numbers.append(verdict.item)
        features.append(verdict.features)
    return Turn(log, numbers, torch.cat(features))


def rows_of(verifier: Verifier, number: int) -> torch.Tensor:
    cache = verifier._sessions[number].cache
    return torch.stack([cache_row(cache, slot) for slot in range(cache.length)])


def next_prompt(log: Sequence[int], kept: int, more: int, rng: random.Random) -> tuple[int, ...]:
    """Goes on from the first `kept` tokens of a log, along it or not."""
    behind = (
        log[kept : kept + more]
        if rng.random() < 0.5
        else [rng.randrange(VOCABULARY) for _ in range(more)]
    )
    return (*log[:kept], *(behind or [5]))


@needs_kernels
@given(
    seed=st.integers(0, 1 << 32),
    sampling=st.sampled_from([GREEDY, WARM]),
    cut=st.sampled_from(["one", "all", "some", "prompt", "none"]),
    halved=st.booleans(),
)
@settings(deadline=None, max_examples=12)
def test_a_conversation_of_a_target_that_keeps_its_rows_is_the_same_bytes(
    llama: LanguageModel,
    halved_llama: LanguageModel,
    seed: int,
    sampling: Sampling,
    cut: str,
    halved: bool,
) -> None:
    rng, model = random.Random(seed), halved_llama if halved else llama
    keeping, anew = Verifier(model, Spans(), kept_tokens=KEPT), Verifier(model, Spans())
    prompt, base, kept = (
        tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 30))),
        None,
        0,
    )
    for number in range(1, 4):
        capacity = rng.choice([len(prompt) + 1, len(prompt) + 9, CONTEXT])
        found = turn(
            keeping, number, prompt, sampling, seed=seed, capacity=capacity, base=base, kept=kept
        )
        expected = turn(anew, number, prompt, sampling, seed=seed, capacity=capacity)
        assert (found.log, found.numbers) == (expected.log, expected.numbers)
        assert torch.equal(found.features, expected.features[kept:])
        assert torch.equal(rows_of(keeping, number), rows_of(anew, number))
        assert (len(keeping), len(keeping.kept)) == (1, 0)
        keeping.close(number, keep=True)
        assert (len(keeping), len(keeping.kept)) == (0, 1)
        most = min(len(found.log) - 1, CONTEXT - 10)
        kept = {
            "one": 1,
            "all": most,
            "some": rng.randint(1, most),
            "prompt": min(len(prompt) - 1, most),
            "none": 0,
        }[cut]
        prompt, base = next_prompt(found.log, kept, rng.randint(1, 4), rng), number


@needs_kernels
@pytest.mark.parametrize(
    ("base", "kept", "prompt"),
    [(9, 2, PROMPT), (None, 2, PROMPT), (1, 6, PROMPT), (1, 20, (0,) * 30), (1, 3, (0, 3, 16, 9))],
)
def test_a_base_that_is_unknown_or_other_than_the_prompt_is_refused_and_nothing_changes(
    llama: LanguageModel, base: int | None, kept: int, prompt: tuple[int, ...]
) -> None:
    keeping, anew = Verifier(llama, Spans(), kept_tokens=KEPT), Verifier(llama, Spans())
    log = turn(keeping, 1, PROMPT, GREEDY, seed=1).log
    keeping.close(1, keep=True)
    with pytest.raises(RequestError) as refusal:
        turn(keeping, 2, prompt, GREEDY, seed=2, base=base, kept=kept)
    assert refusal.value.code == "prefix"
    assert (len(keeping), len(keeping.kept)) == (0, 1)
    found, expected = (
        turn(keeping, 2, log, GREEDY, seed=2, base=1, kept=len(log) - 1),
        turn(anew, 2, log, GREEDY, seed=2),
    )
    assert (found.log, found.numbers) == (expected.log, expected.numbers)


@needs_kernels
def test_a_log_that_is_prefilled_ahead_keeps_the_memory_for_the_session_that_moves_here(
    halved_llama: LanguageModel,
) -> None:
    verifier, sizes = Verifier(halved_llama, Spans(), kept_tokens=KEPT), {"capacity": CONTEXT}
    [*verifier.open(order(1, PROMPT, key=AHEAD, sampling=GREEDY, tree=TREE, **sizes))]
    (rows,) = (session.cache.values.data_ptr() for session in verifier._sessions.values())  # type: ignore[attr-defined]
    verifier.close(1, keep=True)
    turn(verifier, 2, (*PROMPT, 5), GREEDY, seed=2, base=1, kept=len(PROMPT))
    assert verifier._sessions[2].cache.values.data_ptr() == rows  # type: ignore[attr-defined]


def test_what_is_closed_without_being_kept_is_gone(llama: LanguageModel) -> None:
    verifier = Verifier(llama, Spans(), kept_tokens=KEPT)
    for number in (1, 2, 3):
        turn(verifier, number, PROMPT, GREEDY, seed=number)
        verifier.close(number, keep=number != 3)
    verifier.close(2, keep=True)
    assert (len(verifier), len(verifier.kept)) == (0, 2)
    verifier.close(1)
    verifier.close(2)
    verifier.close(3, keep=True)
    assert (len(verifier), len(verifier.kept)) == (0, 0)


def test_a_session_longer_than_all_that_may_be_kept_is_forgotten_alone(
    llama: LanguageModel,
) -> None:
    verifier = Verifier(llama, Spans(), kept_tokens=25)
    for number, prompt in ((1, PROMPT), (2, PROMPT * 5)):
        turn(verifier, number, prompt, GREEDY, seed=1)
        verifier.close(number, keep=True)
    assert (1 in verifier, 2 in verifier) == (True, False)


def open_draft(
    engine: Drafter,
    prompt: Sequence[int],
    sampling: Sampling,
    capacity: int,
    base: DraftLeft | None = None,
    kept: int = 0,
) -> DraftSession:
    key = session_key(1, 0, prompt)
    return engine.open(
        order(
            1,
            prompt,
            capacity=capacity,
            vocabulary_size=VOCABULARY,
            key=key,
            sampling=sampling,
            tree=TREE,
            end=END,
            kept=kept,
        ),
        base=base,
    )


def rounds(
    draft: Callable[[tuple[int, ...], int], Proposal], seed: int, count: int
) -> list[Proposal]:
    """Proposals with random verdicts, the same for the same proposals."""
    rng, proposals = random.Random(seed), list[Proposal]()
    accepted: tuple[int, ...] = ()
    for _ in range(count):
        proposal = draft(accepted, rng.randrange(VOCABULARY))
        tree = proposal.tree
        path = tree.path(rng.randrange(len(tree))) if len(tree) else ()
        accepted = path[: rng.randint(0, len(path))]
        proposals.append(replace(proposal, passes=()))
    return proposals


@given(
    seed=st.integers(0, 1 << 32),
    sampling=st.sampled_from([GREEDY, WARM]),
    cut=st.sampled_from(["one", "all", "some", "prompt", "none"]),
)
@settings(deadline=None, max_examples=8)
def test_a_draft_that_keeps_its_rows_proposes_what_it_would_have(
    llama: LanguageModel, seed: int, sampling: Sampling, cut: str
) -> None:
    rng, engine = random.Random(seed), Drafter(llama, Spans())
    prompt: tuple[int, ...] = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20)))
    base, kept = None, 0
    for _ in range(3):
        capacity = rng.choice([len(prompt) + 2, len(prompt) + 9, CONTEXT, 2 * CONTEXT])
        sessions = (
            open_draft(engine, prompt, sampling, capacity, base, kept),
            open_draft(engine, prompt, sampling, capacity),
        )
        found, expected = (
            rounds(
                lambda accepted, bonus, session=session: engine.draft(
                    session, accepted, bonus, SHAPE
                ),
                seed,
                4,
            )  # type: ignore[misc]
            for session in sessions
        )
        assert [proposal.tree for proposal in found] == [proposal.tree for proposal in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-3)
        log, rows = sessions[0].log, sessions[0].cache.length
        base = engine.keep(sessions[0])
        assert (base.cache.capacity, base.cache.length) == (rows, rows)
        kept = {
            "one": 1,
            "all": len(log),
            "some": rng.randint(1, len(log)),
            "prompt": len(prompt) - 1,
            "none": 0,
        }[cut]
        prompt = next_prompt(log, kept, rng.randint(1, 4), rng)


def test_rows_that_a_draft_had_not_computed_are_computed_by_the_next_session(
    llama: LanguageModel,
) -> None:
    engine = Drafter(llama, Spans())
    session = open_draft(engine, PROMPT, GREEDY, CONTEXT)
    for token in (7, 8, 9):
        engine.draft(session, (), token, Shape(0, 4, 4))
    left = engine.keep(session)
    assert left.cache.length == len(PROMPT)
    prompt = (*PROMPT, 7, 8, 9, 10)
    left.check(prompt, 9)
    found, expected = (
        open_draft(engine, prompt, GREEDY, CONTEXT, left, 9),
        open_draft(engine, prompt, GREEDY, CONTEXT),
    )
    assert engine.draft(found, (), 2, SHAPE).tree == engine.draft(expected, (), 2, SHAPE).tree


@pytest.fixture(scope="module")
def open_kind(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Callable[..., Head]:
    @cache
    def opened(name: str, backend: str = "auto") -> Head:
        folder = write_head(tmp_path_factory.mktemp(name), name, gain=1.0)
        return open_head(
            str(folder), target=str(llama_folder), weights="fp32", device="cpu", backend=backend
        )

    return opened


def head_engine(head: Head, capture: Capture | None = None) -> HeadDrafter:
    return HeadDrafter(head, Spans(), contrast=False, capture=capture)


class Read:
    """A session of a head, and how far its target's features have come; those of a position are the
    same in every session."""

    def __init__(
        self,
        engine: HeadDrafter,
        prompt: Sequence[int],
        capacity: int,
        base: HeadLeft | None = None,
        kept: int = 0,
    ) -> None:
        self.engine, reads = engine, engine.reads
        self.features = torch.randn(400, reads.row, generator=torch.Generator().manual_seed(3)).to(
            TYPES[reads.dtype]
        )
        if base is not None:
            base.check(prompt, kept)
        key = session_key(1, 0, prompt)
        self.session: HeadSession = engine.open(
            order(
                1,
                prompt,
                capacity=capacity,
                vocabulary_size=VOCABULARY,
                key=key,
                sampling=GREEDY,
                tree=TREE,
                end=END,
                kept=kept,
            ),
            base=base,
        )
        assert self.session.fed == kept
        middle = (kept + len(prompt)) // 2
        for start, stop in ((kept, middle), (middle, len(prompt))):
            if start < stop:
                engine.feed(self.session, start, to_array(self.features[start:stop]))
        self.round = 0

    def draft(self, accepted: tuple[int, ...], bonus: int) -> Proposal:
        session = self.session
        if self.round:
            self.engine.take_features(
                session, to_array(self.features[session.fed : session.fed + 1 + len(accepted)])
            )
        self.round += 1
        return self.engine.draft(session, accepted, bonus, SHAPE)


def check_the_same(found: Read, expected: Read, seed: int, count: int = 4) -> None:
    """Both propose the same, and hold the same rows."""
    left, right = rounds(found.draft, seed, count), rounds(expected.draft, seed, count)
    assert [proposal.tree for proposal in left] == [proposal.tree for proposal in right]
    for one, other in zip(left, right, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-3)
    mine, theirs = found.session, expected.session
    assert (mine.log, mine.rows, mine.fed, mine.dropped) == (
        theirs.log,
        theirs.rows,
        theirs.fed,
        theirs.dropped,
    )
    for slot in range(mine.cache.length):
        torch.testing.assert_close(
            cache_row(mine.cache, slot), cache_row(theirs.cache, slot), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    ("kind", "fixed"),
    [
        ("eagle", False),
        ("eagle3", False),
        ("dovetail-3", False),
        ("jakiro-star", False),
        ("eagle", True),
    ],
)
@given(seed=st.integers(0, 1 << 32), cut=st.sampled_from(["one", "all", "some", "prompt", "none"]))
@settings(deadline=None, max_examples=3)
def test_a_head_that_keeps_its_rows_proposes_what_it_would_have(
    open_kind: Callable[..., Head], kind: str, fixed: bool, seed: int, cut: str
) -> None:
    rng = random.Random(seed)
    engine = head_engine(
        open_kind(kind, "library") if fixed else open_kind(kind),
        capture=(lambda function: function) if fixed else None,
    )
    prompt: tuple[int, ...] = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20)))
    base, kept = None, 0
    for _ in range(3):
        capacity = rng.choice([len(prompt) + 2, len(prompt) + 9, 90])
        found, expected = Read(engine, prompt, capacity, base, kept), Read(engine, prompt, capacity)
        check_the_same(found, expected, seed)
        log, fed = found.session.log, found.session.fed
        base = engine.keep(found.session)
        kept = {
            "one": 1,
            "all": fed,
            "some": rng.randint(1, fed),
            "prompt": len(prompt) - 1,
            "none": 0,
        }[cut]
        prompt = (*log[: kept + 1], *(rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))))


@pytest.mark.parametrize("fixed", [False, True], ids=["free", "fixed"])
def test_a_head_goes_on_in_a_cache_that_is_larger_than_it_needs(
    open_kind: Callable[..., Head], fixed: bool
) -> None:
    engine = head_engine(
        open_kind("eagle", "library" if fixed else "auto"),
        capture=(lambda function: function) if fixed else None,
    )
    first = Read(engine, PROMPT * 12, 90)
    slots = first.session.cache.capacity
    base = engine.keep(first.session)
    again = Read(engine, (*PROMPT * 12, 5), 80, base, 71)
    assert again.session.cache is base.cache
    assert again.session.cache.capacity < slots
    check_the_same(again, Read(engine, (*PROMPT * 12, 5), 80), 1, count=2)


def test_a_head_computes_the_row_before_another_token_anew(open_kind: Callable[..., Head]) -> None:
    """Its row of position n - 1 has consumed the token at n."""
    engine = head_engine(open_kind("eagle"))
    base = engine.keep(Read(engine, PROMPT, 90).session)
    other = (*PROMPT[:4], 40, 41)
    with pytest.raises(
        RequestError,
        match="row 3 was computed with token 30, and the prompt continues with 40; take one fewer",
    ) as refusal:
        Read(engine, other, 90, base, 4)
    assert refusal.value.code == "prefix"
    check_the_same(Read(engine, other, 90, base, 3), Read(engine, other, 90), 1)


def test_features_that_waited_are_kept_with_the_rows(open_kind: Callable[..., Head]) -> None:
    engine = head_engine(open_kind("eagle"))
    first = Read(engine, PROMPT, 90)
    rounds(first.draft, 1, 2)
    session, fed = first.session, first.session.fed
    engine.take_features(session, to_array(first.features[fed : fed + 1]))
    base = engine.keep(session)
    assert len(base.waiting) == 1
    prompt = (*session.log, 7, 8)
    check_the_same(Read(engine, prompt, 90, base, fed + 1), Read(engine, prompt, 90), 2)


def test_a_head_goes_on_from_a_window_unless_most_of_it_is_gone(
    open_kind: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_kind("eagle")
    monkeypatch.setattr(head, "spec", replace(head.spec, context=20))
    engine = head_engine(head)
    first = Read(engine, PROMPT * 6, 200)
    rounds(first.draft, 1, 3)
    log, rows, dropped, window = (
        first.session.log,
        first.session.rows,
        first.session.dropped,
        first.session.window,
    )
    assert (dropped > 0, window) == (True, 16)
    base = engine.keep(first.session)
    least = dropped + window // 2
    with pytest.raises(RequestError, match=f"first {dropped} rows were dropped"):
        Read(engine, (*log[:least], 5), 200, base, least - 1)
    again = Read(engine, (*log, 5, 6), 200, base, rows)
    assert again.session.dropped >= dropped
    proposals = rounds(again.draft, 2, 12)
    assert all(len(proposal.tree) for proposal in proposals)
    assert again.session.rows == len(again.session.log) - 1
    assert again.session.cache.length <= window


def opening(session: int, prompt: Sequence[int], **changes: Any) -> Open:
    fields = {
        "session": session,
        "key": bytes(16),
        "prompt": tuple(prompt),
        "capacity": 80,
        "vocabulary_size": VOCABULARY,
        "sampling": GREEDY,
        "tree": TREE,
    }
    return Open(**{"epoch": 1, **fields, **changes})


def draft(session: int, round_: int, prefix: int, **changes: Any) -> Draft:
    shape = {"max_nodes": 8, "max_depth": 3, "max_width": 3}
    return Draft(
        **{
            "epoch": 1,
            "session": session,
            "round": round_,
            "prefix": prefix,
            "accepted": (),
            "bonus": 2,
            **shape,
            **changes,
        }
    )


@pytest.fixture
def worker(llama: LanguageModel) -> DraftWorker[DraftSession]:
    spans = Spans()
    engine = Drafter(llama, spans, ahead=True)
    worker = DraftWorker(
        engine,
        Identity("tiny", "tiny", "cpu", 1, llama.context, kept_tokens=20),
        spans,
    )
    worker.hello(7)
    return worker


def only(events: Sequence[Event]) -> Event:
    (event,) = events
    return event


def test_a_draft_worker_neither_counts_nor_grows_what_it_keeps(
    worker: DraftWorker[DraftSession],
) -> None:
    worker.handle(opening(1, PROMPT, sampling=WARM))
    worker.handle(draft(1, 1, 7, ahead=True))
    assert worker.idle()
    assert only(worker.handle(Close(epoch=1, session=1, keep=True))) == Closed(epoch=7, session=1)
    assert (worker.sessions, len(worker.kept)) == (0, 1)
    while worker.engine.learn():
        pass
    assert not worker.idle()
    with pytest.raises(RequestError, match="session 1 is not open"):
        worker.handle(draft(1, 2, 8))
    assert worker.handle(opening(1, PROMPT)) == []
    assert isinstance(only(worker.handle(opening(2, (*PROMPT, 2, 5), base=1, kept=6))), Opened)
    assert (worker.sessions, len(worker.kept)) == (1, 0)
    assert isinstance(only(worker.handle(draft(2, 1, 9))), Drafted)


def test_a_draft_worker_refuses_a_base_that_it_does_not_have_and_keeps_no_more_than_it_said(
    worker: DraftWorker[DraftSession],
) -> None:
    for session in (1, 2, 3, 4):
        worker.handle(opening(session, PROMPT))
        worker.handle(Close(epoch=1, session=session, keep=True))
    assert len(worker.kept) == 3
    with pytest.raises(RequestError, match="session 1, which is not kept here") as refusal:
        worker.handle(opening(5, PROMPT, base=1, kept=3))
    assert (refusal.value.code, worker.sessions, len(worker.kept)) == ("prefix", 0, 3)
    for session in (2, 3, 4):
        worker.handle(Close(epoch=1, session=session))
    assert len(worker.kept) == 0


def test_a_worker_says_how_much_it_keeps(llama_folder: Path, tmp_path: Path) -> None:
    target = open_target_worker(TargetSettings(model=str(llama_folder)), name="t", threads=1)
    library = open_target_worker(
        TargetSettings(model=str(llama_folder), backend="library"), name="t", threads=1
    )
    small = open_draft_worker(
        DraftSettings(model=str(llama_folder), device="cpu"),
        name="d",
        threads=1,
        target=str(llama_folder),
    )
    head = open_draft_worker(
        DraftSettings(model=str(write_head(tmp_path, "eagle")), device="cpu"),
        name="d",
        threads=1,
        target=str(llama_folder),
    )
    lookup = open_draft_worker(DraftSettings(kind="ngram"), name="d", threads=1, target="")
    kept = [worker.hello(1).limits for worker in (target, library, small, head, lookup)]
    assert all(limits is not None for limits in kept)
    on_kernels = target.hello(1).fingerprint is not None and target.hello(
        1
    ).fingerprint.kernels.startswith("dovetail")  # type: ignore[union-attr]
    assert [limits is not None and limits.kept > 0 for limits in kept] == [
        on_kernels,
        False,
        True,
        True,
        False,
    ]


@needs_kernels
def test_a_target_and_a_head_go_on_together_from_the_same_position(
    llama_folder: Path, tmp_path: Path
) -> None:
    """Through messages: what the target sends from the position on is what the head takes."""
    target = open_target_worker(TargetSettings(model=str(llama_folder)), name="t", threads=1)
    head = open_draft_worker(
        DraftSettings(model=str(write_head(tmp_path, "eagle")), device="cpu"),
        name="d",
        threads=1,
        target=str(llama_folder),
    )
    target.hello(1)
    reads = head.hello(1).reads
    log = converse(target, head, 1, PROMPT, reads, None, 0)
    for worker in (target, head):
        assert only([*worker.handle(Close(epoch=1, session=1, keep=True))]) == Closed(
            epoch=1, session=1
        )
    prompt = (*log, 7, 8, 9)
    found = converse(target, head, 2, prompt, reads, 1, len(log) - 2)
    assert (target.sessions, head.sessions, len(head.kept)) == (1, 1, 0)
    assert found == converse(target, head, 3, prompt, reads, None, 0)


def converse(
    target: TargetWorker,
    head: DraftWorker[Any],
    session: int,
    prompt: Sequence[int],
    reads: Reads | None,
    base: int | None,
    kept: int,
) -> tuple[int, ...]:
    """The log after a few rounds of both."""
    *parts, opened = target.handle(opening(session, prompt, features=reads, base=base, kept=kept))
    assert isinstance(opened, Opened)
    assert opened.bonus is not None
    head.handle(opening(session, prompt, base=base, kept=kept))
    for part in parts:
        assert isinstance(part, Prefilled)
        head.handle(Feed(epoch=1, session=session, start=part.start, features=part.features))
    log, accepted, features = [*prompt, opened.bonus], (), None
    for round_ in range(1, 4):
        drafted = only(
            head.handle(
                draft(
                    session, round_, len(log), accepted=accepted, bonus=log[-1], features=features
                )
            )
        )
        assert isinstance(drafted, Drafted)
        item = VerifyItem(
            session=session,
            round=round_,
            prefix=len(log),
            tokens=drafted.tokens,
            parents=drafted.parents,
        )
        verified = only([*target.handle(Verify(epoch=1, items=(item,)))])
        assert isinstance(verified, Verified)
        (verdict,) = verified.items
        log += [*(drafted.tokens[node] for node in verdict.accepted), verdict.bonus]
        accepted, features = verdict.accepted, verified.features
    return tuple(log)
