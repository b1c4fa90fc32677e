"""Drafting for several sessions at once: each gets the proposals that it would get alone, and what
happens to one does not affect the others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.messages import Close, Draft, Drafted, Drafts, Event, Failed
from dovetail.protocol.settings import Sampling
from dovetail.protocol.spans import Spans
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.memory import HELD
from dovetail.workers.devices.opening import open_device
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.tree import Grower
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.backends.device.levels import Ranked
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.speculation.proposal import Order, Shape
from pretended.device import POSSIBLE
from support.cases import everyday
from support.drafts import POLICY_NAMES, PROMPTS, SHAPES, Scene, check, still, tree_of
from support.emulated import given_to_pretended
from support.heads import write_head
from support.models import VOCABULARY, tiny_llama
from support.opening import opening


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


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_a_small_model_proposes_in_company_what_it_proposes_alone(
    llama: LanguageModel, ahead: bool
) -> None:
    for first in (0, 3):
        policies = [POLICY_NAMES[(first + n) % len(POLICY_NAMES)] for n in range(len(PROMPTS))]
        check(lambda: Drafter(llama, Spans(), ahead=True, clock=still), policies, ahead=ahead)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The pretended GPU with our functions."""
    if not POSSIBLE:
        pytest.skip("torch cannot be told of a device from Python")
    for _ in given_to_pretended(monkeypatch):
        yield open_device("pretended", 1)


class Captures:
    """Captures on a device, and counts how often."""

    def __init__(self, device: Device) -> None:
        assert device.capture is not None
        self.capture, self.count = device.capture, 0

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.count += 1
        return self.capture(function)


@pytest.mark.parametrize(
    ("kind", "ahead"),
    everyday(
        [(k, a) for k in ("small", "eagle", "eagle3", "dovetail-3", "jakiro") for a in (0, 1)],
        *[("small", 0), ("eagle3", 0)],
    ),
)
def test_on_a_gpu_a_draft_proposes_in_company_what_it_proposes_alone(
    there: Device, tmp_path: Path, kind: str, ahead: int
) -> None:
    """A level is one pass of graphs that serve all sessions of a worker."""
    target = tiny_llama(tmp_path / "target", dtype=torch.float16)
    making = Captures(there)
    if kind == "small":
        device = replace(there, capture=making)
        model = load_language_model(str(target), weights="fp16", device=there.name, draft=device)
    else:
        folder = write_head(tmp_path / "head", kind, gain=1.0, dtype=torch.float16)
        head = open_head(str(folder), target=str(target), weights="fp16", device=there.name)

    def new() -> Grower[Any]:
        if kind == "small":
            return Drafter(model, Spans(), ahead=True, clock=still)
        return HeadDrafter(
            head, Spans(), contrast=head.spec.contrast, capture=making, ahead=True, clock=still
        )

    policies = [POLICY_NAMES[(3 * ahead + n) % len(POLICY_NAMES)] for n in range(len(PROMPTS))]
    check(new, policies, ahead=bool(ahead), exact=kind != "jakiro", rounds=3)
    assert making.count > 0
    before, engine = making.count, new()
    # the memory of the sessions of the first scene, which end, goes to those of the second
    first, second = (
        Scene(engine, policies, ahead=bool(ahead)).round(together=True) for _ in range(2)
    )
    assert making.count == before
    assert first == second


@pytest.mark.parametrize("kind", ["eagle3", "dovetail-3", "jakiro"])
@pytest.mark.parametrize("ahead", everyday([False, True], True), ids=["waiting", "ahead"])
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
    monkeypatch.setattr(HELD, "_captures_from", float("-inf"))  # later tests capture again
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
            Ranked(torch.full_like(found.logits, float("nan")), None)
            if part.segment.cache is spoilt
            else found
            for part, found in zip(parts, compute(parts), strict=True)
        ]

    monkeypatch.setattr(engine, "compute", poisoned)
    events = told(worker, *(draft(session) for session in range(4)))
    (failed,) = [event for event in events if event.session == 2]
    assert isinstance(failed, Failed)
    assert "the draft's logits are not numbers" in failed.text
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
