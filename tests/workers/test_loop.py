"""A real target worker behind a link: what it answers, what it counts, what it survives."""

import select
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.processes.notification import Notifier
from dovetail.protocol.codec import EVENT, encode
from dovetail.protocol.errors import DovetailError, LinkClosed, UserError
from dovetail.protocol.messages import (
    Close,
    Closed,
    Draft,
    Drafted,
    Drain,
    Engage,
    Event,
    Failed,
    HeldSession,
    Hello,
    Message,
    Observe,
    Open,
    Opened,
    Prefilled,
    Probe,
    Probed,
    Reads,
    Scored,
    Verified,
    Verify,
    VerifyItem,
    Welcome,
)
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.workers import loop
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.loop import serve
from dovetail.workers.models.backends.fused import VERSION
from dovetail.workers.models.segment import Segment
from dovetail.workers.progress import beat
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.serving.registration import Reconnecting
from dovetail.workers.target import TargetWorker
from support.memory_links import MemoryHub, MemoryLink, memory_links
from support.models import VOCABULARY, reference_tokens
from support.patience import PATIENCE_S

EPOCH = 77
PROMPT = (0, 3, 17, 9)
KEY = session_key(0, 0, PROMPT)
PASS = ("linears", "attention", "other", "head")
"""The fine spans of a pass."""


@pytest.fixture(scope="module")
def settings(llama_folder: Path) -> TargetSettings:
    return TargetSettings(model=str(llama_folder))


class Coordinator:
    """The other end of the worker's link; keeps the first Hello."""

    def __init__(self, worker: TargetWorker | DraftWorker[Any], **given: Any) -> None:
        self.hub: MemoryHub = memory_links()
        self.link = self.hub.connect()
        self.worker, self.given = worker, given
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        self.peer, frames = self._receive()
        hello: Hello = EVENT.decode(frames)
        self.hello = hello

    def _serve(self) -> None:
        try:
            serve(self.link, self.worker, **self.given)
        except BaseException as error:
            self.error = error

    def _receive(self) -> tuple[bytes, list[bytes]]:
        while (received := self.hub.receive()) is None:
            assert select.select([self.hub.fileno()], [], [], 30.0)[0], self.error
        return received

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.hub.send(self.peer, encode(message))

    def next(self) -> Event:
        event: Event = EVENT.decode(self._receive()[1])
        return event

    def ask(self, message: Message) -> Event:
        self.send(message)
        return self.next()

    def probe(self) -> Probed:
        answer = self.ask(Probe(epoch=EPOCH, sent_ns=5))
        assert isinstance(answer, Probed)
        return answer

    def end(self) -> None:
        self.hub.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def coordinator(settings: TargetSettings) -> Iterator[Coordinator]:
    """A coordinator that has welcomed the worker."""
    coordinator = Coordinator(open_target_worker(settings, name="target-0", threads=1))
    coordinator.send(Welcome(epoch=EPOCH))
    yield coordinator
    coordinator.end()
    assert coordinator.error is None


def opening(session: int = 1, **changes: Any) -> Open:
    fields = {
        "session": session,
        "key": KEY,
        "prompt": PROMPT,
        "capacity": 40,
        "vocabulary_size": VOCABULARY,
        "sampling": Sampling(),
        "tree": TreeSettings(),
    }
    return Open(**{"epoch": EPOCH, **fields, **changes})


def verifying(*items: tuple[int, int, int], epoch: int = EPOCH) -> Verify:
    return Verify(
        epoch=epoch,
        items=tuple(
            VerifyItem(session=s, round=r, prefix=p, tokens=(), parents=()) for s, r, p in items
        ),
    )


def test_the_introduction_says_what_the_worker_is(
    coordinator: Coordinator, llama_folder: Path
) -> None:
    hello = coordinator.hello
    assert (hello.roles, hello.name, hello.device, hello.threads) == (
        ("target",),
        "target-0",
        "cpu",
        1,
    )
    assert hello.tokenizer is not None
    assert hello.tokenizer.data == (llama_folder / "tokenizer.json").read_bytes()
    assert hello.vocabulary is not None
    assert hello.vocabulary.size == VOCABULARY
    assert hello.fingerprint is not None
    assert hello.fingerprint.kernels == VERSION or "1t" in hello.fingerprint.kernels


def test_a_session_is_opened_verified_and_closed(
    coordinator: Coordinator, llama_folder: Path
) -> None:
    opened = coordinator.ask(opening())
    assert isinstance(opened, Opened)
    assert [name for name, _, _ in opened.spans] == ["prefill"]
    emitted = [opened.bonus]
    for round in range(1, 5):
        verified = coordinator.ask(verifying((1, round, len(PROMPT) + round)))
        assert isinstance(verified, Verified)
        assert [name for name, _, _ in verified.spans] == ["verify", "commit"]
        assert verified.epoch == coordinator.hello.epoch
        emitted.append(verified.items[0].bonus)
    assert emitted == reference_tokens(llama_folder, PROMPT, 5, key=KEY, sampling=Sampling())
    assert coordinator.probe().sessions == 1
    assert isinstance(coordinator.ask(Close(epoch=EPOCH, session=1)), Closed)
    assert isinstance(coordinator.ask(Close(epoch=EPOCH, session=99)), Closed)
    assert coordinator.probe().sessions == 0


def test_a_prompt_is_scored_before_its_session_is_open_and_its_reply_as_it_comes(
    coordinator: Coordinator,
) -> None:
    scored = coordinator.ask(opening(scored=True, logprobs=3))
    assert isinstance(scored, Scored)
    assert (scored.session, scored.start, [len(one.top) for one in scored.logprobs]) == (
        1,
        1,
        [3, 3, 3],
    )
    opened = coordinator.next()
    assert isinstance(opened, Opened)
    assert opened.logprobs is not None
    assert opened.logprobs.top[0] == (opened.bonus, opened.logprobs.logprob)
    verified = coordinator.ask(verifying((1, 1, len(PROMPT) + 1)))
    assert isinstance(verified, Verified)
    (item,) = verified.items
    assert [one.top[0] for one in item.logprobs] == [(item.bonus, item.logprobs[0].logprob)]


def test_a_session_that_is_kept_is_not_open_and_one_that_is_not_cannot_be_gone_on_from(
    coordinator: Coordinator,
) -> None:
    assert coordinator.hello.limits is not None
    keeps = coordinator.hello.limits.kept > 0
    assert isinstance(coordinator.ask(opening()), Opened)
    assert isinstance(coordinator.ask(Close(epoch=EPOCH, session=1, keep=True)), Closed)
    assert coordinator.probe().sessions == 0
    refused = coordinator.ask(opening(2, base=7, kept=2))
    assert isinstance(refused, Failed)
    assert (refused.session, refused.code) == (2, "prefix")
    again = coordinator.ask(opening(2, base=1, kept=2))
    assert isinstance(again, Opened if keeps else Failed)
    assert coordinator.probe().sessions == keeps


def test_a_probe_is_answered_with_clocks_and_counts(coordinator: Coordinator) -> None:
    before = coordinator.probe()
    coordinator.ask(opening())
    after = coordinator.probe()
    assert (before.sent_ns, before.stale) == (5, 0)
    assert before.rss_bytes > 1 << 20
    assert before.busy_ns == 0 < after.busy_ns <= after.clock_ns - before.clock_ns


def test_a_probe_is_answered_in_the_midst_of_a_long_command_and_the_answer_says_so(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, computing, enough = (
        coordinator.worker.model.forward_with_states,
        threading.Event(),
        threading.Event(),
    )

    def compute(*arguments: Any, **named: Any) -> Any:
        computing.set()
        while not enough.is_set():
            beat()
        return real(*arguments, **named)

    monkeypatch.setattr(coordinator.worker.model, "forward_with_states", compute)
    assert not coordinator.probe().busy
    coordinator.send(opening())
    assert computing.wait(PATIENCE_S)
    monkeypatch.setattr(loop, "BUSY_AFTER_S", 0.0)
    assert coordinator.probe().busy
    coordinator.send(verifying((1, 1, 5)))
    assert coordinator.probe().busy  # which comes before two answers that are owed
    enough.set()
    assert [type(coordinator.next()), type(coordinator.next())] == [Opened, Verified]
    assert not coordinator.probe().busy


def test_a_target_records_fine_spans_when_it_is_told_to_and_no_more(
    coordinator: Coordinator,
) -> None:
    coordinator.send(Observe(epoch=EPOCH, fine=True))
    opened = coordinator.ask(opening())
    assert isinstance(opened, Opened)
    assert [name for name, _, _ in opened.spans] == [*PASS, "prefill"]
    verified = coordinator.ask(verifying((1, 1, len(PROMPT) + 1)))
    assert isinstance(verified, Verified)
    assert [name for name, _, _ in verified.spans] == [*PASS, "choose", "verify", "commit"]
    _, began_ns, duration_ns = verified.spans[5]
    assert all(
        began_ns <= start <= start + took <= began_ns + duration_ns
        for _, start, took in verified.spans[:5]
    )
    assert [(session, round, name) for session, round, (name, _, _) in verified.beside] == [
        (1, 0, "decode"),
        (1, 0, "encode"),
        (1, 0, "send"),
        (1, 1, "decode"),
    ]
    coordinator.send(Observe(epoch=EPOCH, fine=False))
    rest = coordinator.probe()
    assert [(session, round, name) for session, round, (name, _, _) in rest.beside] == [
        (1, 1, "encode"),
        (1, 1, "send"),
        (None, None, "decode"),
    ]
    again = coordinator.ask(verifying((1, 2, len(PROMPT) + 2)))
    assert isinstance(again, Verified)
    assert ([name for name, _, _ in again.spans], again.beside) == (["verify", "commit"], ())


def test_duplicates_are_dropped_and_counted(coordinator: Coordinator) -> None:
    coordinator.ask(opening())
    coordinator.send(opening())
    first = coordinator.ask(verifying((1, 1, 5)))
    coordinator.send(verifying((1, 1, 5)), verifying((1, 1, 6)))
    assert coordinator.probe().stale == 3
    second = coordinator.ask(verifying((1, 2, 6)))
    assert isinstance(first, Verified)
    assert isinstance(second, Verified)


def test_a_wrong_prefix_an_early_round_and_an_unknown_session_fail_and_change_nothing(
    coordinator: Coordinator,
) -> None:
    coordinator.ask(opening())
    for item, code in (((1, 1, 6), "prefix"), ((1, 2, 5), "prefix"), ((8, 1, 5), "session")):
        failed = coordinator.ask(verifying(item))
        assert isinstance(failed, Failed)
        assert (failed.session, failed.round, failed.code) == (item[0], item[1], code)
    assert isinstance(coordinator.ask(verifying((1, 1, 5))), Verified)


def test_a_bad_item_hurts_none_of_the_others(coordinator: Coordinator) -> None:
    coordinator.ask(opening(1))
    coordinator.ask(opening(2))
    verified = coordinator.ask(verifying((1, 1, 5), (9, 1, 5), (2, 1, 5), (2, 1, 5)))
    failed = coordinator.next()
    assert isinstance(verified, Verified)
    assert [item.session for item in verified.items] == [1, 2]
    assert verified.items[0].bonus == verified.items[1].bonus
    assert isinstance(failed, Failed)
    assert failed.session == 9
    assert coordinator.probe().stale == 1


def test_commands_of_another_incarnation_are_dropped(coordinator: Coordinator) -> None:
    coordinator.send(opening(epoch=EPOCH + 1), Drain(epoch=1))
    probed = coordinator.probe()
    assert (probed.stale, probed.sessions) == (2, 0)


def test_a_welcome_that_comes_again_is_dropped(coordinator: Coordinator) -> None:
    coordinator.send(Welcome(epoch=EPOCH))
    assert coordinator.probe().stale == 1


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [b"\x80"], [b"\xff" * 1000], [b"a", b"b"], [b"\x91" * 5000]]
)
def test_hostile_bytes_do_not_hurt(coordinator: Coordinator, frames: list[bytes]) -> None:
    coordinator.ask(opening())
    coordinator.hub.send(coordinator.peer, frames)
    assert coordinator.probe().stale == 1
    assert isinstance(coordinator.ask(verifying((1, 1, 5))), Verified)


def test_a_prompt_that_is_too_long_is_answered_in_one_line(coordinator: Coordinator) -> None:
    failed = coordinator.ask(opening(prompt=(3,) * 500, capacity=600))
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round, failed.code) == (1, 0, "prompt_too_long")
    assert "\n" not in failed.text


def test_a_command_for_another_role_is_answered(coordinator: Coordinator) -> None:
    failed = coordinator.ask(
        Draft(
            epoch=EPOCH,
            session=1,
            round=1,
            prefix=5,
            accepted=(),
            bonus=3,
            max_nodes=1,
            max_depth=1,
            max_width=1,
        )
    )
    assert isinstance(failed, Failed)
    assert failed.code == "role"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("boom"), "internal"),
        (MemoryError("no"), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory"),
    ],
)
def test_a_failure_inside_is_answered_and_the_worker_goes_on(
    coordinator: Coordinator,
    error: Exception,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    coordinator.ask(opening())

    def fail(*arguments: object, **named: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.worker.model, "forward_with_states", fail)
        failed = coordinator.ask(verifying((1, 1, 5)))
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round, failed.code) == (1, 1, code)
    assert ("Traceback" in capfd.readouterr().err) == (code == "internal")
    assert isinstance(coordinator.ask(verifying((1, 1, 5))), Verified)


def test_a_session_whose_cache_does_not_fit_is_not_kept_and_the_others_go_on(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.ask(opening(1))
    model = coordinator.worker.model
    with monkeypatch.context() as patch:
        patch.setattr(
            model, "new_cache", lambda capacity, real=model.new_cache: real(capacity * 10**9)
        )
        failed = coordinator.ask(opening(2))
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round, failed.code) == (2, 0, "memory")
    assert "\n" not in failed.text
    assert coordinator.probe().sessions == 1
    assert isinstance(coordinator.ask(verifying((1, 1, 5))), Verified)
    assert isinstance(coordinator.ask(opening(2)), Opened)


def test_a_pass_that_fails_is_answered_for_the_sessions_in_it_alone(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in (1, 2, 3):
        coordinator.ask(opening(session))
    coordinator.ask(verifying((3, 1, 5)))

    def fail(*arguments: object, **named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.worker.model, "forward_with_states", fail)
        coordinator.send(verifying((1, 1, 5), (3, 1, 5), (2, 1, 5)), Probe(epoch=EPOCH, sent_ns=5))
        events = [coordinator.next() for _ in range(3)]
    assert [(event.session, event.code) for event in events if isinstance(event, Failed)] == [
        (1, "memory"),
        (2, "memory"),
    ]
    assert isinstance(events[2], Probed)
    assert isinstance(coordinator.ask(verifying((1, 1, 5), (2, 1, 5), (3, 2, 6))), Verified)


def test_a_session_at_which_a_pass_fails_does_not_keep_the_others_from_theirs(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in (1, 2, 3):
        coordinator.ask(opening(session))
    verifier = coordinator.worker.verifier
    real, guilty = verifier._model.forward_with_states, verifier._sessions[2].cache

    def fail(tokens: object, positions: object, segments: Sequence[Segment], **named: Any) -> Any:
        if any(segment.cache is guilty for segment in segments):
            raise IndexError("out of range")
        return real(tokens, positions, segments, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(verifier._model, "forward_with_states", fail)
        coordinator.send(verifying((1, 1, 5), (2, 1, 5), (3, 1, 5)))
        verified, failed = coordinator.next(), coordinator.next()
    assert isinstance(verified, Verified)
    assert [item.session for item in verified.items] == [1, 3]
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round, failed.code) == (2, 1, "internal")
    assert isinstance(coordinator.ask(verifying((1, 2, 6), (2, 1, 5), (3, 2, 6))), Verified)


def test_no_session_is_verified_again_in_a_round_that_it_has_committed(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in (1, 2):
        coordinator.ask(opening(session))
    verifier = coordinator.worker.verifier
    real, calls = verifier._commit, list[int]()

    def commit(item: Any, verdict: Any) -> Any:
        calls.append(item.session)
        if calls == [1, 2]:
            raise KeyError("x")
        return real(item, verdict)

    monkeypatch.setattr(verifier, "_commit", commit)
    coordinator.send(verifying((1, 1, 5), (2, 1, 5)))
    verified, failed = coordinator.next(), coordinator.next()
    assert isinstance(verified, Verified)
    assert [item.session for item in verified.items] == [2]
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round) == (1, 1)
    assert calls == [1, 2, 2]


def test_a_session_that_cannot_be_judged_fails_alone_and_goes_on(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.ask(opening(1))
    coordinator.ask(opening(2, sampling=Sampling(temperature=1.0)))

    def fail(position: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        noise = coordinator.worker.verifier._sessions[2].noise
        patch.setattr(noise, "at", fail)
        patch.setattr(noise, "prepare", lambda *_: False)  # nor ahead, while the worker is idle
        verified, failed = coordinator.ask(verifying((1, 1, 5), (2, 1, 5))), coordinator.next()
    assert isinstance(verified, Verified)
    assert [item.session for item in verified.items] == [1]
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round, failed.code) == (2, 1, "memory")
    assert isinstance(coordinator.ask(verifying((1, 2, 6), (2, 1, 5))), Verified)


def test_a_session_whose_commit_fails_is_forgotten_and_the_others_go_on(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.ask(opening(1))
    coordinator.ask(opening(2))

    def fail(slots: object, committed: int) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(coordinator.worker.verifier._sessions[2].cache, "keep", fail)
    verified, failed = coordinator.ask(verifying((1, 1, 5), (2, 1, 5))), coordinator.next()
    assert isinstance(verified, Verified)
    assert isinstance(failed, Failed)
    assert (failed.session, failed.code, failed.text) == (2, "internal", "RuntimeError: boom")
    assert coordinator.probe().sessions == 1
    unknown = coordinator.ask(verifying((2, 2, 6)))
    assert isinstance(unknown, Failed)
    assert unknown.code == "session"
    assert isinstance(coordinator.ask(verifying((1, 2, 6))), Verified)


def says_that_it_failed(event: Event) -> bool:
    """Return whether a worker tells of work that nobody had asked of it."""
    return isinstance(event, Failed) and (event.session, event.text) == (None, "RuntimeError: boom")


def test_background_work_that_fails_does_not_end_a_worker(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = threading.Event()

    def fail() -> bool:
        if failing.is_set():
            return False
        failing.set()
        raise RuntimeError("boom")

    monkeypatch.setattr(coordinator.worker, "idle", fail)
    events = [coordinator.ask(opening()), coordinator.next()]  # in any order
    assert failing.is_set()
    assert sum(map(says_that_it_failed, events)) == 1
    assert isinstance(coordinator.ask(verifying((1, 1, 5))), Verified)
    assert "boom" in capfd.readouterr().err


def test_drain_ends_it(settings: TargetSettings) -> None:
    coordinator = Coordinator(open_target_worker(settings, name="t", threads=1))
    coordinator.send(Welcome(epoch=EPOCH), Drain(epoch=EPOCH))
    coordinator.thread.join(PATIENCE_S)
    assert not coordinator.thread.is_alive()
    assert coordinator.error is None


def test_a_refusal_ends_it_with_the_reason(settings: TargetSettings) -> None:
    coordinator = Coordinator(open_target_worker(settings, name="t", threads=1))
    coordinator.send(
        Failed(
            epoch=EPOCH, code="vocabulary", text="id 3 is 'a' in the target and 'b' in the draft"
        )
    )
    coordinator.thread.join(PATIENCE_S)
    assert isinstance(coordinator.error, UserError)
    assert "id 3 is 'a'" in str(coordinator.error)


def test_a_coordinator_that_has_no_room_is_asked_again(settings: TargetSettings) -> None:
    coordinator = Coordinator(open_target_worker(settings, name="t", threads=1))
    coordinator.send(Failed(epoch=EPOCH, code="capacity", text="64 workers are registered"))
    coordinator.thread.join(PATIENCE_S)
    assert isinstance(coordinator.error, LinkClosed), "what is looked for again"
    assert "64 workers are registered" in str(coordinator.error)


def test_a_worker_that_is_not_listened_to_any_more_ends_and_is_not_the_users_mistake(
    settings: TargetSettings,
) -> None:
    coordinator = Coordinator(open_target_worker(settings, name="target-0", threads=1))
    coordinator.send(
        Welcome(epoch=EPOCH),
        Failed(epoch=EPOCH, code="protocol", text="1 messages broke the protocol"),
    )
    coordinator.thread.join(PATIENCE_S)
    coordinator.end()
    assert isinstance(coordinator.error, DovetailError)
    assert not isinstance(coordinator.error, UserError), (
        "serve would end, since no restart mends that"
    )


def test_a_coordinator_that_goes_ends_it(coordinator: Coordinator) -> None:
    coordinator.ask(opening())
    coordinator.hub.close()
    coordinator.thread.join(PATIENCE_S)
    assert (coordinator.thread.is_alive(), coordinator.error) == (False, None)


def test_a_worker_that_is_turned_away_later_ends_with_the_reason(settings: TargetSettings) -> None:
    coordinator = Coordinator(open_target_worker(settings, name="target-0", threads=1))
    coordinator.send(
        Welcome(epoch=EPOCH), Failed(epoch=EPOCH, code="vocabulary", text="id 3 differs")
    )
    coordinator.thread.join(PATIENCE_S)
    coordinator.end()
    assert isinstance(coordinator.error, UserError)
    assert "id 3 differs" in str(coordinator.error)


def test_parts_of_a_prompt_are_sent_before_the_answer_and_before_a_failure(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(width=64, dtype="float16", vocabulary_size=VOCABULARY)
    part, opened = coordinator.ask(opening(1, features=reads)), coordinator.next()
    assert isinstance(part, Prefilled)
    assert (part.session, part.start, part.features.shape) == (1, 0, (len(PROMPT), 64))
    assert isinstance(opened, Opened)

    def fail(*arguments: object, **named: object) -> None:
        raise MemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr("dovetail.workers.sessions.opener.outcome_of", fail)
        part, failed = coordinator.ask(opening(2, features=reads)), coordinator.next()
    assert isinstance(part, Prefilled)
    assert isinstance(failed, Failed)
    assert (failed.session, failed.round, failed.code) == (2, 0, "memory")
    assert coordinator.probe().sessions == 1


# -- a coordinator that goes, and one that comes ---------------------------------------------------


class Coordinators:
    """One coordinator after the other, and a worker that looks for the next one. None answers until
    it `appears`."""

    def __init__(self, worker: TargetWorker, *, most_s: float = 30.0) -> None:
        self.worker, self.news = worker, list[str]()
        self.hub: MemoryHub = memory_links()
        self.outcome: list[object] = []
        self.peer = b""
        link = self.hub.connect()
        self._thread = threading.Thread(
            target=self._serve,
            args=(link, Reconnecting(lambda: self.hub.connect(), most_s, self.news.append)),
        )
        self._thread.start()

    def _serve(self, link: MemoryLink, reconnecting: Reconnecting) -> None:
        try:
            self.outcome.append(serve(link, self.worker, reconnecting=reconnecting))
        except BaseException as error:
            self.outcome.append(error)

    def appears(self) -> None:
        self.hub = memory_links()

    def next(self) -> Event:
        while (received := self.hub.receive()) is None:
            assert select.select([self.hub.fileno()], [], [], 30.0)[0], self.outcome
        self.peer, frames = received
        event: Event = EVENT.decode(frames)
        return event

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.hub.send(self.peer, encode(message))

    def ask(self, message: Message) -> Event:
        self.send(message)
        return self.next()

    def welcomes(self, epoch: int) -> Hello:
        """Somebody registers, and is welcome."""
        hello = self.next()
        assert isinstance(hello, Hello)
        self.send(Welcome(epoch=epoch))
        return hello

    def end(self) -> object:
        """Wait for the worker to end, and return how it did."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.hub.close()
        (outcome,) = self.outcome
        return outcome


@pytest.fixture
def coordinators(settings: TargetSettings) -> Coordinators:
    return Coordinators(open_target_worker(settings, name="target-0", threads=1))


def test_a_worker_whose_coordinator_has_gone_says_what_it_holds_and_keeps_what_the_next_one_wants(
    coordinators: Coordinators,
) -> None:
    first = coordinators.welcomes(EPOCH)
    assert isinstance(coordinators.ask(opening(1)), Opened)
    assert isinstance(coordinators.ask(opening(2)), Opened)
    assert isinstance(coordinators.ask(Close(epoch=EPOCH, session=2, keep=True)), Closed)
    coordinators.hub.close()
    coordinators.appears()
    second = coordinators.welcomes(EPOCH + 1)
    held = (HeldSession(session=2, rows=len(PROMPT)), HeldSession(session=1, rows=len(PROMPT)))
    news = {"epoch": second.epoch, "served": EPOCH, "held": held}
    assert second == first.model_copy(update=news)
    assert second.epoch != first.epoch
    coordinators.send(verifying((1, 1, 5)), Drain(epoch=EPOCH))  # what one before it has said
    probed = coordinators.ask(Probe(epoch=EPOCH + 1, sent_ns=5))
    assert isinstance(probed, Probed)
    assert (probed.epoch, probed.sessions, probed.stale) == (second.epoch, 0, 2)
    unknown, gone = (
        coordinators.ask(verifying((1, 1, 5), epoch=EPOCH + 1)),
        coordinators.ask(opening(3, epoch=EPOCH + 1, base=2, kept=2)),
    )
    assert isinstance(unknown, Failed)
    assert isinstance(gone, Failed)
    assert [(failed.session, failed.code) for failed in (unknown, gone)] == [
        (1, "session"),
        (3, "prefix"),
    ]
    again = coordinators.ask(opening(1, epoch=EPOCH + 1))
    assert isinstance(again, Opened)
    assert again.epoch == second.epoch
    coordinators.send(Drain(epoch=EPOCH + 1))
    assert coordinators.end() == Drain(epoch=EPOCH + 1)
    assert coordinators.news == [
        "the coordinator disconnected; reconnecting for up to 30 s",
        "registered again at memory",
    ]


def test_a_worker_that_its_coordinator_does_not_know_any_more_says_hello_again(
    coordinators: Coordinators,
) -> None:
    first = coordinators.welcomes(EPOCH)
    assert isinstance(coordinators.ask(opening(1)), Opened)
    before = coordinators.peer
    coordinators.send(
        Failed(
            epoch=EPOCH,
            code="session",
            text="this peer is not registered here: send Hello first, or reconnect",
        )
    )
    second = coordinators.welcomes(EPOCH)
    assert (coordinators.peer != before, second.epoch != first.epoch) == (True, True)
    probed = coordinators.ask(Probe(epoch=EPOCH, sent_ns=5))
    assert isinstance(probed, Probed)
    assert probed.sessions == 0
    coordinators.send(Drain(epoch=EPOCH))
    assert coordinators.end() == Drain(epoch=EPOCH)


def test_a_worker_that_computes_for_a_coordinator_that_has_gone_gives_it_up_at_the_next_layer(
    coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators.welcomes(EPOCH)
    computing = threading.Event()

    def compute(*arguments: object, **named: object) -> None:
        computing.set()
        while True:
            beat()

    with monkeypatch.context() as patch:
        patch.setattr(coordinators.worker.model, "forward_with_states", compute)
        coordinators.send(opening(1))
        assert computing.wait(PATIENCE_S)
        coordinators.hub.close()
        coordinators.appears()
        coordinators.welcomes(EPOCH + 1)
    assert isinstance(coordinators.ask(opening(1, epoch=EPOCH + 1)), Opened)
    coordinators.send(Drain(epoch=EPOCH + 1))
    assert coordinators.end() == Drain(epoch=EPOCH + 1)


def test_a_worker_that_was_let_go_while_it_computed_looks_for_nobody(
    coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators.welcomes(EPOCH)
    computing = threading.Event()

    def compute(*arguments: object, **named: object) -> None:
        computing.set()
        while True:
            beat()

    monkeypatch.setattr(coordinators.worker.model, "forward_with_states", compute)
    coordinators.send(opening(1))
    assert computing.wait(PATIENCE_S)
    drain = Drain(epoch=EPOCH, dismissed=True)
    coordinators.send(drain)
    coordinators.hub.close()
    assert (coordinators.end(), coordinators.news) == (drain, [])


def test_a_coordinator_that_goes_before_it_has_answered_is_looked_for_too(
    coordinators: Coordinators,
) -> None:
    assert isinstance(coordinators.next(), Hello)
    coordinators.hub.close()
    coordinators.appears()
    coordinators.welcomes(EPOCH)
    coordinators.send(Drain(epoch=EPOCH))
    assert coordinators.end() == Drain(epoch=EPOCH)


def test_a_coordinator_that_does_not_come_back_is_given_up(settings: TargetSettings) -> None:
    coordinators = Coordinators(
        open_target_worker(settings, name="target-0", threads=1), most_s=0.4
    )
    coordinators.welcomes(EPOCH)
    gone_s = time.monotonic()
    coordinators.hub.close()
    assert coordinators.end() is None
    assert time.monotonic() - gone_s >= 0.4


def test_a_coordinator_that_comes_and_refuses_ends_it_with_the_reason(
    coordinators: Coordinators,
) -> None:
    coordinators.welcomes(EPOCH)
    coordinators.hub.close()
    coordinators.appears()
    assert isinstance(coordinators.next(), Hello)
    coordinators.send(Failed(epoch=EPOCH + 1, code="version", text="another release"))
    outcome = coordinators.end()
    assert isinstance(outcome, UserError)
    assert "another release" in str(outcome)


def test_a_draft_worker_closes_its_sessions_and_holds_what_is_left(llama_folder: Path) -> None:
    worker = open_draft_worker(
        DraftSettings(model=str(llama_folder), device="cpu"), name="draft-0", threads=1, target=""
    )
    for session in (1, 2):
        worker.handle(opening(session))
    worker.handle(Close(epoch=EPOCH, session=2, keep=True))
    assert (worker.sessions, len(worker.kept)) == (1, 1)
    kept = worker.suspend()
    assert (worker.sessions, len(worker.kept), worker.idle()) == (0, 2, False)
    assert {one.session: one.rows for one in kept.held} == {1: len(PROMPT), 2: len(PROMPT)}
    kept.only({1})
    assert len(worker.kept) == 1
    kept.only(())
    assert len(worker.kept) == 0


def test_a_newcomer_reports_the_sessions_that_it_opens_except_for_trials(
    settings: TargetSettings,
) -> None:
    reports = list[str]()
    listener = Notifier().part(
        "", lambda: reports.append("serves"), lambda order: reports.append(str(order.session))
    )
    worker = open_target_worker(settings, name="target-0", threads=1)
    coordinator = Coordinator(worker, standby=True, listener=listener)
    coordinator.send(Welcome(epoch=EPOCH))
    assert isinstance(coordinator.ask(opening(1)), Opened)  # a trial
    coordinator.send(Engage(epoch=EPOCH))
    assert isinstance(coordinator.ask(opening(2)), Opened)
    assert reports == ["serves", "2"]
    coordinator.end()


# -- growth ahead ----------------------------------------------------------------------------------


class Watched:
    """A draft worker whose passes ahead can be stopped in the middle; notes what it does in which
    order."""

    def __init__(self, worker: DraftWorker[Any]) -> None:
        self.done: list[str] = []
        self.inside, self.go_on = threading.Event(), threading.Event()
        self._worker, engine = worker, worker.engine
        self._grow, self._draft = engine.grow_all_ahead, engine.draft_all
        engine.grow_all_ahead, engine.draft_all = self._grow_ahead, self._drafted

    def _grow_ahead(self, sessions: Any) -> Any:
        if not (grown := self._grow(sessions)):
            return grown
        self.done.append("pass")
        if self.done[-2:] == ["pass"] * 2:  # the second one lasts until it is told otherwise
            self.inside.set()
            assert self.go_on.wait(PATIENCE_S)
        return grown

    def _drafted(self, *arguments: Any, **named: Any) -> Any:
        self.done.append("draft")
        return self._draft(*arguments, **named)


def drafting(round: int, prefix: int, **changes: Any) -> Draft:
    fields = {
        "accepted": (),
        "bonus": 3,
        "max_nodes": 8,
        "max_depth": 4,
        "max_width": 3,
        "ahead": True,
    }
    return Draft(epoch=EPOCH, session=1, round=round, prefix=prefix, **{**fields, **changes})


@pytest.fixture
def drafter(llama_folder: Path) -> Iterator[Coordinator]:
    """A coordinator that has welcomed a draft worker with one session."""
    worker = open_draft_worker(
        DraftSettings(model=str(llama_folder), device="cpu"), name="draft-0", threads=1, target=""
    )
    coordinator = Coordinator(worker)
    coordinator.send(Welcome(epoch=EPOCH))
    assert isinstance(
        coordinator.ask(opening(tree=TreeSettings(policy="dynamic", gamma=8, depth=4, width=3))),
        Opened,
    )
    yield coordinator
    coordinator.end()
    assert coordinator.error is None


def test_an_order_that_comes_during_a_pass_ahead_waits_for_no_other(drafter: Coordinator) -> None:
    watched = Watched(drafter.worker)
    assert isinstance(drafter.ask(drafting(1, 5)), Drafted)
    assert watched.inside.wait(PATIENCE_S)
    drafter.send(drafting(2, 6, ahead=False))
    watched.go_on.set()
    drafted = drafter.next()
    assert isinstance(drafted, Drafted)
    assert drafted.ahead > 0
    assert watched.done == ["draft", "pass", "pass", "draft"]


def test_a_worker_is_busy_while_it_grows_ahead(drafter: Coordinator) -> None:
    drafted = drafter.ask(drafting(1, 5))
    assert isinstance(drafted, Drafted)
    work_ns = sum(duration for name, _, duration in drafted.spans if name == "draft")
    told, deadline = [drafter.probe()], time.monotonic() + PATIENCE_S
    while not any(name == "grow" for probed in told for *_, (name, _, _) in probed.beside):
        assert time.monotonic() < deadline
        told.append(drafter.probe())
    beside = [span for probed in told for span in probed.beside]
    assert {(session, round, name) for session, round, (name, _, _) in beside} <= {
        (1, 1, "grow"),
        (None, None, "prepare"),
    }
    assert told[-1].busy_ns >= work_ns + sum(duration for _, _, (_, _, duration) in beside)


def test_a_pass_ahead_that_fails_ends_neither_the_worker_nor_the_session(
    drafter: Coordinator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, failed = drafter.worker.engine, threading.Event()

    def fail(*arguments: object) -> None:
        failed.set()
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "steps_ahead", fail)
        assert isinstance(drafter.ask(drafting(1, 5)), Drafted)
        assert failed.wait(PATIENCE_S)
        assert says_that_it_failed(drafter.next())
        assert isinstance(drafter.ask(drafting(2, 6)), Drafted)
        assert says_that_it_failed(drafter.next())
    assert drafter.probe().sessions == 1
    assert "boom" in capfd.readouterr().err
