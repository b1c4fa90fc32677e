"""The coordinator over in-memory links, with scripted workers: one thread, one step after the
other, no model and no clock to wait for."""

import random
import statistics
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measures.round_calls import count

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.errors import PeerBusy, RequestError
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import (
    MAX_CANDIDATES,
    MAX_STRIKES,
    Command,
    Draft,
    Drafted,
    Emitted,
    Event,
    Failed,
    Feed,
    Fingerprint,
    Finished,
    Hello,
    Message,
    Prefilled,
    Probe,
    Probed,
    Reads,
    Recorded,
    Submit,
    Verified,
    VerifiedItem,
    Verify,
    Welcome,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.vocabulary import TokenTable
from dovetail.runtime.client import Client
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine import outgoing, worker_events
from dovetail.runtime.engine.coordinator import DEFAULTS
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.registry import MAX_CLIENTS, MAX_WORKERS, Registry
from dovetail.runtime.session.actions import NextRound
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.metrics import RoundTimes
from support.houses import PROMPT, House, pumped
from support.scripted import (
    READS,
    VOCABULARY,
    DrawingDraft,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    continuation,
    hello,
    tokenizer_bytes,
)


def test_output_equals_the_target_alone_with_and_without_a_draft() -> None:
    expected = continuation(PROMPT, 60)
    assert list(House().complete().result.token_ids) == expected
    assert list(House(draft=False).complete().result.token_ids) == expected
    assert list(House().complete(speculate=False).result.token_ids) == expected


@pytest.mark.parametrize("tree", [(1, 1, 1), (2, 8, 1), (15, 8, 10), (64, 3, 4)])
def test_output_does_not_depend_on_the_tree(tree: tuple[int, int, int]) -> None:
    gamma, depth, width = tree
    finished = House().complete(
        tree=TreeSettings(policy="dynamic", insist=True, gamma=gamma, depth=depth, width=width)
    )
    assert list(finished.result.token_ids) == continuation(PROMPT, 60)


def test_interleaved_sessions_each_get_their_own_continuation() -> None:
    house = House()
    prompts = {house.submit((i, i + 1)): (i, i + 1) for i in range(1, 30)}
    finished = [r for r in house.replies() if isinstance(r, Finished)]
    assert len(finished) == len(prompts)
    for reply in finished:
        assert list(reply.result.token_ids) == continuation(prompts[reply.request], 60)


def test_several_sessions_share_a_verify_message() -> None:
    house = House()
    for i in range(1, 9):
        house.submit((i, 2), speculate=False)
    house.run()
    assert house.target is not None
    assert max(len(c.items) for c in house.target.seen if c.type == "verify") > 1


def test_streamed_tokens_and_text_add_up_to_the_result() -> None:
    house = House()
    house.submit()
    replies = house.replies()
    result = next(r.result for r in replies if isinstance(r, Finished))
    emitted = [r for r in replies if isinstance(r, Emitted)]
    assert tuple(t for e in emitted for t in e.tokens) == result.token_ids
    assert "".join(e.text for e in emitted) == result.text
    assert sum(sum(e.drafted) for e in emitted) == result.accepted_tokens
    assert all(len(e.drafted) == len(e.tokens) for e in emitted)


def test_a_speculating_session_needs_fewer_rounds_and_says_tau() -> None:
    result = House().complete().result
    assert result.rounds < result.completion_tokens - 1
    assert result.tau == pytest.approx((result.completion_tokens - 1) / result.rounds)
    assert result.acceptance_rate == pytest.approx(result.accepted_tokens / result.drafted_tokens)


@given(
    seed=st.integers(0, 2**32),
    reads=st.sampled_from([None, READS]),
    policies=st.lists(st.sampled_from(["dynamic", "goodput"]), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_no_schedule_of_late_and_duplicate_events_changes_a_token(
    seed: int, reads: Reads | None, policies: list[str]
) -> None:
    rng = random.Random(seed)
    house = House(reads=reads)
    prompts = {
        house.submit((i, 9), max_tokens=30, tree=TreeSettings(policy=policy)): (i, 9)
        for i, policy in enumerate(policies, 1)
    }
    said: list[tuple[ScriptedWorker, list[bytes]]] = []
    for worker in house.workers:
        send = worker.link.send
        worker.link.send = lambda frames, worker=worker, send=send: (
            said.append((worker, list(frames))),
            send(frames),
        )[1]  # type: ignore[method-assign,misc]
    for _ in range(60):
        house.coordinator.pump()
        rng.choice(house.workers).step()
        for worker, frames in rng.sample(said, min(len(said), rng.randint(0, 3))):
            worker.link.send(frames)
    finished = [r for r in house.replies() if isinstance(r, Finished)]
    assert {r.request: list(r.result.token_ids) for r in finished} == {
        request: continuation(prompt, 30) for request, prompt in prompts.items()
    }


def test_events_of_another_incarnation_are_dropped() -> None:
    house = House()
    house.submit()
    worker = house.target
    assert worker is not None
    forged = Verified(
        epoch=worker.epoch + 1,
        items=(VerifiedItem(session=1, round=1, accepted=(), bonus=3, margins=(1.0,)),),
    )
    worker.link.send(encode(forged))
    assert next(r for r in house.replies() if isinstance(r, Finished)).result.token_ids == tuple(
        continuation(PROMPT, 60)
    )
    assert house.report().stale >= 1


def test_a_request_that_is_cancelled_while_its_prompt_is_read_ends_as_soon_as_that_is_done() -> (
    None
):
    house = House()
    reading: list[Callable[[], None]] = []
    house.coordinator._defer = lambda work, done: reading.append(lambda: done(work()))
    house.submit()
    house.client.cancel(1)
    house.run()
    house.client.submit(tokens=PROMPT, max_tokens=5)
    house.run()
    for read in reading:
        read()
    results = [r.result for r in house.replies() if isinstance(r, Finished)]
    assert sorted((r.finish_reason, r.completion_tokens) for r in results) == [
        ("cancelled", 0),
        ("length", 5),
    ]
    assert all(not worker.logs for worker in house.workers)
    assert house.report().sessions == 0


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    house = House()
    other = house.connect()
    other.submit(tokens=PROMPT, max_tokens=400)
    house.coordinator.pump()
    other.close()
    house.run()
    report = house.report()
    assert (report.sessions, report.cancelled) == (0, 1)
    assert all(not worker.logs for worker in house.workers)


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths() -> None:
    house = House()
    house.submit((3,) * 600)
    failed = next(r for r in house.replies() if isinstance(r, Failed))
    assert failed.code == "prompt_too_long"
    assert "600" in failed.text
    assert "512" in failed.text


def test_max_tokens_is_capped_by_the_room_in_the_context() -> None:
    prompt = (4,) * 500
    result = House().complete(prompt=prompt, max_tokens=300).result
    assert result.completion_tokens <= 12
    assert list(result.token_ids) == continuation(prompt, 12)


def test_a_draft_of_another_vocabulary_is_refused_with_the_entries_named() -> None:
    house = House(draft=False)
    stranger = house.add(ScriptedDraft, "draft", tokenizer=tokenizer_bytes(prefix="v"))
    assert stranger.failures[0].code == "vocabulary"
    assert "id 1 is 'w1' in the target and 'v1' in the draft" in stranger.failures[0].text
    assert len(house.report().workers) == 1


def test_of_a_draft_only_a_table_of_its_tokens_is_kept() -> None:
    house = House(draft=False)
    packed = TokenTable.read(tokenizer_bytes()).packed
    table = Array(dtype="uint8", shape=(len(packed),), data=packed)
    house.add(ScriptedDraft, "draft", table=table)
    kept = next(w for w in house.coordinator.registry.workers.values() if w.plays("draft"))
    assert kept.hello.tokenizer is kept.hello.table is None
    assert kept.language is not None
    assert (kept.language.tokenizer, kept.language.table.packed) == (b"", packed)


def test_a_table_of_tokens_that_another_worker_sent_is_not_read_again() -> None:
    house = House(draft=False, target=False)
    packed = TokenTable.read(tokenizer_bytes()).packed
    for _ in range(2):
        table = Array(dtype="uint8", shape=(len(packed),), data=bytes(bytearray(packed)))
        house.add(ScriptedTarget, "target", table=table)
    house.add(ScriptedDraft, "draft", table=table)
    tables = [w.language and w.language.table for w in house.coordinator.registry.workers.values()]
    assert len(tables) == 3
    assert tables[0] is tables[1] is tables[2] is not None


def test_a_target_that_comes_later_turns_a_draft_of_another_vocabulary_away() -> None:
    house = House(draft=False, target=False)
    stranger = house.add(ScriptedDraft, "draft", tokenizer=tokenizer_bytes(prefix="v"))
    house.add(ScriptedTarget, "target")
    assert stranger.failures[0].code == "vocabulary"
    assert [w.roles for w in house.report().workers] == [("target",)]


def test_a_draft_without_a_model_goes_with_any_target() -> None:
    house = House(draft=False)
    draft = house.add(ScriptedDraft, "draft", vocabulary=None)
    assert draft.failures == []
    result = house.complete().result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    assert result.accepted_tokens > 0
    early = House(draft=False, target=False)
    assert (
        early.add(ScriptedDraft, "draft", vocabulary=None).failures
        == early.add(ScriptedTarget, "target").failures
        == []
    )
    assert len(early.report().workers) == 2


def test_a_target_of_another_vocabulary_takes_no_draft_from_the_target_that_is_there() -> None:
    house = House()
    stranger = house.add(ScriptedTarget, "target", tokenizer=tokenizer_bytes(prefix="v"))
    assert stranger.failures[0].code == "vocabulary"
    assert house.draft is not None
    assert not house.draft.failures
    assert [worker.name for worker in house.report().workers] == ["target", "draft"]


def test_a_target_without_a_vocabulary_is_refused() -> None:
    stranger = House(target=False).add(ScriptedTarget, "target", vocabulary=None)
    assert stranger.failures[0].code == "protocol"
    assert "without vocabulary and tokenizer" in stranger.failures[0].text


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            Sampling(logit_bias=((3, 1.0), (VOCABULARY, 1.0))),
            f"token id {VOCABULARY} of logit_bias is beyond the vocabulary of {VOCABULARY}",
        ),
        (Sampling(min_tokens=61), "min_tokens (61) is more than max_tokens (60)"),
    ],
)
def test_a_sampling_that_does_not_fit_is_refused_by_name(sampling: Sampling, words: str) -> None:
    house = House()
    house.submit(sampling=sampling)
    failed = next(r for r in house.replies() if isinstance(r, Failed))
    assert failed.code == "settings"
    assert words in failed.text
    assert (house.report().totals.refused_requests, house.report().failed) == (1, 0)


@pytest.mark.parametrize("version", [(9, 0), (1, 0)])
def test_another_version_is_refused_with_both_named(version: tuple[int, int]) -> None:
    house = House(draft=False)
    stranger = house.add(ScriptedDraft, "draft", version=version)
    assert stranger.failures[0].code == "version"
    assert ".".join(map(str, version)) in stranger.failures[0].text


def test_a_client_is_told_that_its_request_cannot_be_read_and_a_flood_is_not_answered() -> None:
    house = House()
    body = msgpack.packb({"type": "submit", "epoch": house.client.epoch, "request": 7})
    for _ in range(3 * MAX_STRIKES):
        house.client._link.send([body])
    house.run()
    told = house.replies()
    assert 1 < len(told) <= MAX_STRIKES
    assert {(failed.code, failed.session) for failed in told[:-1]} == {("protocol", 7)}
    assert "cannot read this request: submit.sampling: Field required" in told[0].text
    assert "version" in told[0].text


def test_a_message_that_cannot_be_read_about_a_request_that_runs_ends_nothing() -> None:
    house = House()
    about = {"epoch": house.client.epoch, "request": house.submit(max_tokens=12)}
    body = msgpack.packb({"type": "cancel", "why": "no such field", **about})
    house.client._link.send([body])
    house.run()
    told = house.replies()
    assert not any(isinstance(message, Failed) for message in told)
    assert sum(isinstance(message, Finished) for message in told) == 1
    assert house.report().refused == 1


def test_a_worker_that_keeps_breaking_the_protocol_is_let_go() -> None:
    house = House()
    assert house.draft is not None
    for _ in range(MAX_STRIKES):
        house.draft.link.send([b"\xc1"])
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    house.draft.register()  # it is ignored from now on
    house.run()
    assert [w.roles for w in house.report().workers] == [("target",)]
    assert house.draft.failures[0].code == "protocol"


class LyingDraft(ScriptedDraft):
    """Proposes what is no tree over the vocabulary."""

    def propose(self, command, log):  # type: ignore[no-untyped-def]
        return Drafted(
            epoch=self.epoch,
            session=command.session,
            round=command.round,
            tokens=(VOCABULARY + 1,),
            parents=(-1,),
            scores=(0.0,),
            grown=1,
            hit=False,
        )


class LyingTarget(ScriptedTarget):
    """Claims to have accepted nodes that were never sent."""

    def work(self, command):  # type: ignore[no-untyped-def]
        if command.type == "open":
            return super().work(command)
        return [
            Verified(
                epoch=self.epoch,
                items=tuple(
                    VerifiedItem(
                        session=i.session,
                        round=i.round,
                        accepted=(900,),
                        bonus=1,
                        margins=(1.0, 1.0),
                    )
                    for i in command.items
                ),
            )
        ]


def test_a_proposal_that_is_no_tree_costs_only_the_speculation() -> None:
    house = House(draft=False)
    house.add(LyingDraft, "draft")
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    assert house.report().refused >= 1


def test_a_verdict_about_nodes_that_were_not_sent_ends_the_request_with_an_error() -> None:
    house = House(target=False)
    house.add(LyingTarget, "target")
    house.submit()
    failed = next(r for r in house.replies() if isinstance(r, Failed))
    assert failed.code == "internal"
    assert house.report().sessions == 0


def test_a_worker_that_speaks_out_of_its_role_changes_nothing() -> None:
    house = House()
    assert house.target is not None
    assert house.draft is not None
    target, draft = house.target, house.draft
    request = house.submit()
    for _ in range(2):  # now round 1 of the draft is due, and then that of the target
        house.coordinator.pump()
        target.step()
    draft.link.send(
        encode(
            Verified(
                epoch=draft.epoch,
                items=(VerifiedItem(session=1, round=1, accepted=(), bonus=3, margins=(1.0,)),),
            )
        )
    )
    house.coordinator.pump()
    draft.step()
    house.coordinator.pump()
    target.link.send(
        encode(
            Drafted(
                epoch=target.epoch,
                session=1,
                round=1,
                tokens=(),
                parents=(),
                scores=(),
                grown=0,
                hit=False,
            )
        )
    )
    assert list(house.client.complete(request).result.token_ids) == continuation(PROMPT, 60)
    assert house.report().stale == 2


class SilentDraft(ScriptedDraft):
    """Alive, but never proposes."""

    def work(self, command):  # type: ignore[no-untyped-def]
        return super().work(command) if command.type == "open" else []


def test_a_draft_that_is_stuck_is_done_without_after_a_while() -> None:
    house = House(draft=False)
    house.add(SilentDraft, "draft")
    request = house.submit()
    assert not any(isinstance(r, Finished) for r in house.replies())
    house.later_ns = int(DEFAULTS.stuck_s * 1e9) + 1
    house.coordinator.tick()
    assert list(house.client.complete(request).result.token_ids) == continuation(PROMPT, 60)
    assert house.complete().result.drafted_tokens == 0, "the stuck worker gets no new session"


class BoastfulDraft(ScriptedDraft):
    """Claims more work than a message can say."""

    def propose(self, command, log):  # type: ignore[no-untyped-def]
        return super().propose(command, log).model_copy(update={"grown": (1 << 63) - 1})


def test_absurd_counts_are_refused_before_they_are_summed() -> None:
    house = House(draft=False)
    house.add(BoastfulDraft, "draft")
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    assert house.report().refused >= 1


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_whose_answer_cannot_be_read_is_let_go_at_once_since_nobody_can_wait_for_it(
    role: str,
) -> None:
    house = House()
    house.submit()
    worker = house.target if role == "target" else house.draft
    assert worker is not None
    send = worker.link.send
    worker.link.send = lambda frames: send([b"\xc1"] if b"opened" in frames[0] else frames)  # type: ignore[method-assign]
    house.run()
    assert worker.failures[0].code == "protocol"
    worker.link.send = send  # type: ignore[method-assign]
    house.lose(worker)
    house.add(ScriptedTarget if role == "target" else ScriptedDraft, role)
    finished = next(r for r in house.replies() if isinstance(r, Finished))
    assert list(finished.result.token_ids) == continuation(PROMPT, 60)


def test_our_own_fault_ends_the_sessions_that_it_concerns_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()

    def fail(self: Session, item: VerifiedItem, features: Array | None, times: RoundTimes) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "verified", fail)
        house.submit()
        failed = next(r for r in house.replies() if isinstance(r, Failed))
    assert failed.code == "internal"
    assert "ZeroDivisionError: a bug" in failed.text
    assert house.report().sessions == 0
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_there_is_a_limit_to_the_workers_that_may_register() -> None:
    house = House(draft=False, target=False)
    workers = [house.add(ScriptedDraft, "draft") for _ in range(MAX_WORKERS + 1)]
    assert [f.code for w in workers for f in w.failures] == ["capacity"]
    assert len(house.report().workers) == MAX_WORKERS


def test_however_many_clients_there_are_a_worker_finds_its_place() -> None:
    registry = Registry(epoch=1)
    client = Hello(epoch=7, roles=("client",), name="me", host="here", pid=1)
    for number in range(MAX_CLIENTS):
        registry.admit(b"client %d" % number, client, None, 0)
    with pytest.raises(RequestError, match="which is the limit") as refused:
        registry.admit(b"one more", client, None, 0)
    assert refused.value.code == "capacity"
    for number in range(MAX_WORKERS):
        registry.admit(b"worker %d" % number, hello("target", epoch=number), None, 0)


@pytest.mark.parametrize("max_tokens", range(2, 12))
def test_no_more_is_accepted_than_was_drafted(max_tokens: int) -> None:
    result = (
        House()
        .complete(
            max_tokens=max_tokens,
            tree=TreeSettings(policy="dynamic", insist=True, gamma=2, depth=1, width=2),
        )
        .result
    )
    assert result.accepted_tokens <= result.drafted_tokens
    assert result.drafted_tokens <= 2 * result.rounds


def test_a_client_that_reads_late_misses_nothing() -> None:
    house = House()
    requests = [
        house.client.submit(tokens=(i % 90 + 1, 2), max_tokens=40, seed=1, speculate=False)
        for i in range(60)
    ]
    house.run()
    submitted = 0
    while submitted < 3000:  # more replies than its queue holds
        house.client.submit(tokens=(), max_tokens=1)
        submitted += 1
        house.run()
    replies: list[object] = []
    while (reply := house.client.receive(0)) is not None:
        replies.append(reply)
        house.coordinator.tick()
    finished = {r.request: list(r.result.token_ids) for r in replies if isinstance(r, Finished)}
    assert finished == {
        request: continuation((i % 90 + 1, 2), 40) for i, request in enumerate(requests)
    }
    assert sum(isinstance(r, Failed) for r in replies) == submitted


def test_a_client_that_never_reads_is_let_go_and_told_so_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "MAX_BYTES_WAITING", 30_000)
    house = House()
    house.hub.send = lambda peer, frames, send=house.hub.send: _busy(peer, frames, send, house)  # type: ignore[method-assign,misc]
    other = house.connect()
    house.deaf = other._link._peer  # type: ignore[attr-defined]
    for _ in range(52):
        other.submit(tokens=(), max_tokens=1)
    house.run()
    house.deaf = None  # type: ignore[attr-defined]
    other.submit(tokens=PROMPT, max_tokens=1)
    failed = other.receive(0)
    assert isinstance(failed, Failed)
    assert "send Hello" in failed.text
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_the_last_thing_that_a_client_hears_of_each_request_is_that_it_read_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "MAX_BYTES_WAITING", 20_000)
    house = House()
    house.hub.send = lambda peer, frames, send=house.hub.send: _busy(peer, frames, send, house)  # type: ignore[method-assign,misc]
    other = house.connect()
    requests = [
        other.submit(tokens=(i, 2), max_tokens=60, seed=1, record=True) for i in range(1, 5)
    ]
    house.coordinator.pump()
    house.deaf = other._link._peer  # type: ignore[attr-defined]
    house.run()
    assert house.coordinator.idle
    house.coordinator.tick()
    house.deaf = None  # type: ignore[attr-defined]
    house.coordinator.tick()
    said = [REPLY.decode(frames) for frames in other._link.inbox]  # type: ignore[attr-defined]
    assert all(
        isinstance(reply, Failed) and "has read nothing" in reply.text for reply in said[-5:]
    )
    assert sorted(reply.session for reply in said[-5:-1]) == requests  # type: ignore[union-attr,type-var]
    assert said[-1].session is None  # type: ignore[union-attr]
    report = house.report()
    assert report.totals.let_go == 1
    assert any("is not reading and is disconnected" in words for words in report.decisions)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def _busy(peer, frames, send, house):  # type: ignore[no-untyped-def]
    if peer == getattr(house, "deaf", None):
        raise PeerBusy("full")
    send(peer, frames)


def test_only_a_client_on_this_machine_may_stop_the_coordinator() -> None:
    house = House()
    far = Client(pumped(house, house.hub.connect(PeerKey("laptop", ("client",), "0" * 40))))
    far.stop()
    failed = far.receive(0)
    assert isinstance(failed, Failed)
    assert failed.code == "role"
    assert not house.coordinator.ending
    house.client.stop()
    house.run()
    assert house.coordinator.ending


def test_a_worker_that_is_not_registered_is_not_listened_to() -> None:
    house = House()
    link = house.hub.connect()
    link.send(
        encode(
            Verified(
                epoch=1,
                items=(VerifiedItem(session=1, round=1, accepted=(), bonus=1, margins=(1.0,)),),
            )
        )
    )
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    assert house.report().stale >= 1


def test_status_tells_workers_round_trips_and_tau() -> None:
    house = House()
    house.complete()
    report = house.report()
    assert {w.roles for w in report.workers} == {("target",), ("draft",)}
    assert all(w.round_trip_us is not None and w.clock_bound_us is not None for w in report.workers)
    assert report.tau is not None
    assert report.finished == 1
    assert not report.degraded


def test_status_tells_that_targets_of_different_models_serve() -> None:
    house = House()
    house.add(
        ScriptedTarget,
        "target",
        name="same",
        fingerprint=Fingerprint(checkpoint="0" * 64, weights="int8", kernels="scripted"),
    )
    assert house.report().reasons == ()
    house.add(
        ScriptedTarget,
        "target",
        name="other",
        fingerprint=Fingerprint(checkpoint="1" * 64, weights="fp32", kernels="scripted"),
    )
    (reason,) = house.report().reasons
    assert "targets of different models serve" in reason
    assert reason.endswith("; other has scripted-target")
    assert not house.report().degraded


def test_a_round_trip_is_the_quickest_of_late() -> None:
    house = House()
    target = next(iter(house.coordinator.registry.workers.values()))
    target.trips.clear()
    for trip_ns in (9_000, 5_000, 7_000):
        answer = Probed(
            epoch=1,
            sent_ns=100_000 - trip_ns,
            clock_ns=0,
            busy_ns=0,
            stale=0,
            sessions=0,
            rss_bytes=0,
        )
        house.coordinator._answers._probed(target, answer, 100_000)
    assert target.round_trip_ns == 5_000


def test_ending_cancels_what_runs_and_drains_the_workers() -> None:
    house = House()
    house.submit(max_tokens=300)
    house.coordinator.pump()
    house.coordinator.end()
    house.run()
    assert all(worker.drained for worker in house.workers)
    assert any(
        isinstance(r, Finished) and r.result.finish_reason == "cancelled" for r in house.replies()
    )


def test_the_same_seed_gives_the_same_key_and_no_seed_a_reported_one() -> None:
    house = House()
    house.complete(seed=7)
    house.complete(seed=7)
    first = house.complete(seed=None).result.seed
    second = house.complete(seed=None).result.seed
    assert house.target is not None
    keys = [c.key for c in house.target.seen if c.type == "open"]
    assert keys[0] == keys[1]
    assert first != second
    assert len(set(keys[1:])) == 3


def test_requests_and_probes_are_told_apart_by_role() -> None:
    house = House()
    house.client._link.send(
        encode(
            Drafted(
                epoch=house.client.epoch,
                session=1,
                round=1,
                tokens=(),
                parents=(),
                scores=(),
                grown=0,
                hit=False,
            )
        )
    )
    assert house.target is not None
    house.target.link.send(
        encode(
            Submit(
                epoch=house.target.epoch,
                request=1,
                tokens=(1,),
                sampling=Sampling(),
                max_tokens=1,
                tree=TreeSettings(),
            )
        )
    )
    house.target.link.send(encode(Probe(epoch=house.target.epoch, sent_ns=1)))
    assert house.report().refused >= 3


def test_welcome_carries_the_epoch_of_the_coordinator() -> None:
    house = House()
    assert house.target is not None
    assert isinstance(house.target.seen[0], Welcome)
    assert house.target.coordinator_epoch == house.coordinator.epoch
    assert isinstance(house.client.coordinator_epoch, int)
    assert Hello.model_fields["type"].default == "hello"


# -- drafts that read their target -----------------------------------------------------------------

LONG = (5, 6, 7, 8, 9, 10, 11)  # read in several parts
LAST_ONLY = READS.model_copy(update={"taps": (), "dtype": "float16"})


@pytest.mark.parametrize("reads", [READS, LAST_ONLY], ids=["taps", "last"])
@pytest.mark.parametrize("repeat", [1, 3])
def test_a_head_gets_the_features_of_every_committed_token_once_and_in_order(
    reads: Reads, repeat: int
) -> None:
    """The scripted draft checks every row that it gets."""
    house = House(reads=reads, repeat=repeat)
    result = house.complete(prompt=LONG).result
    assert list(result.token_ids) == continuation(LONG, 60)
    assert result.accepted_tokens > 0
    assert house.report().reasons == ()
    assert house.draft is not None
    fed = [c for c in house.draft.seen if isinstance(c, Feed)]
    assert [(c.start, c.features.shape) for c in fed] == [
        (start, (min(2, 7 - start), reads.row)) for start in (0, 2, 4, 6)
    ]
    if repeat > 1:
        assert house.report().stale > 0


def test_sessions_with_a_head_and_without_share_a_target() -> None:
    house = House(reads=READS)
    prompts = {house.submit((*LONG, i), speculate=bool(i % 3)): (*LONG, i) for i in range(1, 20)}
    finished = [r for r in house.replies() if isinstance(r, Finished)]
    assert {r.request: list(r.result.token_ids) for r in finished} == {
        request: continuation(prompt, 60) for request, prompt in prompts.items()
    }
    assert all(
        r.result.accepted_tokens > 0 for r in finished if r.request % 3 and r.result.rounds > 4
    )


def test_features_count_in_the_bytes_of_a_round() -> None:
    plain, read = (House(reads=reads).complete(prompt=LONG).result for reads in (None, READS))
    assert read.rounds == plain.rounds
    rows = (
        len(LONG) + len(read.token_ids) - 1 - read.rounds
    )  # those of the last round are not sent on
    least, row = 2 * rows, 2 * READS.row
    assert read.rounds * (read.bytes_per_round - plain.bytes_per_round) > least * row


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"width": 4},
            "hidden states of width 4 before layers 2, 5 and a vocabulary of 97; the target "
            "scripted-target has width 3, 8 layers",
        ),
        ({"taps": (2, 9)}, "before layers 2, 9 and"),
        (
            {"vocabulary_size": 98},
            "a vocabulary of 98; the target scripted-target has width 3, 8 layers and a "
            "vocabulary of 97",
        ),
    ],
)
def test_a_head_that_does_not_fit_its_target_is_refused_with_both_shapes_whoever_comes_first(
    change: dict[str, object], words: str
) -> None:
    reads = READS.model_copy(update=change)
    first, second = House(draft=False), House(draft=False, target=False)
    after = first.add(ScriptedDraft, "draft", reads=reads, vocabulary=None)
    before = second.add(ScriptedDraft, "draft", reads=reads, vocabulary=None)
    second.add(ScriptedTarget, "target")
    for house, head in ((first, after), (second, before)):
        assert head.failures[0].code == "settings"
        assert words in head.failures[0].text
        assert "\n" not in head.failures[0].text
        assert [w.roles for w in house.report().workers] == [("target",)]


def test_a_head_that_was_trained_for_another_checkpoint_works_under_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(reads=READS.model_copy(update={"trained_for": "d" * 64}))
    assert [
        r.getMessage()
        for r in caplog.records
        if "was trained for the checkpoint dddddddddddddddd, but the target" in r.getMessage()
    ]
    assert list(house.complete(prompt=LONG).result.token_ids) == continuation(LONG, 60)
    caplog.clear()
    House(reads=READS)
    House(reads=READS.model_copy(update={"trained_for": ""}))
    assert not caplog.records


def test_workers_that_compute_on_the_same_cores_are_named_in_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House(draft=False, target=False)
    house.add(ScriptedTarget, "target", name="here", cores=(0, 1, 2))
    house.add(ScriptedTarget, "target", name="elsewhere", cores=(1, 2), host="other")
    house.add(ScriptedTarget, "target", name="waiting", cores=(1, 2), standby=True)
    house.add(ScriptedTarget, "target", name="apart", cores=(3,))
    house.add(ScriptedDraft, "draft", name="draft", cores=(2,))
    assert not caplog.records
    house.add(ScriptedTarget, "target", name="there", cores=(1, 2, 4))
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("the workers there and here on ")
    assert "both compute on cores 1-2 " in told


def test_features_for_a_head_that_is_lost_are_not_waited_for() -> None:
    house = House(reads=READS)
    request = house.submit(LONG)
    house.coordinator.pump()
    assert house.draft is not None
    house.workers.remove(house.draft)
    house.draft.link.close()
    assert list(house.client.complete(request).result.token_ids) == continuation(LONG, 60)


class Forgetful(ScriptedDraft):
    """Cannot read what it is fed."""

    def work(self, command: Command) -> list[Event]:
        if isinstance(command, Feed):
            return [
                Failed(
                    epoch=self.epoch,
                    session=command.session,
                    round=0,
                    code="memory",
                    text="no memory",
                )
            ]
        return super().work(command)


def test_a_head_that_cannot_read_is_done_without() -> None:
    house = House(draft=False)
    house.add(Forgetful, "draft", reads=READS, vocabulary=None)
    result = house.complete(prompt=LONG).result
    assert list(result.token_ids) == continuation(LONG, 60)
    assert result.drafted_tokens == 0


class Careless(ScriptedTarget):
    """Sends features that are not as asked for."""

    spoiled: type[Prefilled | Verified] = Prefilled
    change: object = None

    def work(self, command: Command) -> list[Event]:
        return [
            self.spoil(event) if isinstance(event, self.spoiled) else event
            for event in super().work(command)
        ]

    def spoil(self, event: Event) -> Event:
        return event.model_copy(update=self.change) if isinstance(self.change, dict) else event


def _features(dtype: str, shape: tuple[int, ...], size: int) -> dict[str, object]:
    return {"features": Array.model_validate({"dtype": dtype, "shape": shape, "data": bytes(size)})}


MISFITS = {
    "width": _features("bfloat16", (1, 5), 10),
    "type": _features("float16", (2, 6), 24),
    "shape": _features("bfloat16", (), 2),
    "rows": _features("bfloat16", (400, 6), 4800),
}


@pytest.mark.parametrize(
    ("spoiled", "change"),
    [
        *((kind, change) for kind in (Prefilled, Verified) for change in MISFITS.values()),
        (Prefilled, {"start": 1}),
        (Verified, {"features": None}),
    ],
)
def test_features_that_are_not_as_asked_for_cost_a_session_its_draft_and_nothing_else(
    spoiled: type[Prefilled | Verified], change: dict[str, object]
) -> None:
    house = House(draft=False, target=False)
    target = house.add(Careless, "target")
    assert isinstance(target, Careless)
    target.spoiled, target.change = spoiled, change
    house.add(ScriptedDraft, "draft", reads=READS, vocabulary=None)
    assert list(house.complete(prompt=LONG).result.token_ids) == continuation(LONG, 60)
    assert house.report().refused == 1


# -- drafts whose guesses are drawn at random ------------------------------------------------------

REJECTION = Sampling(temperature=1.0, acceptance="rejection")
STATIC = TreeSettings(policy="static", insist=True, gamma=6, depth=3, width=2)


def test_what_nodes_were_drawn_from_reaches_the_target_in_sessions_that_reject() -> None:
    house = House(draft=False)
    house.add(DrawingDraft, "draft")
    result = house.complete(sampling=REJECTION, tree=STATIC).result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    assert house.target is not None
    verified = [c for c in house.target.seen if isinstance(c, Verify)]
    for command in verified:
        (item,) = command.items
        if item.tokens:
            assert command.candidates is not None
            assert command.candidates.data == bytes([item.round]) * 4 * 4 * (1 + len(item.tokens))
            assert command.probabilities is not None
    assert any(command.candidates for command in verified)
    house.target.seen.clear()
    house.complete(sampling=Sampling(temperature=1.0), tree=STATIC)
    assert all(c.candidates is None for c in house.target.seen if isinstance(c, Verify))


@pytest.mark.parametrize("width", [None, 0, MAX_CANDIDATES + 1, 1 << 19])
def test_a_proposal_that_does_not_say_what_it_was_drawn_from_is_none_where_the_session_rejects(
    width: int | None,
) -> None:
    house = House(draft=False)
    house.add(type("Odd", (DrawingDraft,), {"width": width}), "draft")
    result = house.complete(sampling=REJECTION, tree=STATIC).result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    assert (result.drafted_tokens, house.report().refused) == (0, 1)


class Judging(ScriptedTarget):
    """Looks at what nodes were drawn from, as the real one does before it computes anything."""

    def work(self, command: Command) -> list[Event]:
        if not isinstance(command, Verify) or command.candidates is None:
            return super().work(command)
        return [
            Failed(
                epoch=self.epoch,
                session=i.session,
                round=i.round,
                code="protocol",
                text="the law below node -1 is none",
            )
            for i in command.items
        ]


def test_laws_that_the_target_finds_impossible_are_the_drafts_fault_and_not_the_clients() -> None:
    house = House(draft=False, target=False)
    house.add(Judging, "target")
    house.add(DrawingDraft, "draft")
    result = house.complete(sampling=REJECTION, tree=STATIC).result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    assert (result.accepted_tokens, house.report().refused, house.report().failed) == (0, 1, 0)
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def flickering(house: House, seed: int) -> list[int]:
    """Have every session's drafting stop and resume at random; the rounds of the plans that there
    were."""
    rng, planned = random.Random(seed), []
    plan = house.coordinator._sessions.plan

    def decide(live: RunningRequest, asked: NextRound) -> Plan | None:
        planned.append(live.session.round)
        return plan(live, asked) if rng.random() < 0.4 else None

    house.coordinator._sessions.plan = decide  # type: ignore[method-assign]
    return planned


@pytest.mark.parametrize("reads", [None, READS])
@pytest.mark.parametrize("seed", range(6))
def test_a_draft_that_is_asked_now_and_then_gets_all_that_was_committed_meanwhile(
    reads: Reads | None, seed: int
) -> None:
    house = House(reads=reads)
    flickering(house, seed)
    prompts = {house.submit((i, 9), max_tokens=40): (i, 9) for i in range(1, 4)}
    finished = [r for r in house.replies() if isinstance(r, Finished)]
    assert {r.request: list(r.result.token_ids) for r in finished} == {
        request: continuation(prompt, 40) for request, prompt in prompts.items()
    }
    assert house.draft is not None
    orders = [c for c in house.draft.seen if isinstance(c, Draft)]
    assert any(order.more for order in orders)
    assert sum(r.result.plain_rounds for r in finished) > 0
    assert house.report().refused == 0  # the scripted draft checks every token and every row


def test_a_draft_that_would_have_too_much_to_catch_up_with_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_events, "MAX_HELD_BYTES", 10 * READS.row * 2)
    house = House(reads=READS)
    house.coordinator._sessions.plan = lambda live, asked: None  # type: ignore[method-assign]
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    report = house.report()
    assert [line for line in report.decisions if "drops its draft" in line] == [
        report.decisions[-1]
    ]
    assert house.draft is not None
    assert house.draft.logs == {}


def test_a_draft_whose_session_ends_is_not_given_up_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(reads=READS)
    house.coordinator._sessions.plan = lambda live, asked: None  # type: ignore[method-assign]
    rounds = 20
    monkeypatch.setattr(
        worker_events, "MAX_HELD_BYTES", (rounds - 1) * READS.row * 2
    )  # the last verdict is the first that is too much
    house.complete(max_tokens=1 + rounds)
    report = house.report()
    assert report.decisions == ()
    assert [worker.sessions for worker in report.workers] == [0, 0]


class Boastful(ScriptedDraft):
    """Is more than certain of what it proposes for session 2."""

    def propose(self, command: Draft, log: list[int]) -> Drafted:
        drafted = super().propose(command, log)
        return (
            drafted.model_copy(update={"scores": (1e300,) * len(drafted.tokens)})
            if command.session == 2
            else drafted
        )


def test_a_score_that_no_probability_has_costs_its_session_the_draft_and_the_others_nothing() -> (
    None
):
    house = House(draft=False)
    house.add(Boastful, "draft")
    tree = TreeSettings(policy="goodput")
    house.complete(tree=tree)  # finds out what a pass costs
    house.coordinator._sessions.plan = lambda live, asked: Plan()  # type: ignore[method-assign]
    prompts = {house.submit((i, 9), max_tokens=30, tree=tree): (i, 9) for i in range(1, 5)}
    finished = [r for r in house.replies() if isinstance(r, Finished)]
    assert {r.request: list(r.result.token_ids) for r in finished} == {
        request: continuation(prompt, 30) for request, prompt in prompts.items()
    }
    assert house.report().refused == 1


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [
        (True, {}, True),
        (False, {"host": "there"}, False),
        (None, {"host": "there"}, True),
        (None, {"device": "cuda:0"}, True),
        (None, {"cores": (1,)}, True),
    ],
)
def test_drafting_goes_on_ahead_where_it_is_asked_for_or_no_device_is_shared(
    asked: bool | None, there: dict[str, object], expected: bool
) -> None:
    house = House(draft=False, target=False)
    house.add(ScriptedTarget, "target", cores=(0,))
    draft = house.add(ScriptedDraft, "draft", **{"cores": (0,), **there})
    house.complete(ahead=asked)
    assert {c.ahead for c in draft.seen if isinstance(c, Draft)} == {expected}


def test_what_is_drawn_at_random_is_never_drafted_ahead() -> None:
    house = House()
    house.submit(ahead=True, tree=TreeSettings(policy="static", insist=True), sampling=REJECTION)
    house.run()
    assert house.draft is not None
    assert [c.ahead for c in house.draft.seen if isinstance(c, Draft)] == [
        False
    ]  # the scripted draft draws nothing, and is done without after it


def test_every_round_is_recorded_after_its_tokens_and_before_the_end() -> None:
    house = House()
    request = house.submit(record=True)
    replies = house.replies()
    assert isinstance(replies[-1], Finished)
    result, records = replies[-1].result, [r.record for r in replies if isinstance(r, Recorded)]
    assert [record.round for record in records] == [*range(1, result.rounds + 1)]
    assert sum(record.verified for record in records) == result.drafted_tokens
    log = [*PROMPT, *result.token_ids]
    for record in records:
        said = [*(record.tokens[node] for node in record.accepted), record.bonus]
        assert log[record.prefix : record.prefix + len(said)] == said[: len(log) - record.prefix]
    shown = 0
    for reply in replies[:-1]:
        assert isinstance(reply, Emitted | Recorded)
        assert reply.request == request
        if isinstance(reply, Emitted):
            shown += len(reply.tokens)
        else:
            assert shown > reply.record.prefix - len(PROMPT)


def test_thresholds_that_are_a_files_name_are_refused() -> None:
    house = House()
    house.submit(tree=TreeSettings(policy="heterospec", insist=True, thresholds="bins.toml"))
    (failed,) = (r for r in house.replies() if isinstance(r, Failed))
    assert failed.code == "settings"
    assert "bins.toml" in failed.text


def test_all_sessions_of_a_pass_ask_for_the_next_one_before_a_client_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, order = House(draft=False), list[str]()
    receive, to_worker = house.coordinator._receive, Outgoing.to_worker
    to_client = Outgoing.to_client

    def received(peer: bytes, frames: list[bytes], now_ns: int) -> None:
        order.append("arrived")
        receive(peer, frames, now_ns)

    def asked(self: Outgoing, worker: Worker, message: Message) -> tuple[int, int]:
        if message.type != "probe":  # which is sent whenever a while has gone by
            order.append(f"{message.type} {len(getattr(message, 'items', ()))}")
        return to_worker(self, worker, message)

    def told(self: Outgoing, client: ClientPeer, message: Message) -> None:
        order.append(message.type)
        to_client(self, client, message)

    monkeypatch.setattr(house.coordinator, "_receive", received)
    monkeypatch.setattr(Outgoing, "to_worker", asked)
    monkeypatch.setattr(Outgoing, "to_client", told)
    requests = [house.submit(prompt=(1, 2, 3 + place), max_tokens=12) for place in range(3)]
    for request in requests:
        house.client.complete(request)
    _, *passes = (place for place, what in enumerate(order) if what == "verify 3")
    assert len(passes) > 4
    for place in passes:
        assert order[place - 1] == "arrived"
        assert order[place + 1 : place + 4] == ["emitted"] * 3


def test_a_reader_follows_a_verdict_to_the_next_draft_through_few_files() -> None:
    rounds = count(8)[Verified]
    assert len(rounds) > 20
    assert statistics.median(len(one.files) for one in rounds) <= 14
    assert statistics.median(one.moves for one in rounds) <= 60
