"""A session that goes on elsewhere is, byte for byte, the one that it was: on another target, and
with a draft that joins later."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol import lookup
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Draft,
    Drafted,
    Event,
    Feed,
    Open,
    Opened,
    Prefilled,
    Reads,
    Refed,
    Refeed,
    TokenLogprobs,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.sessions.features import PREFILL_ROWS
from dovetail.workers.sessions.results import First, Part, Verdict
from dovetail.workers.sessions.wire import TYPES, to_array, to_tensor
from dovetail.workers.target import TargetWorker
from dovetail.workers.verifier import Verifier
from support.cases import everyday
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import CONTEXT, VOCABULARY, cache_row, tiny_llama
from support.opening import opening as order

TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4, sharpening=1.0)
END = (1,)
READS = Reads(taps=(0, 1), width=64, dtype="bfloat16", vocabulary_size=VOCABULARY)
PROMPT = (0, 3, 17, 9, 30, 8)
BACK: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.4,
    "min_tokens": 12,
    "logit_bias": ((1, 3.0), (7, -2.0)),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "truncated": Sampling(temperature=1.3, top_p=0.9, top_k=30),
    "looking back": Sampling(**BACK),
    "sampled looking back": Sampling(temperature=1.0, **BACK),
}


# -- the target ------------------------------------------------------------------------------------


@dataclass
class Told:
    """The results of a session from all its targets, by positions."""

    log: list[int]
    margins: dict[int, float | None] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    features: dict[int, bytes] = field(default_factory=dict)

    def chose(
        self,
        tokens: Sequence[int],
        margins: Sequence[float | None],
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        for token, margin, said in zip(tokens, margins, logprobs, strict=True):
            self.margins[len(self.log)], self.logprobs[len(self.log)] = margin, said
            self.log.append(token)

    def read(self, start: int, features: torch.Tensor) -> None:
        for place, row in enumerate(features, start):
            assert place not in self.features, f"features of position {place} came twice"
            self.features[place] = row.view(torch.uint8).numpy().tobytes()


@dataclass
class Life:
    """A session over any number of targets, one after the other."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    capacity: int = CONTEXT
    told: Told = field(init=False)
    round: int = 0

    def __post_init__(self) -> None:
        self.told = Told(list(self.prompt))

    def goes_on(self, verifier: Verifier, number: int) -> None:
        """Open it on a target: the first, or another in the middle of a round."""
        log = tuple(self.told.log)
        replied = len(log) - len(self.prompt)
        self.round += bool(replied)
        *parts, first = verifier.open(
            order(
                number,
                log,
                key=session_key(self.seed, 0, self.prompt),
                capacity=self.capacity,
                sampling=self.sampling,
                tree=TREE,
                end=END,
                features=READS,
                logprobs=3,
                round=self.round,
                replied=replied,
                features_from=len(log) - 1 if replied else 0,
            )
        )
        assert isinstance(first, First)
        assert first.logprobs is not None
        for part in parts:
            assert isinstance(part, Part)
            self.told.read(part.start, part.features)
        self.told.chose([first.token], [first.margin], [first.logprobs])

    def verifies(self, verifier: Verifier, number: int, tree: TokenTree) -> None:
        self.round += 1
        root = len(self.told.log) - 1
        item = VerifyItem(
            session=number,
            round=self.round,
            prefix=root + 1,
            tokens=tree.tokens,
            parents=tree.parents,
        )
        verifier.check(item)
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        assert verdict.features is not None
        self.told.read(root, verdict.features)
        tokens = [*(tree.tokens[node] for node in verdict.item.accepted), verdict.item.bonus]
        self.told.chose(tokens, verdict.item.margins, verdict.item.logprobs)


def alone(verifier: Verifier, life: Life, tokens: int) -> Told:
    """Decode a session on one target, token by token."""
    life.goes_on(verifier, 1)
    while len(life.told.log) < len(life.prompt) + tokens:
        life.verifies(verifier, 1, TokenTree())
    return life.told


def guess(rng: random.Random, coming: Sequence[int]) -> TokenTree:
    """A tree of which some of the tokens that will come are a path, others stand beside it."""
    tokens, parents, above = list[int](), list[int](), -1
    for right in coming[: rng.randint(0, 3)]:
        wrong = rng.choice([token for token in range(VOCABULARY) if token != right])
        tokens += [wrong, right]
        parents += [above, above]
        above = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


def rows_of(verifier: Verifier, number: int) -> torch.Tensor:
    cache = verifier._sessions[number].cache
    return torch.stack([cache_row(cache, slot) for slot in range(cache.length)])


def moved(
    verifiers: Sequence[Verifier], life: Life, expected: Told, tokens: int, rng: random.Random
) -> int:
    """Decode a session with trees, and now and then on another target; return the number of the
    target that has it in the end."""
    place = 0
    life.goes_on(verifiers[place], 1)
    while len(life.told.log) < len(life.prompt) + tokens:
        if rng.random() < 0.3:
            verifiers[place].close(1)
            place = 1 - place
            life.goes_on(verifiers[place], 1)
        else:
            life.verifies(verifiers[place], 1, guess(rng, expected.log[len(life.told.log) :]))
    return place


@needs_kernels
@pytest.mark.parametrize("sampling", everyday(SAMPLINGS, "greedy", "sampled looking back"))
@given(seed=st.integers(0, 1 << 32), halved=st.booleans())
@settings(deadline=None, max_examples=6)
def test_a_session_that_moves_in_the_middle_of_rounds_is_the_same_bytes(
    llama: LanguageModel, halved_llama: LanguageModel, sampling: str, seed: int, halved: bool
) -> None:
    rng, model = random.Random(seed), halved_llama if halved else llama
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30)))
    lives = [Life(prompt, SAMPLINGS[sampling], seed) for _ in range(2)]
    undisturbed, pair = (
        Verifier(model, Spans()),
        (Verifier(model, Spans()), Verifier(model, Spans())),
    )
    expected = alone(undisturbed, lives[0], 40)
    last = pair[moved(pair, lives[1], expected, 30, rng)]
    found = lives[1].told
    length = len(found.log)
    assert found.log == expected.log[:length]
    assert found.margins == {place: expected.margins[place] for place in range(len(prompt), length)}
    assert found.logprobs == {
        place: expected.logprobs[place] for place in range(len(prompt), length)
    }
    assert found.features == {place: expected.features[place] for place in range(length - 1)}
    assert torch.equal(rows_of(last, 1), rows_of(undisturbed, 1)[: length - 1])
    assert sum(map(len, pair)) == 1


def test_a_session_moves_between_targets_of_the_library(llama_folder: Path) -> None:
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend="library")
    for sampling in SAMPLINGS.values():
        lives = [Life(PROMPT, sampling, 5) for _ in range(2)]
        expected = alone(Verifier(model, Spans()), lives[0], 40)
        moved(
            (Verifier(model, Spans()), Verifier(model, Spans())),
            lives[1],
            expected,
            30,
            random.Random(1),
        )
        assert lives[1].told.log == expected.log[: len(lives[1].told.log)]


def test_features_come_from_the_position_on_that_was_asked_for(tmp_path: Path) -> None:
    model = load_language_model(
        str(tiny_llama(tmp_path, context=400)), weights="fp32", device="cpu"
    )
    rng = random.Random(1)
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(300))
    firsts = (1, 7, PREFILL_ROWS - 1, PREFILL_ROWS, PREFILL_ROWS + 3, 299, 300, 900)
    told = {}
    for features_from in (0, *firsts):
        *parts, _ = Verifier(model, Spans()).open(
            order(
                1,
                prompt,
                key=bytes(16),
                capacity=350,
                sampling=Sampling(),
                tree=TREE,
                features=READS,
                features_from=features_from,
            )
        )
        assert all(isinstance(part, Part) for part in parts)
        told[features_from] = [
            (part.start, part.features) for part in parts if isinstance(part, Part)
        ]
    whole = torch.cat([features for _, features in told[0]])
    for first in firsts:
        if first >= 300:
            assert told[first] == []
            continue
        assert told[first][0][0] == first
        assert torch.equal(torch.cat([features for _, features in told[first]]), whole[first:])


# -- features computed anew ------------------------------------------------------------------------


@needs_kernels
@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=12)
def test_features_that_are_computed_anew_are_those_that_were_sent(
    llama: LanguageModel, seed: int
) -> None:
    rng = random.Random(seed)
    lives = [Life(PROMPT, SAMPLINGS["sampled"], seed) for _ in range(2)]
    asked, left_alone = Verifier(llama, Spans()), Verifier(llama, Spans())
    expected = alone(left_alone, lives[0], 50)
    lives[1].goes_on(asked, 1)
    while len(lives[1].told.log) < len(PROMPT) + 40:
        lives[1].verifies(asked, 1, guess(rng, expected.log[len(lives[1].told.log) :]))
        if rng.random() < 0.3:
            prefix = rng.randint(1, len(lives[1].told.log))
            start = rng.randint(0, prefix)
            again = Told([])
            for part in asked.refeed(1, READS, start, prefix):
                again.read(part.start, part.features)
            assert again.features == {
                place: lives[1].told.features[place] for place in range(start, prefix - 1)
            }
    length = len(lives[1].told.log)
    assert lives[1].told.log == expected.log[:length]
    assert torch.equal(rows_of(asked, 1), rows_of(left_alone, 1)[: length - 1])


@needs_kernels
def test_a_session_that_nobody_read_is_read_from_then_on(llama: LanguageModel) -> None:
    verifier = Verifier(llama, Spans())
    *parts, first = verifier.open(
        order(1, PROMPT, key=bytes(16), capacity=40, sampling=Sampling(), tree=TREE)
    )
    assert isinstance(first, First)
    log = [*PROMPT, first.token]
    assert parts == []
    for round in (1, 2, 3):
        if round == 2:
            assert [part.start for part in verifier.refeed(1, READS, 0, len(log))] == [0]
        (verdict,) = verifier.verify(
            [VerifyItem(session=1, round=round, prefix=len(log), tokens=(), parents=())]
        )
        assert isinstance(verdict, Verdict)
        assert (verdict.reads, verdict.features is None) == (
            (None, True) if round == 1 else (READS, False)
        )
        log.append(verdict.item.bonus)


def test_features_of_what_is_not_there_are_refused(llama: LanguageModel) -> None:
    verifier, life = Verifier(llama, Spans()), Life(PROMPT, Sampling(), 1)
    life.goes_on(verifier, 1)
    for number, reads, prefix, code, words in (
        (
            1,
            READS,
            len(PROMPT) + 2,
            "prefix",
            "features of 8 tokens were requested, but the log here has 7",
        ),
        (
            1,
            READS.model_copy(update={"taps": (0, 9)}),
            len(PROMPT),
            "settings",
            "use a draft that was made for this target",
        ),
        (3, READS, len(PROMPT), "session", "session 3 is not open here"),
    ):
        with pytest.raises(RequestError, match=words) as refusal:
            list(verifier.refeed(number, reads, 0, prefix))
        assert refusal.value.code == code


# -- a draft that joins later ----------------------------------------------------------------------


def only(events: Sequence[Event]) -> Any:
    (event,) = events
    return event


class Drafting:
    """A draft session whose target commits what a test says; features are made of position and
    token, the same in every session."""

    def __init__(
        self,
        worker: DraftWorker[Any],
        number: int,
        log: Sequence[int],
        sampling: Sampling,
        *,
        replied: int = 0,
        round: int = 0,
    ) -> None:
        self.worker, self.number, self.log, self.round = worker, number, list(log), round
        self.reads = worker.hello(1).reads
        opened = only(
            worker.handle(
                Open(
                    epoch=1,
                    session=number,
                    round=round,
                    key=bytes(range(16)),
                    prompt=tuple(log),
                    capacity=80,
                    vocabulary_size=VOCABULARY,
                    end=END,
                    sampling=sampling,
                    tree=TREE,
                    replied=replied,
                )
            )
        )
        assert isinstance(opened, Opened)
        assert opened.round == round
        self.first = True
        if self.reads is not None:
            fed = only(
                worker.handle(
                    Feed(
                        epoch=1,
                        session=number,
                        round=round,
                        start=0,
                        features=self.features(0, len(log)),
                    )
                )
            )
            assert (fed.round, fed.start) == (round, 0)

    def features(self, start: int, stop: int) -> Any:
        assert self.reads is not None
        rows = [
            torch.randn(self.reads.row, generator=torch.Generator().manual_seed(place))
            for place in range(start, stop)
        ]
        return to_array(torch.stack(rows).to(TYPES[self.reads.dtype]))

    def commits(self, tokens: Sequence[int], *, nodes: int) -> Drafted:
        """Tokens of rounds in which this draft had no part, and a proposal of at most so many
        nodes."""
        first, *more = tokens
        known = (
            None
            if self.first or self.reads is None
            else self.features(len(self.log) - 1, len(self.log) - 1 + len(tokens))
        )
        if self.first and self.reads is not None and more:
            known = self.features(len(self.log), len(self.log) + len(more))
        self.first = False
        self.log += tokens
        self.round += len(tokens)
        command = Draft(
            epoch=1,
            session=self.number,
            round=self.round,
            prefix=len(self.log),
            accepted=(),
            bonus=first,
            more=tuple(more),
            max_nodes=nodes,
            max_depth=4,
            max_width=4,
            features=known,
        )
        drafted = only(self.worker.handle(command))
        assert isinstance(drafted, Drafted)
        return drafted


DRAFTS: dict[str, Callable[[Path, Path], DraftSettings]] = {
    "small": lambda target, folder: DraftSettings(
        model=str(tiny_llama(folder, seed=3, layers=1)), device="cpu"
    ),
    "ngram": lambda target, folder: DraftSettings(kind="ngram"),
    "eagle": lambda target, folder: DraftSettings(
        model=str(write_head(folder, "eagle")), device="cpu"
    ),
    "eagle3": lambda target, folder: DraftSettings(
        model=str(write_head(folder, "eagle3")), device="cpu"
    ),
    "dovetail": lambda target, folder: DraftSettings(
        model=str(write_head(folder, "dovetail")), device="cpu"
    ),
    "jakiro": lambda target, folder: DraftSettings(
        model=str(write_head(folder, "jakiro")), device="cpu"
    ),
}


@pytest.mark.parametrize(
    ("kind", "sampling"), [*zip(DRAFTS, cycle(["sampled looking back", "greedy"]), strict=False)]
)
def test_a_draft_that_joins_later_proposes_what_one_proposes_that_was_there(
    kind: str,
    sampling: str,
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Except for the odds of a look-up, which each session learns from its own verdicts."""
    monkeypatch.setattr(lookup, "PACE", 0.0)
    settings = DRAFTS[kind](llama_folder, tmp_path / "draft")
    workers = [
        open_draft_worker(settings, name="d", threads=1, target=str(llama_folder)) for _ in range(2)
    ]
    chosen, saying = SAMPLINGS[sampling], [*range(20, 40)]
    prompt, reply = [*PROMPT, *saying], [41, saying[13], *saying[:12]]
    there = Drafting(workers[0], 1, prompt, chosen)
    for token in reply[:-1]:
        there.commits([token], nodes=0)
    joined = Drafting(
        workers[1], 1, [*prompt, *reply[:-1]], chosen, replied=len(reply) - 1, round=len(reply) - 1
    )
    for tokens in (reply[-1:], saying[12:13], saying[13:16]):
        expected, found = there.commits(tokens, nodes=12), joined.commits(tokens, nodes=12)
        assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
        assert len(found.tokens)
        assert found.scores == pytest.approx(expected.scores, abs=1e-3)


# -- workers ---------------------------------------------------------------------------------------


@pytest.fixture
def targets(llama_folder: Path) -> list[TargetWorker]:
    workers = [
        open_target_worker(TargetSettings(model=str(llama_folder)), name="t", threads=1)
        for _ in range(2)
    ]
    for worker in workers:
        worker.hello(1)
    return workers


def opening(session: int, prompt: Sequence[int], **changes: Any) -> Open:
    fields = {
        "session": session,
        "key": bytes(16),
        "prompt": tuple(prompt),
        "capacity": 80,
        "vocabulary_size": VOCABULARY,
        "tree": TREE,
    }
    return Open(**{"epoch": 1, "sampling": Sampling(), "features": READS, **fields, **changes})


def verifying(session: int, round: int, prefix: int) -> Verify:
    return Verify(
        epoch=1,
        items=(VerifyItem(session=session, round=round, prefix=prefix, tokens=(), parents=()),),
    )


def test_what_belongs_to_an_opening_or_to_features_anew_carries_its_round(
    targets: list[TargetWorker],
) -> None:
    first, second = targets
    part, opened = first.handle(opening(1, PROMPT))
    assert isinstance(opened, Opened)
    assert (part.round, opened.round) == (0, 0)  # type: ignore[union-attr]
    log = [*PROMPT, opened.bonus]
    for round in (1, 2, 3):
        verified = only([*first.handle(verifying(1, round, len(log)))])
        assert isinstance(verified, Verified)
        log.append(verified.items[0].bonus)
    # of the fourth round nobody hears, and the session moves
    expected = only([*first.handle(verifying(1, 4, len(log)))])
    part, opened = second.handle(opening(1, log, round=4, replied=4, features_from=len(log) - 1))
    assert isinstance(part, Prefilled)
    assert isinstance(opened, Opened)
    assert (part.round, part.start, part.features.shape[0], opened.round) == (4, len(log) - 1, 1, 4)
    assert opened.bonus == expected.items[0].bonus
    log.append(opened.bonus)
    assert [*second.handle(verifying(1, 4, len(log) - 1))] == []
    assert second.stale == 1
    assert isinstance(only([*second.handle(verifying(1, 5, len(log)))]), Verified)
    *parts, refed = second.handle(
        Refeed(epoch=1, session=1, round=5, start=2, prefix=len(log), features=READS)
    )
    assert isinstance(refed, Refed)
    assert (refed.round, [name for name, _, _ in refed.spans]) == (5, ["prefill"])
    assert [
        (part.round, part.start, part.features.shape[0])
        for part in parts
        if isinstance(part, Prefilled)
    ] == [(5, 2, len(log) - 3)]


@needs_kernels
@pytest.mark.parametrize("kind", ["eagle3", "dovetail"])
def test_a_head_that_is_fed_anew_drafts_for_a_session_that_began_without_it(
    kind: str, targets: list[TargetWorker], llama_folder: Path, tmp_path: Path
) -> None:
    """The head gets the features that it would have had, in the same messages."""
    settings, target = DRAFTS[kind](llama_folder, tmp_path / "draft"), targets[0]
    late, early = (
        open_draft_worker(settings, name="d", threads=1, target=str(llama_folder)) for _ in range(2)
    )
    reads = late.hello(1).reads
    early.hello(1)
    *parts, opened = target.handle(opening(7, PROMPT, features=reads))
    assert isinstance(opened, Opened)
    log = [*PROMPT, opened.bonus]
    early.handle(opening(7, PROMPT))
    for part in parts:
        assert isinstance(part, Prefilled)
        early.handle(Feed(epoch=1, session=7, start=part.start, features=part.features))
    proposals, features = [], None
    for round in range(1, 6):
        order = {
            "session": 7,
            "round": round,
            "prefix": len(log),
            "accepted": (),
            "bonus": log[-1],
            "max_nodes": 8,
            "max_depth": 3,
            "max_width": 3,
        }
        if round == 5:
            late.handle(opening(7, log[:-1], round=4, replied=len(log) - 1 - len(PROMPT)))
            *again, refed = target.handle(
                Refeed(epoch=1, session=7, round=4, start=0, prefix=len(log), features=reads)
            )
            assert isinstance(refed, Refed)
            for part in again:
                assert isinstance(part, Prefilled)
                late.handle(
                    Feed(epoch=1, session=7, round=4, start=part.start, features=part.features)
                )
            proposals.append(only(late.handle(Draft(epoch=1, **order))))
        proposals.append(only(early.handle(Draft(epoch=1, features=features, **order))))
        verified = only([*target.handle(verifying(7, round, len(log)))])
        assert verified.features is not None
        log.append(verified.items[0].bonus)
        features = verified.features
        assert len(to_tensor(features)) == 1
    found, expected = proposals[-2:]
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert len(found.tokens)
    assert found.scores == pytest.approx(expected.scores, abs=1e-3)
