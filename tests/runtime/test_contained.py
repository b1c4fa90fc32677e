"""A fault of the coordinator's about one session ends that session with one error, and nobody else
notices; a worker that will not answer is lost."""

import functools
import json
import logging
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.codec import encode
from dovetail.protocol.keys import generate_keys
from dovetail.protocol.links import open_hub, open_link
from dovetail.protocol.messages import (
    Close,
    Command,
    Draft,
    Event,
    Failed,
    Finished,
    Open,
    Probe,
    Probed,
    Verified,
    Verify,
)
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.controller import Controller
from dovetail.runtime.engine import outgoing as post
from dovetail.runtime.engine import reading
from dovetail.runtime.engine.coordinator import DEFAULTS, Coordinator
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.fleet.peers import DEAF
from dovetail.runtime.moves.replacement import Changes
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.event_log import EventLog
from dovetail.runtime.text.tokenizer import TextCodec
from explore.workers import CarefulTarget
from support import scripted
from support.houses import PROMPT, House
from support.patience import PATIENCE_S
from support.scripted import (
    END,
    READS,
    ROOMY,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    choice,
    continuation,
    hello,
    tokenizer_bytes,
)


def test_a_worker_that_has_gone_has_not_lost_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate_keys(keys := tmp_path / "keys")
    caplog.set_level(logging.INFO)
    hub = open_hub("tcp://127.0.0.1:*", keys=keys)
    link = open_link(hub.address, keys=keys, role="draft")
    try:
        coordinator, end_s = Coordinator(hub), time.monotonic() + PATIENCE_S
        link.send(encode(hello("draft", epoch=1, vocabulary=None)))
        while not coordinator.registry.workers:
            coordinator.pump()
            assert time.monotonic() < end_s
        link.close()
        while coordinator.registry.workers:
            select.select([hub.monitor_fileno()], [], [], 0.1)
            coordinator.look_around()
            assert time.monotonic() < end_s
    finally:
        link.close()
        hub.close()
    assert "disconnected" in caplog.text
    assert "lost its key" not in caplog.text


S = 1_000_000_000


class Panic(BaseException):
    """An error that is no `Exception`, as a library's panic is."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even its words")


ERRORS: list[BaseException] = [
    KeyError("x"),
    AssertionError(),
    MemoryError(),
    RecursionError("too deep"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
    Panic("index out of bounds"),
    Unspeakable(),
    StopIteration(),
]
GUILTY = (7, 7, 7)  # the prompt of the session that goes wrong


def is_guilty(session: Session) -> bool:
    return session.request.prompt == GUILTY


def in_step(
    name: str, error: BaseException, rounds: int = 2
) -> Callable[[pytest.MonkeyPatch], None]:
    """A step of the guilty session's logic raises, from some round on."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = getattr(Session, name)

        @functools.wraps(real)
        def step(session: Session, *arguments: Any, **named: Any) -> Any:
            if is_guilty(session) and session.round >= rounds:
                raise error
            return real(session, *arguments, **named)

        patch.setattr(Session, name, step)

    return sabotage


def in_live(owner: type, name: str, error: BaseException) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a sabotage: a method of the guilty session's request raises this error."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            lives = [one for one in (self, *arguments) if isinstance(one, RunningRequest)]
            if any(is_guilty(live.session) and live.session.round >= 2 for live in lives):
                raise error
            return real(self, *arguments, **named)

        patch.setattr(owner, name, call)

    return sabotage


def in_controller(name: str, error: BaseException) -> Callable[[pytest.MonkeyPatch], None]:
    """The judgement of what is drafted for the guilty session raises: it is the first that
    begins."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = getattr(Controller, name)

        def call(controller: Controller, *arguments: Any, **named: Any) -> Any:
            if getattr(controller, "_number", 0) == 1:
                raise error
            return real(controller, *arguments, **named)

        patch.setattr(Controller, name, call)

    return sabotage


def play(house: House, *, policy_of_all: str = "dynamic") -> tuple[Failed, list[Finished]]:
    """The guilty request and five others beside it: its error, and the others' ends."""
    tree = TreeSettings(policy=policy_of_all)  # type: ignore[arg-type]
    guilty = house.submit(GUILTY, tree=tree)
    others = [house.submit((i, i + 1), tree=tree) for i in range(1, 6)]
    ends = [reply for reply in house.replies() if isinstance(reply, Finished | Failed)]
    failed = [end for end in ends if isinstance(end, Failed)]
    finished = [end for end in ends if isinstance(end, Finished)]
    assert [end.session for end in failed] == [guilty], f"{failed}"
    assert sorted(end.request for end in finished) == others
    for number, request in enumerate(others, 1):
        tokens = next(end.result.token_ids for end in finished if end.request == request)
        assert list(tokens) == continuation((number, number + 1), 60)
    return failed[0], finished


def check_clean(house: House) -> None:
    """Nobody owes or holds anything, and the next request is served."""
    coordinator = house.coordinator
    for worker in coordinator.registry.workers.values():
        assert (
            worker.turns.owed,
            len(worker.turns.waiting),
            worker.sessions,
            worker.turns.void,
        ) == ({}, 0, 0, set())
    assert coordinator.idle
    assert all(not worker.logs for worker in house.workers)
    assert len(coordinator.registry.workers) == len(house.workers)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["verified", "drafted", "_decided", "next_round"])
def test_whatever_a_step_of_a_session_raises_ends_that_session_alone(
    name: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(limits=ROOMY)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "dovetail.coordinator"):
        in_step(name, error)(patch)
        failed, _ = play(house)
    assert failed.code == "internal"
    assert failed.text.count("\n") == 0
    assert type(error).__name__ in failed.text
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)
    check_clean(house)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "begin",
        "opened",
        "prefilled",
        "_commit",
        "next_round",
        "_verify",
        "_open_target",
        "_open_draft",
        "_finish",
        "result",
        "kept",
    ],
)
def test_so_does_every_other_step(name: str, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(limits=ROOMY, reads=READS if reads else None)
    if (name, reads) == ("prefilled", False):
        return
    with monkeypatch.context() as patch:
        in_step(name, KeyError("x"), rounds=0)(patch)
        if name == "kept":  # the reply is whole by then: it is only not kept
            guilty = house.submit(GUILTY)
            assert [end.request for end in house.replies() if isinstance(end, Finished)] == [guilty]
        else:
            play(house)
    check_clean(house)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


@pytest.mark.parametrize(
    "sabotage",
    [
        in_live(RunningRequest, "answered", KeyError("x")),
        in_live(RunningRequest, "left", KeyError("x")),
        in_live(RunningRequest, "report_round", Panic("x")),
        in_live(RunningRequest, "over", KeyError("x")),
        in_live(RunningRequest, "round_ended", KeyError("x")),
        in_live(RunningRequest, "awaits", KeyError("x")),
        in_live(RunningRequest, "end_round", KeyError("x")),
        in_live(RunningRequest, "learn", AssertionError()),
        in_live(CommandSender, "ask", KeyError("x")),
        in_controller("learn", ZeroDivisionError()),
        in_controller("plan", ZeroDivisionError()),
        in_controller("sends", ZeroDivisionError()),
        in_controller("draft_read", ZeroDivisionError()),
    ],
    ids=[
        "answered",
        "left",
        "report_round",
        "over",
        "round_ended",
        "awaits",
        "end_round",
        "learn",
        "ask",
        "controller-learn",
        "plan",
        "sends",
        "draft_read",
    ],
)
def test_what_is_done_with_a_session_and_raises_ends_that_session_alone(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(limits=ROOMY)
    with monkeypatch.context() as patch:
        sabotage(patch)
        play(house)
    check_clean(house)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


@pytest.mark.parametrize("name", ["rate", "cuts"])
def test_a_pass_that_one_session_keeps_from_being_built_is_taken_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(limits=ROOMY)
    with monkeypatch.context() as patch:
        if name == "rate":
            in_controller("rate", ZeroDivisionError())(patch)
        else:
            real = Controller.cuts.fget  # type: ignore[attr-defined]
            patch.setattr(
                Controller,
                "cuts",
                property(
                    lambda controller: (
                        1 / 0 if getattr(controller, "_number", 0) == 1 else real(controller)
                    )
                ),
            )
        play(house, policy_of_all="goodput")
    check_clean(house)


@pytest.mark.parametrize("kind", ["verify", "draft", "open"])
def test_a_command_that_cannot_be_encoded_ends_its_session_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, real = House(limits=ROOMY), post.encode

    def encode(message: Any) -> list[bytes]:
        about = (
            [item.session for item in message.items]
            if isinstance(message, Verify)
            else [getattr(message, "session", None)]
        )
        if message.type == kind and 1 in about:
            raise OverflowError("a number too large")
        return real(message)

    with monkeypatch.context() as patch:
        patch.setattr(post, "encode", encode)
        play(house)
    check_clean(house)


def test_a_session_that_its_target_cannot_be_asked_about_is_not_opened_on_its_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, real, opened = House(limits=ROOMY), post.encode, []

    def encode(message: Any) -> list[bytes]:
        if message.type == "open" and message.session == 1:
            opened.append(message)
            if len(opened) == 1:
                raise OverflowError("a number too large")
        return real(message)

    with monkeypatch.context() as patch:
        patch.setattr(post, "encode", encode)
        play(house)
    assert len(opened) == 1
    check_clean(house)


@pytest.mark.parametrize("kind", ["emitted", "finished"])
def test_what_a_client_cannot_be_told_of_a_request_ends_that_request_and_not_the_client(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, real = House(limits=ROOMY), post.encode

    def encode(message: Any) -> list[bytes]:
        if message.type == kind and message.request == 1:
            raise RecursionError("too deep")
        return real(message)

    with monkeypatch.context() as patch:
        patch.setattr(post, "encode", encode)
        play(house)
    check_clean(house)


def test_an_observer_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(limits=ROOMY)

    def fail(*_: object) -> None:
        raise KeyError("x")

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "event", fail)
        patch.setattr(reading, "extent_ns", fail)
        assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    check_clean(house)


def test_neither_does_what_is_about_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(limits=ROOMY)
    request = house.submit()
    with monkeypatch.context() as patch:
        patch.setattr(type(house.coordinator._changes), "lost", lambda *_: 1 / 0)
        assert house.draft is not None
        house.lose(house.draft)
        house.coordinator.tick()
        house.run()
    assert [end.request for end in house.replies() if isinstance(end, Finished)] == [request]


def test_a_change_of_workers_at_which_the_coordinator_fails_is_broken_off_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(limits=ROOMY)
    newcomer = house.add(ScriptedDraft, "draft", standby=True, name="newcomer", pid=2)
    assert house.draft is not None
    with monkeypatch.context() as patch:
        patch.setattr(Changes, "_tried", lambda *_, **__: {}["x"])
        house.client.swap(newcomer.epoch, house.draft.epoch)
        said = house.replies()
    assert isinstance(said[-1], Failed)
    assert "abandoned" in said[-1].text
    assert newcomer.drained
    house.lose(newcomer)
    house.run()
    assert not any(worker.leaving for worker in house.report().workers)
    assert house.complete().result.drafted_tokens


def test_a_timer_that_finds_a_session_which_raises_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(limits=ROOMY)
    house.submit(GUILTY)
    house.submit(PROMPT)
    house.coordinator.look_around()
    house.coordinator.pump()
    with monkeypatch.context() as patch:
        in_live(type(house.coordinator._moving), "drop_draft", KeyError("x"))(patch)
        in_step("draft_lost", KeyError("x"), rounds=0)(patch)
        assert house.draft is not None
        house.lose(house.draft)
        house.coordinator.tick()
        ends = [reply for reply in house.replies() if isinstance(reply, Finished | Failed)]
    assert [type(end) for end in ends] == [Failed, Finished]
    check_clean(house)


def test_a_question_that_cannot_be_answered_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    with monkeypatch.context() as patch:
        patch.setattr(type(house.coordinator._status), "report", lambda _: {}["x"])
        house.client.inquire()
        (failed,) = house.replies()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.session) == ("internal", None)
    assert house.report().sessions == 0


@pytest.mark.parametrize("where", ["house", "_running_request", "start", "defer"])
def test_a_request_that_cannot_begin_is_answered_once(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(limits=ROOMY)
    coordinator = house.coordinator

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("can't start new thread")

    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    kept = len(house.target.kept)  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        if where == "defer":
            patch.setattr(coordinator, "_defer", fail)
        elif where == "start":
            patch.setattr(coordinator._observing, "begin", fail)
        else:
            patch.setattr(coordinator._placement, where, fail)
        request = house.submit()
        replies = house.replies()
    assert [(type(reply), reply.session) for reply in replies] == [(Failed, request)]  # type: ignore[attr-defined]
    check_clean(house)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    assert len(house.target.kept) >= kept  # type: ignore[union-attr]
    assert not any(worker.shelf._pinned for worker in coordinator.registry.workers.values())


def test_a_newcomer_that_cannot_be_let_in_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(draft=False)
    with monkeypatch.context() as patch:
        patch.setattr(house.coordinator.registry, "warnings", lambda _: 1 / 0)
        draft = house.add(ScriptedDraft, "draft")
    assert [failure.code for failure in draft.failures] == ["internal"]
    assert len(house.coordinator.registry.workers) == 1
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_a_panic_of_the_tokenizer_concerns_the_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()

    def panic(*_: object, **__: object) -> None:
        raise Panic("index out of bounds")

    with monkeypatch.context() as patch:
        patch.setattr(TextCodec, "encode", panic)
        request = house.client.submit(text="hello", max_tokens=4)
        (failed,) = house.replies()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.session) == ("internal", request)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_a_recorder_that_fails_ends_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path)
    house = House(recorder=recorder)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "received", lambda *_: 1 / 0)
        assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    recorder.close()
    assert any("recording has stopped" in words for words in house.report().decisions)


# -- byte-fallback tokenizers: what was found ------------------------------------------------------


def fallback_tokenizer() -> bytes:
    """The scripted words, of which three are spelt as in Llama 2's vocabulary."""
    content = json.loads(tokenizer_bytes())
    vocabulary = content["model"]["vocab"]
    for word, piece in (("w2", "<0x0A>"), ("w3", "<0xF0>"), ("w4", "\u2581a")):
        vocabulary[piece] = vocabulary.pop(word)
    stages = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [*stages, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
    }
    return json.dumps(content).encode()


def test_three_tokens_whose_bytes_are_no_text_end_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(log: Sequence[int]) -> int:
        return (2, 3, 4)[len(log) % 3] if tuple(log[:3]) == GUILTY else choice(log)

    monkeypatch.setattr(scripted, "choice", choose)
    tokenizer = fallback_tokenizer()
    house = House(draft=False, target=False)
    house.target = house.add(ScriptedTarget, "target", tokenizer=tokenizer)
    requests = {
        house.submit(prompt): prompt for prompt in (GUILTY, *((i, i + 1) for i in range(1, 6)))
    }
    finished = [reply for reply in house.replies() if isinstance(reply, Finished)]
    assert sorted(end.request for end in finished) == [*requests]
    pieces = {2: "\n", 3: "\ufffd", 4: " a", END: ""}
    for end in finished:
        assert list(end.result.token_ids) == continuation(requests[end.request], 60)
        begun = pieces[3] if requests[end.request][-1] == 3 else ""  # a character of the prompt
        said = "".join(pieces.get(token, f"w{token}") for token in end.result.token_ids)
        assert end.result.text == begun + said
    assert any("\n\ufffd a" in end.result.text for end in finished)


# -- workers that owe an answer --------------------------------------------------------------------


class Forgetful(CarefulTarget):
    """Does not answer what it is asked, once, and is well."""

    forgets: type[Command] | None = Verify  # type: ignore[assignment]

    def work(self, command: Command) -> list[Event]:
        if self.forgets is not None and isinstance(command, self.forgets):
            self.forgets = None
            return []
        return super().work(command)


class HalfAnswering(CarefulTarget):
    """Answers for all sessions of a pass but one, once."""

    forgets = True

    def work(self, command: Command) -> list[Event]:
        events = super().work(command)
        if not (self.forgets and isinstance(command, Verify) and len(command.items) > 1):
            return events
        self.forgets = False
        (verified,) = events
        assert isinstance(verified, Verified)
        return [verified.model_copy(update={"items": verified.items[:-1]})]


class Mute(CarefulTarget):
    """Says nothing, not even to probes, from some moment on."""

    mute = False

    def handle(self, command: Command) -> list[Event]:
        return [] if self.mute else super().handle(command)


class AtWork(CarefulTarget):
    """Takes long for a pass, and answers probes meanwhile."""

    at_work = False
    held: list[Event]

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Probe):
            (probed,) = super().handle(command)
            assert isinstance(probed, Probed)
            return [probed.model_copy(update={"busy": self.at_work})]
        events = super().handle(command)
        if isinstance(command, Verify) and self.at_work:
            self.held = [*getattr(self, "held", ()), *events]
            return []
        return events


def again(house: House, worker: ScriptedWorker) -> None:
    """A worker that is told so comes anew, as real ones do."""
    if any(failure.session is None and failure.code == "session" for failure in worker.failures):
        house.lose(worker)
        house.add(CarefulTarget, "target", pid=2)


def beats(house: House, seconds: float) -> None:
    """Let so much time pass, a quarter of a second after the other."""
    for _ in range(int(4 * seconds)):
        house.later_ns += S // 4
        house.coordinator.tick()
        house.run()


@pytest.mark.parametrize("forgets", [Open, Verify])
def test_a_target_that_owes_an_answer_and_says_that_it_has_nothing_to_do_is_lost_and_recovered_from(
    forgets: type[Command],
) -> None:
    house = House(draft=False, target=False)
    house.target = target = house.add(Forgetful, "target")
    target.forgets = forgets  # type: ignore[attr-defined]
    requests = [house.submit((i, 2)) for i in range(1, 5)]
    house.run()
    beats(house, 1.0)
    assert house.report().reasons[0] == "no target worker is registered"
    assert any(
        "owes an answer but reports that it is idle" in reason for reason in house.report().reasons
    )
    again(house, target)
    ends = [reply for reply in house.replies() if isinstance(reply, Finished | Failed)]
    assert sorted(end.request for end in ends if isinstance(end, Finished)) == requests
    for end in ends:
        assert list(end.result.token_ids) == continuation((end.request, 2), 60)  # type: ignore[union-attr]


def test_a_target_that_leaves_one_session_of_a_pass_out_is_lost_too() -> None:
    house = House(draft=False, target=False)
    house.target = target = house.add(HalfAnswering, "target")
    requests = [house.submit((i, 2)) for i in range(1, 5)]
    house.run()
    beats(house, 1.0)
    again(house, target)
    assert sorted(end.request for end in house.replies() if isinstance(end, Finished)) == requests


def test_a_draft_that_owes_an_answer_is_lost_and_the_target_goes_on_alone() -> None:
    class ForgetfulDraft(ScriptedDraft):
        def work(self, command: Command) -> list[Event]:
            return [] if isinstance(command, Draft) else super().work(command)

    house = House(draft=False)
    house.add(ForgetfulDraft, "draft")
    request = house.submit()
    house.run()
    beats(house, 1.0)
    (end,) = [reply for reply in house.replies() if isinstance(reply, Finished)]
    assert (end.request, list(end.result.token_ids)) == (request, continuation(PROMPT, 60))


def test_a_worker_at_work_is_not_lost_however_long_it_takes() -> None:
    house = House(draft=False, target=False)
    house.target = target = house.add(AtWork, "target")
    target.at_work = True  # type: ignore[attr-defined]
    request = house.submit()
    house.run()
    beats(house, 10 * DEAF * DEFAULTS.stuck_s)
    assert not house.report().degraded
    target.at_work = False  # type: ignore[attr-defined]
    for event in target.held:  # type: ignore[attr-defined]
        target.link.send(encode(event))
    (end,) = [reply for reply in house.replies() if isinstance(reply, Finished)]
    assert (end.request, list(end.result.token_ids)) == (request, continuation(PROMPT, 60))


def test_a_wasted_pass_after_the_end_of_a_reply_is_no_fault() -> None:
    house = House(draft=False, target=False)
    sharing = ROOMY.model_copy(update={"shares": True})
    house.target = target = house.add(CarefulTarget, "target", limits=sharing)
    for _ in range(2):
        expected = continuation(PROMPT, 20)
        end = next(place for place in range(9, 20) if expected[place] not in expected[:place])
        finished = house.complete(end=[expected[end]])
        assert list(finished.result.token_ids) == expected[: end + 1]
        rounds = [c.items[0].round for c in target.seen if isinstance(c, Verify)]
        assert rounds[-1] == end + 1, "the next round was requested before the verdict"
    assert (house.report().stale, target.failures) == (0, [])
    assert isinstance(target.seen[-1], Close)


def test_an_answer_that_crosses_a_probe_is_an_answer() -> None:
    """The probe leaves while the worker computes, and its answer is on its way before that to the
    probe."""
    house = House()
    request = house.submit(max_tokens=400)
    ends: list[object] = []
    for _ in range(2000):
        house.later_ns += S
        house.coordinator.tick()  # a probe leaves at whatever moment this is
        for worker in house.workers:
            worker.step()
        house.coordinator.pump()
        while (reply := house.client._link.inbox) and not ends:  # type: ignore[attr-defined]
            reply.popleft()
            ends = [True] * (not house.coordinator._running)
    assert not house.coordinator.report().degraded
    assert house.coordinator.idle, request
    assert len(house.coordinator.registry.workers) == 2


@pytest.mark.parametrize("owing", [False, True])
def test_a_worker_that_says_nothing_gets_no_sessions_and_in_the_end_is_lost(owing: bool) -> None:
    house = House(draft=False, target=False)
    house.target = target = house.add(Mute, "target")
    if owing:
        house.submit()
        house.coordinator.look_around()
        house.coordinator.pump()
    target.mute = True  # type: ignore[attr-defined]
    beats(house, DEFAULTS.stuck_s - 1)
    assert not house.report().degraded
    beats(house, 3)
    assert any("has not responded for 1" in reason for reason in house.report().reasons)
    assert house.report().workers[0].stuck
    assert len(house.coordinator.registry.workers) == 1
    beats(house, DEAF * DEFAULTS.stuck_s)
    assert len(house.coordinator.registry.workers) == 0
    assert "no target worker is registered" in house.report().reasons


def test_a_worker_that_speaks_again_gets_sessions_again() -> None:
    house = House(draft=False, target=False)
    house.target = target = house.add(Mute, "target")
    target.mute = True  # type: ignore[attr-defined]
    beats(house, 2 * DEFAULTS.stuck_s)
    target.mute = False  # type: ignore[attr-defined]
    house.coordinator.look_around()
    for worker in house.coordinator.registry.workers.values():
        house.coordinator._peers.probe(worker)
    house.run()
    assert not house.report().degraded
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_the_time_for_which_the_coordinator_stood_still_is_no_silence() -> None:
    house = House(draft=False)
    house.coordinator.tick()
    for _ in range(3):
        house.later_ns += 1000 * S
        house.coordinator.tick()
    assert not house.coordinator.report().degraded
    house.run()
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_a_session_that_raises_when_it_is_looked_after_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(limits=ROOMY)
    house.submit(GUILTY)
    other = house.submit(PROMPT)
    house.coordinator.look_around()
    house.coordinator.pump()
    with monkeypatch.context() as patch:
        real = RunningRequest.awaited

        def awaited(live: RunningRequest) -> object:
            if is_guilty(live.session):
                raise KeyError("x")
            return real(live)

        patch.setattr(RunningRequest, "awaited", awaited)
        house.coordinator.tick()
    ends = [reply for reply in house.replies() if isinstance(reply, Finished | Failed)]
    assert [(type(end), getattr(end, "request", None)) for end in ends] == [
        (Failed, None),
        (Finished, other),
    ]
    check_clean(house)


def test_a_session_that_waits_for_what_nobody_was_asked_ends() -> None:
    house = House(draft=False)
    request = house.submit()
    house.coordinator.look_around()
    house.coordinator.pump()
    for worker in house.coordinator.registry.workers.values():
        worker.turns.owed.clear()
    house.coordinator.tick()
    (failed,) = [reply for reply in house.replies() if isinstance(reply, Finished | Failed)]
    assert isinstance(failed, Failed)
    assert failed.session == request
