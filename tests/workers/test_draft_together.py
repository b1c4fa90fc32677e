"""Drafting for several sessions at once: each gets the proposals that it would get alone, and what
happens to one does not affect the others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.messages import Close, Draft, Drafted, Drafts, Event, Failed
from dovetail.protocol.policies import POLICIES
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.identity import Identity
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.tree import Grower
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Order, Price, Proposal, Shape
from support.heads import write_head
from support.models import VOCABULARY
from support.opening import opening

PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3], [5, 7, 7])
SHAPES = (Shape(12, 4, 4), Shape(3, 2, 2), Shape(16, 5, 3), Shape(8, 3, 4))
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=8, repetition_penalty=1.3),
    Sampling(temperature=1.2),
)
POLICY_NAMES = tuple(sorted(POLICIES))


def tree_of(policy: str) -> TreeSettings:
    """Sharpening is fixed: what one session teaches, others use."""
    if policy == "beam":
        return TreeSettings(policy=policy, gamma=12, depth=4, width=3, sharpening=1.0)
    return TreeSettings(policy=policy, gamma=12, depth=4, width=4, sharpening=1.0)


class Scene:
    """Sessions of an engine, each with a prompt, a sampling and a shape of its own; time stands
    still, so that it decides nothing."""

    def __init__(self, engine: Grower[Any], policies: Sequence[str], *, ahead: bool) -> None:
        self.engine, self.ahead, self.rounds = engine, ahead, 0
        self.random = torch.Generator().manual_seed(1)
        self.sessions = [
            engine.open(  # type: ignore[attr-defined]
                opening(
                    number,
                    prompt,
                    capacity=60,
                    vocabulary_size=VOCABULARY,
                    key=bytes([number] * 16),
                    sampling=SAMPLINGS[number],
                    tree=tree_of(policy),
                    end=(1,),
                )
            )
            for number, (prompt, policy) in enumerate(zip(PROMPTS, policies, strict=True))
        ]
        self.last: list[Proposal | None] = [None] * len(PROMPTS)
        if isinstance(engine, HeadDrafter):
            for session, prompt in zip(self.sessions, PROMPTS, strict=True):
                engine.feed(session, 0, self.some(len(prompt)))

    def some(self, count: int) -> Any:
        assert isinstance(self.engine, HeadDrafter)
        reads = self.engine.reads
        return to_array(torch.randn(count, reads.row, generator=self.random).to(TYPES[reads.dtype]))

    def order(self, number: int) -> Order[Any]:
        """The order of a round: the first node is accepted where there is one."""
        session, last = self.sessions[number], self.last[number]
        accepted = (0,) if last is not None and len(last.tree) and self.rounds % 2 else ()
        more = (2, 3) if (self.rounds + number) % 3 == 2 else ()
        if isinstance(self.engine, HeadDrafter) and self.rounds:
            missing = len(session.log) + len(accepted) + len(more) - session.fed
            self.engine.take_features(session, self.some(missing))
        price = Price() if number % 2 else Price(rate=0.0, floor=0.001)
        bonus = 1 + (7 * self.rounds + number) % (VOCABULARY - 1)
        return Order(
            session,
            accepted,
            bonus,
            SHAPES[(number + self.rounds) % len(SHAPES)],
            more=more,
            price=price,
            ahead=self.ahead,
        )

    def round(self, *, together: bool) -> list[Proposal]:
        """A round of all of them."""
        orders = [self.order(number) for number in range(len(self.sessions))]
        batches = [orders] if together else [[order] for order in orders]
        found = dict[int, Proposal]()
        for first, batch in enumerate(batches):
            for place, outcome in self.engine.draft_all(batch):
                assert isinstance(outcome, Proposal)
                found[first + place] = outcome
        self.rounds += 1
        self.last = [found[number] for number in range(len(orders))]
        self._grow(together=together)
        return [found[number] for number in range(len(orders))]

    def _grow(self, *, together: bool) -> None:
        """Two passes ahead for each, those that go together in one."""
        if together:
            for _ in range(2):
                self.engine.grow_all_ahead(self.sessions)
        else:
            for session in self.sessions:
                for _ in range(2):
                    self.engine.grow_ahead(session)


def still() -> int:
    return 0


@pytest.fixture(scope="module")
def opened_head(
    tmp_path_factory: pytest.TempPathFactory, llama_folder: Path
) -> Callable[[str], HeadDrafter]:
    heads: dict[str, Any] = {}

    def new(kind: str) -> HeadDrafter:
        if kind not in heads:
            folder = write_head(tmp_path_factory.mktemp(kind), kind)
            heads[kind] = open_head(
                str(folder), target=str(llama_folder), weights="fp32", device="cpu"
            )
        head = heads[kind]
        return HeadDrafter(head, Spans(), contrast=head.spec.contrast, ahead=True, clock=still)

    return new


def check(
    new: Callable[[], Grower[Any]], policies: Sequence[str], *, ahead: bool, exact: bool = True
) -> None:
    """Each session gets the same proposals in company as alone, round after round; `exact`: with
    the same bytes of all scores."""
    alone, company = Scene(new(), policies, ahead=ahead), Scene(new(), policies, ahead=ahead)
    nodes = 0
    for _ in range(5):
        expected, found = alone.round(together=False), company.round(together=True)
        if exact:
            assert found == expected
        for one, other in zip(found, expected, strict=True):
            assert one.tree == other.tree
            assert one.scores == pytest.approx(other.scores, abs=1e-4)
        nodes += sum(len(proposal.tree) for proposal in expected)
    assert nodes > 20


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_a_small_model_proposes_in_company_what_it_proposes_alone(
    llama: LanguageModel, ahead: bool
) -> None:
    for first in (0, 3):
        policies = [POLICY_NAMES[(first + n) % len(POLICY_NAMES)] for n in range(len(PROMPTS))]
        check(lambda: Drafter(llama, Spans(), ahead=True, clock=still), policies, ahead=ahead)


@pytest.mark.parametrize("kind", ["eagle3", "dovetail-3", "jakiro"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_a_head_proposes_in_company_what_it_proposes_alone(
    opened_head: Callable[[str], HeadDrafter], kind: str, ahead: bool
) -> None:
    """The experts of Jakiro are torch's, which promises no bytes."""
    for first in (0, 3):
        policies = [POLICY_NAMES[(first + n) % len(POLICY_NAMES)] for n in range(len(PROMPTS))]
        check(lambda: opened_head(kind), policies, ahead=ahead, exact=kind != "jakiro")


def test_levels_of_several_sessions_are_passes_over_the_rows_of_all(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(Drafter(llama, Spans(), clock=still), ["dynamic"] * 4, ahead=False)
    segments: list[int] = []
    forward = llama.forward

    def counted(tokens: Any, positions: Any, of: Sequence[Any], **named: Any) -> Any:
        segments.append(len(of))
        return forward(tokens, positions, of, **named)

    monkeypatch.setattr(llama, "forward", counted)
    proposals = scene.round(together=True)
    assert len(segments) == max(shape.depth for shape in SHAPES)
    assert segments[:2] == [4, 4]
    assert segments == sorted(segments, reverse=True)
    for shape, proposal in zip(SHAPES, proposals, strict=True):
        assert len(proposal.passes) == shape.depth


def test_who_is_done_is_answered_before_the_others_go_on(llama: LanguageModel) -> None:
    scene = Scene(Drafter(llama, Spans(), clock=still), ["dynamic"] * 4, ahead=False)
    places = [
        place for place, _ in scene.engine.draft_all([scene.order(number) for number in range(4)])
    ]
    assert places == sorted(range(4), key=lambda number: SHAPES[number].depth)


def test_a_deadline_ends_the_growth_of_its_own_session_alone(llama: LanguageModel) -> None:
    times = iter(range(1000))
    engine = Drafter(llama, Spans(), clock=lambda: next(times))
    scene = Scene(engine, ["dynamic"] * 4, ahead=False)
    orders = [
        Order(scene.sessions[0], (), 2, Shape(40, 6, 4), deadline_ns=4),
        Order(scene.sessions[1], (), 2, Shape(40, 6, 4)),
    ]
    found = dict(engine.draft_all(orders))
    depths = [max(found[place].tree.depths) for place in (0, 1)]  # type: ignore[union-attr]
    assert depths[0] < depths[1] == 6


# -- the worker ------------------------------------------------------------------------------------

EPOCH = 7


@pytest.fixture
def worker(llama: LanguageModel) -> DraftWorker[Any]:
    spans = Spans()
    made = DraftWorker(
        Drafter(llama, spans, ahead=True),
        Identity("tiny", "tiny", "cpu", 1, llama.context, together=8),
        spans,
    )
    assert made.hello(EPOCH).limits is not None
    for number, prompt in enumerate(PROMPTS):
        made.handle(
            opening(
                number,
                prompt,
                capacity=40,
                vocabulary_size=VOCABULARY,
                key=bytes(16),
                sampling=Sampling(),
                tree=tree_of("dynamic"),
            )
        )
    return made


def draft(session: int, round_: int = 1, **changes: Any) -> Draft:
    content = {
        "epoch": 1,
        "session": session,
        "round": round_,
        "prefix": len(PROMPTS[session]) + round_,
        "accepted": (),
        "bonus": 2,
        "max_nodes": 8,
        "max_depth": 3,
        "max_width": 3,
    }
    return Draft(**{**content, **changes})


def told(worker: DraftWorker[Any], *orders: Draft) -> list[Event]:
    command = COMMAND.decode(encode(Drafts.of(orders)))
    assert isinstance(command, Drafts)
    return [*worker.handle(command)]


def test_every_order_of_a_command_is_answered_by_itself(worker: DraftWorker[Any]) -> None:
    events = told(worker, *(draft(session) for session in range(4)))
    assert {event.session for event in events if isinstance(event, Drafted)} == {0, 1, 2, 3}
    for event in events:
        assert isinstance(event, Drafted)
        *_, (name, _, duration_ns) = event.spans
        assert (name, len(event.passes)) == ("draft", 3)
        assert sum(ns for _, ns in event.passes) <= duration_ns
        assert all(rows >= 4 for rows, _ in event.passes)


def test_what_is_stale_twice_or_wrong_in_a_command_changes_nothing(
    worker: DraftWorker[Any],
) -> None:
    assert len(told(worker, draft(0), draft(0), draft(1))) == 2
    assert worker.stale == 1
    events = told(worker, draft(0), draft(1, 2), draft(2, prefix=99), draft(3), draft(3, 9))
    assert {(type(event).__name__, event.session) for event in events} == {
        ("Drafted", 1),
        ("Failed", 2),
        ("Drafted", 3),
        ("Failed", 3),
    }
    assert worker.sessions == 4
    assert worker.stale == 2
    told(worker, draft(2))


def test_a_session_that_was_closed_is_answered_with_failed_and_the_others_go_on(
    worker: DraftWorker[Any],
) -> None:
    worker.handle(Close(epoch=1, session=2))
    events = told(worker, draft(1), draft(2), draft(3))
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.session, event.code) for event in failed] == [(2, "session")]
    assert len(events) == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), IndexError("a bug")])
def test_a_pass_that_fails_for_the_rows_of_one_session_ends_the_order_of_that_one(
    worker: DraftWorker[Any],
    llama: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    spoilt = worker.session(1).cache
    forward = llama.forward

    def failing(tokens: Any, positions: Any, of: Sequence[Any], **named: Any) -> Any:
        if any(segment.cache is spoilt and segment.paths is not None for segment in of):
            raise error
        return forward(tokens, positions, of, **named)

    monkeypatch.setattr(llama, "forward", failing)
    events = told(worker, *(draft(session) for session in range(4)))
    assert [type(event) for event in events if event.session == 1] == [Failed]
    assert sum(isinstance(event, Drafted) for event in events) == 3
    assert worker.sessions == 3
    monkeypatch.setattr(llama, "forward", forward)
    assert len(told(worker, *(draft(session, 2) for session in (0, 2, 3)))) == 3


def test_logits_that_are_no_numbers_end_the_order_of_their_session_alone(
    worker: DraftWorker[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = worker.engine
    compute = engine.compute  # type: ignore[attr-defined]
    spoilt = worker.session(2).cache

    def poisoned(parts: Any) -> Any:
        return [
            torch.full_like(found, float("nan")) if part.segment.cache is spoilt else found
            for part, found in zip(parts, compute(parts), strict=True)
        ]

    monkeypatch.setattr(engine, "compute", poisoned)
    events = told(worker, *(draft(session) for session in range(4)))
    assert [type(event) for event in events if event.session == 2] == [Failed]
    assert sum(isinstance(event, Drafted) for event in events) == 3


def test_a_command_that_nobody_hears_to_its_end_leaves_no_half_grown_session(
    worker: DraftWorker[Any],
) -> None:
    events = iter(worker.handle(Drafts.of([draft(0, max_depth=1), draft(1)])))
    assert isinstance(next(events), Drafted)
    events.close()  # type: ignore[attr-defined]
    assert worker.sessions == 3
    with pytest.raises(Exception, match="session 1 is not open"):
        worker.session(1)
