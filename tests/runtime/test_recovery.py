"""Workers that are lost under running sessions, and others that take over. The oracle is the same
session without a loss: what its client is told is the same, token by token and text by text.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from dovetail.protocol.messages import (
    Close,
    Draft,
    Emitted,
    Failed,
    Fault,
    Fingerprint,
    Finished,
    Limits,
    Open,
    PromptScored,
    Reads,
    Recorded,
    Refeed,
    Supervised,
    Verify,
)
from dovetail.protocol.settings import CoordinatorSettings, Sampling, TreeSettings
from dovetail.runtime.control.controller import Controller
from dovetail.runtime.control.rounds import Load
from dovetail.runtime.engine.running import MOST_BREAKS, MOST_LOSSES
from support.cases import everyday
from support.houses import PROMPT, House
from support.scripted import (
    READS,
    ROOMY,
    DrawingDraft,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    continuation,
)

RESTS = 5  # rounds after which drafting is off for as many
LONG = 200
"""Tokens, so that a draft is still worth its while when it comes in the midst. The scripted
language ends sooner than that with some prompts."""
ENDLESS = next(
    (i, j, 4)
    for i in range(1, 97)
    for j in range(1, 97)
    if len(continuation((i, j, 4), LONG)) == LONG
)
OTHER = Fingerprint(checkpoint="1" * 64, weights="fp32", kernels="scripted")


def small_steps(house: House, count: int) -> None:
    """Let the coordinator and the workers handle what has arrived, in turns, so often."""
    for turn in range(count):
        if turn % 2 == 0:
            house.coordinator.pump()
        else:
            house.workers[turn // 2 % len(house.workers)].step()


def told(
    house: House, request: int
) -> tuple[list[int], str, list[object], list[tuple[int, object]], Finished]:
    """Return what a client is told of a request: tokens, text, their log-probabilities, those of
    the prompt, and the end."""
    tokens: list[int] = []
    text, said, scored = "", list[object](), list[tuple[int, object]]()
    while True:
        reply = house.client.receive(0)
        assert reply is not None, "nothing more is said"
        assert not isinstance(reply, Failed), reply.text
        if isinstance(reply, Emitted) and reply.request == request:
            tokens += reply.tokens
            text += reply.text
            said += reply.logprobs
        if isinstance(reply, PromptScored):
            scored += enumerate(reply.logprobs, reply.start)
        if isinstance(reply, Finished) and reply.request == request:
            return tokens, text, said, scored, reply


def another_target(house: House, **changes: object) -> ScriptedWorker:
    return house.add(ScriptedTarget, "target", name=f"target-{len(house.workers)}", **changes)


def another_draft(house: House, reads: Reads | None = None) -> ScriptedWorker:
    head = {} if reads is None else {"reads": reads, "vocabulary": None}
    return house.add(ScriptedDraft, "draft", name=f"draft-{len(house.workers)}", **head)


def check_all_is_over(house: House) -> None:
    """Nobody holds anything any more."""
    house.run()
    assert all(not worker.logs for worker in house.workers)
    report = house.report()
    assert (report.sessions, report.failed, [worker.sessions for worker in report.workers]) == (
        0,
        0,
        [0] * len(report.workers),
    )


# -- the target ------------------------------------------------------------------------------------


ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "record": True},
    {"logprobs": 1, "scored": True, "prompt": (5, 6, 7, 8, 9, 10)},
    {"tree": TreeSettings()},
    {"stop": (" w",), "max_tokens": 9},
    {"speculate": False},
]


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("warm", [True, False], ids=["spare", "restarted"])
@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
@pytest.mark.parametrize(
    "asked", ASKED, ids=["plain", "logprobs", "scored", "goodput", "stop", "without-draft"]
)
def test_a_target_that_is_lost_at_any_moment_is_followed_by_another_and_nobody_notices(
    asked: dict[str, Any], reads: Reads | None, warm: bool, every: int
) -> None:
    whole = House(reads=reads)
    undisturbed = told(whole, whole.submit(**asked))
    for steps in range(1, 60, every):
        house = House(reads=reads)
        assert house.target is not None
        if warm:
            another_target(house)
        request = house.submit(**asked)
        small_steps(house, steps)
        house.lose(house.target)
        if not warm:
            house.run()
            another_target(house)
        *said, finished = told(house, request)
        assert tuple(said) == undisturbed[:4]
        assert (finished.result.text, finished.result.finish_reason) == (
            undisturbed[4].result.text,
            undisturbed[4].result.finish_reason,
        )
        assert finished.margins == undisturbed[4].margins
        assert finished.result.moves <= 1
        assert not finished.result.fingerprints
        check_all_is_over(house)


@pytest.mark.parametrize("lost", range(5, 100, 9))
def test_a_draft_that_rests_now_and_then_reads_every_row_whatever_becomes_of_the_target(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted draft checks each row of features that it reads."""
    begun: dict[int, int] = {}

    def resting(self: Controller) -> bool:
        return begun.get(id(self), 0) // RESTS % 2 == 1

    begin_round = Controller.begin_round

    def counted(self: Controller, load: Load) -> bool:
        begun[id(self)] = begun.get(id(self), 0) + 1
        return begin_round(self, load) and not resting(self)

    monkeypatch.setattr(Controller, "begin_round", counted)
    monkeypatch.setattr(Controller, "idle", property(resting))
    house = House(reads=READS)
    assert house.target is not None
    another_target(house)
    request = house.submit(prompt=ENDLESS, max_tokens=100)
    small_steps(house, lost)
    held = {
        item.hold
        for command in house.target.seen
        if isinstance(command, Verify)
        for item in command.items
    }
    house.lose(house.target)
    assert told(house, request)[0] == continuation(ENDLESS, 100)
    assert lost < 60 or held == {True, False}
    orders = [command for command in house.workers[0].seen if isinstance(command, Draft)]
    assert max(len(order.more) for order in orders) > RESTS
    check_all_is_over(house)


def test_the_draft_of_a_session_whose_target_is_lost_drafts_for_the_next_one() -> None:
    for reads in (None, READS):
        house = House(reads=reads)
        assert house.target is not None
        another_target(house)
        request = house.submit()
        small_steps(house, 24)
        house.lose(house.target)
        result = told(house, request)[4].result
        assert result.moves == 1
        assert result.plain_rounds == 1, (
            "only the round that was lost went by without what was drafted"
        )
        assert sum(isinstance(command, Open) for command in house.workers[0].seen) == 1, (
            "the draft read the prompt once more"
        )


def test_another_target_reads_the_log_under_its_round_and_says_nothing_of_the_prompt_again() -> (
    None
):
    house = House(reads=READS)
    assert house.target is not None
    spare = another_target(house)
    request = house.submit(logprobs=1, scored=True)
    small_steps(house, 30)
    house.lose(house.target)
    tokens = told(house, request)[0]
    (opened,) = (command for command in spare.seen if isinstance(command, Open))
    count = len(opened.prompt) - len(PROMPT)
    assert opened.prompt == (*PROMPT, *tokens[:count])
    assert (opened.replied, opened.scored, opened.logprobs) == (count, False, 1)
    assert opened.features_from == len(opened.prompt) - 1
    verified = next(command for command in spare.seen if isinstance(command, Verify))
    assert verified.items[0].round == opened.round + 1 > 2
    assert verified.items[0].prefix == len(opened.prompt) + 1


def test_every_nanosecond_of_a_session_that_moved_is_accounted_for() -> None:
    house = House()
    assert house.target is not None
    request = house.submit(record=True)
    small_steps(house, 20)
    house.lose(house.target)
    house.run()
    another_target(house)
    result = told(house, request)[4].result
    parts = (
        result.prefill_s
        + result.draft_exposed_s
        + result.verify_s
        + result.transport_s
        + result.queue_s
        + result.coordinator_s
    )
    assert parts + result.unaccounted_s == pytest.approx(result.wall_s, abs=1e-9)
    assert abs(result.unaccounted_s) < 1e-9 + 0.02 * result.wall_s
    assert result.tau == (result.completion_tokens - 1) / result.rounds


def test_a_round_that_was_lost_is_recorded_with_what_it_committed() -> None:
    house = House()
    assert house.target is not None
    another_target(house)
    house.submit(record=True)
    small_steps(house, 23)
    house.lose(house.target)
    records = [reply.record for reply in house.replies() if isinstance(reply, Recorded)]
    assert [record.round for record in records] == [*range(1, len(records) + 1)]
    tokens = [
        token
        for record in records
        for token in (*(record.tokens[node] for node in record.accepted), record.bonus)
    ]
    expected = continuation(PROMPT, 60)[1:]
    assert tokens[: len(expected)] == expected


def test_a_session_that_waits_says_so_and_ends_with_one_error_when_it_has_waited_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Controller, "off", "it does not pay")
    house = House(settings=CoordinatorSettings(recovery_s=20.0))
    assert house.target is not None
    request = house.submit()
    small_steps(house, 20)
    undrafted = "1 session is decoded without a draft: it does not pay"
    assert undrafted in house.coordinator.report().reasons
    house.lose(house.target)
    house.run()
    report = house.report()
    assert report.degraded
    assert report.sessions == 1
    waits = next(
        reason
        for reason in report.reasons
        if reason.startswith("session 1 waits for a target, for ")
    )
    assert "the target worker target (pid 1 on here) disconnected after" in waits
    assert undrafted not in report.reasons
    house.submit()
    house.later_ns = 19 * 10**9
    house.coordinator.tick()
    failed = [reply for reply in house.replies() if isinstance(reply, Failed)]
    assert [reply.code for reply in failed] == ["no_target"], "a new request is not kept waiting"
    house.later_ns = 21 * 10**9
    house.coordinator.tick()
    (failed_reply,) = (reply for reply in house.replies() if isinstance(reply, Failed))
    assert (failed_reply.session, failed_reply.code) == (request, "worker_lost")
    assert (
        "within 20 s no other was free: start one and send the request again" in failed_reply.text
    )
    report = house.report()
    assert (report.sessions, report.failed, report.totals.refused_requests) == (0, 1, 1)
    assert not any("waits" in reason for reason in report.reasons)


@pytest.mark.parametrize(("setting", "waits_s"), [("auto", 30 + 2 * 200), (10.0, 10)])
def test_a_session_waits_as_long_as_its_target_took_to_load_unless_a_setting_says_otherwise(
    setting: float | Literal["auto"], waits_s: int
) -> None:
    house = House(target=False, settings=CoordinatorSettings(recovery_s=setting))
    lost = house.add(ScriptedTarget, "target", load_s=200.0)
    request = house.submit()
    small_steps(house, 20)
    house.lose(lost)
    house.run()
    house.later_ns = (waits_s - 1) * 10**9
    house.coordinator.tick()
    assert not [reply for reply in house.replies() if isinstance(reply, Failed)]
    house.later_ns = (waits_s + 1) * 10**9
    house.coordinator.tick()
    (failed,) = (reply for reply in house.replies() if isinstance(reply, Failed))
    assert (failed.session, failed.code) == (request, "worker_lost")
    assert f"within {waits_s} s no other was free" in failed.text


def test_what_a_supervisor_says_of_the_parts_is_reported_as_time_goes_by() -> None:
    house = House()
    fault = Fault(
        part="draft worker", why="ended with exit code 1: no device", since_s=3.0, retry_s=5.0
    )
    house.coordinator.supervised(Supervised(faults=(fault,)))
    house.later_ns = 2 * 10**9
    report = house.report()
    (told,) = report.faults
    assert (told.part, told.why, round(told.since_s), round(told.retry_s or 0)) == (
        fault.part,
        fault.why,
        5,
        3,
    )
    assert report.degraded
    words = (
        "the draft worker has not been working for 5.0 s: ended with exit code 1: no device; it is "
        "restarted in 3.0 s"
    )
    assert words in report.reasons
    house.later_ns = 60 * 10**9
    assert house.report().faults[0].retry_s == 0.0
    house.coordinator.supervised(Supervised())
    report = house.report()
    assert (report.degraded, report.faults) == (False, ())


def test_a_draft_that_nobody_looks_after_is_a_fault_from_its_loss_until_there_is_another() -> None:
    house = House()
    assert house.draft is not None
    house.lose(house.draft)
    house.run()
    house.later_ns = 7 * 10**9
    (fault,) = house.report().faults
    assert (fault.part, fault.why, round(fault.since_s), fault.retry_s) == (
        "draft worker",
        "disconnected",
        7,
        None,
    )
    another_draft(house)
    assert house.report().faults == ()


def test_a_service_that_gives_up_ends_what_waits_finishes_what_runs_and_takes_nothing_new() -> None:
    house = House()
    assert house.target is not None
    waiting = house.submit()
    small_steps(house, 20)
    house.lose(house.target)
    house.run()
    another_target(house, fingerprint=OTHER)
    running = house.submit((5, 6))
    small_steps(house, 4)
    assert house.report().sessions == 2
    house.coordinator.supervised(Supervised(ending="the target worker ended 6 times"))
    late = house.submit((7, 8))
    replies = house.replies()
    failed = {reply.session: reply for reply in replies if isinstance(reply, Failed)}
    assert {request: reply.code for request, reply in failed.items()} == {
        waiting: "ending",
        late: "ending",
    }
    assert "and the service is ending: the target worker ended 6 times" in failed[waiting].text
    assert failed[late].text == "the service is ending: the target worker ended 6 times"
    (finished,) = (reply for reply in replies if isinstance(reply, Finished))
    assert finished.request == running
    assert list(finished.result.token_ids) == continuation((5, 6), 60)


def test_a_session_that_waits_can_be_cancelled_and_goes_with_its_client() -> None:
    house = House()
    assert house.target is not None
    other = house.connect()
    request = house.submit()
    other.submit(tokens=PROMPT, max_tokens=60)
    small_steps(house, 20)
    house.lose(house.target)
    house.run()
    house.client.cancel(request)
    result = told(house, request)[4].result
    assert result.finish_reason == "cancelled"
    assert list(result.token_ids) == continuation(PROMPT, 60)[: result.completion_tokens]
    other.close()
    house.run()
    another_target(house)
    check_all_is_over(house)


def test_a_target_of_another_fingerprint_takes_over_only_where_that_is_allowed_and_the_reply_says_so() -> (  # noqa: E501
    None
):
    for move in ("same", "any"):
        house = House(settings=CoordinatorSettings(recovery_s=5.0, move=move))
        assert house.target is not None
        another_target(house, fingerprint=OTHER)
        request = house.submit()
        small_steps(house, 20)
        house.lose(house.target)
        house.run()
        if move == "any":
            result = told(house, request)[4].result
            assert result.fingerprint == str(OTHER)
            assert [fingerprint[:1] for fingerprint in result.fingerprints] == ["0", "1"]
            assert result.moves == 1
            continue
        house.later_ns = 6 * 10**9
        house.coordinator.tick()
        (failed,) = (reply for reply in house.replies() if isinstance(reply, Failed))
        assert (
            "none of its fingerprint was free: start one, or let requests continue on others "
            "with coordinator.move = 'any'" in failed.text
        )


def test_a_session_that_has_said_nothing_yet_goes_on_wherever_its_tokens_are_tokens() -> None:
    house = House()
    assert house.target is not None
    another_target(house, fingerprint=OTHER)
    another_target(house, fingerprint=OTHER, limits=Limits(context=32))
    request = house.submit()
    house.coordinator.pump()
    house.lose(house.target)
    result = told(house, request)[4].result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    assert (result.fingerprint, result.fingerprints, result.moves) == (str(OTHER), (), 1)


def test_what_ends_every_target_that_reads_it_is_not_given_to_the_next_one() -> None:
    house = House()
    spares = [house.target, *(another_target(house, pid=2 + place) for place in range(MOST_LOSSES))]
    request = house.submit()
    for _ in range(MOST_LOSSES):
        house.coordinator.pump()
        reader = next(
            worker
            for worker in spares
            if worker is not None and worker in house.workers and has_been_asked(house, worker)
        )
        house.lose(reader)
        house.coordinator.look_around()
    (failed,) = (reply for reply in house.replies() if isinstance(reply, Failed))
    assert (failed.session, failed.code) == (request, "worker_lost")
    assert f"{MOST_LOSSES} in a row were lost without a token in between" in failed.text
    assert len(house.workers) == 2, "one target is left, and the draft"
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


def test_a_session_goes_on_however_often_the_connection_of_its_target_breaks_unless_it_never_comes_to_a_token() -> (  # noqa: E501
    None
):
    for breaks in (MOST_BREAKS - 1, MOST_BREAKS):
        house = House()
        request = house.submit()
        for _ in range(breaks):
            house.coordinator.pump()
            (target,) = (worker for worker in house.workers if worker.role == "target")
            assert has_been_asked(house, target)
            house.lose(target)
            house.coordinator.look_around()
            again = ScriptedTarget(house.hub.connect(), "target", epoch=target.epoch + 100)
            again.register()
            house.workers.append(again)
        if breaks < MOST_BREAKS:
            assert told(house, request)[0] == continuation(PROMPT, 60)
        else:
            (failed,) = (reply for reply in house.replies() if isinstance(reply, Failed))
            assert f"{MOST_BREAKS} in a row were lost without a token in between" in failed.text


def test_targets_that_went_unnoticed_are_no_reason_to_give_a_session_up() -> None:
    house = House()
    spares = [house.target, *(another_target(house) for _ in range(MOST_LOSSES + 1))]
    request = house.submit()
    small_steps(house, 12)
    for target in spares:
        assert target is not None
        target.link.close()
        house.workers.remove(target)
    small_steps(house, 10)
    assert house.coordinator.report().totals.waiting == 1
    another_target(house)
    assert told(house, request)[0] == continuation(PROMPT, 60)


def has_been_asked(house: House, worker: ScriptedWorker) -> bool:
    """Return whether a worker owes an answer."""
    return any(
        known.turns.owed
        for known in house.coordinator.registry.workers.values()
        if known.hello.epoch == worker.epoch
    )


def test_a_target_that_goes_while_a_prompt_is_read_is_replaced_or_waited_for() -> None:
    for warm in (True, False):
        house = House()
        assert house.target is not None
        reading: list[Callable[[], None]] = []
        house.coordinator._defer = lambda work, done, reading=reading: reading.append(
            lambda: done(work())
        )  # type: ignore[misc]
        request = house.submit()
        house.run()
        house.lose(house.target)
        if warm:
            another_target(house)
        house.run()
        reading[0]()
        house.run()
        if not warm:
            assert house.report().sessions == 1
            another_target(house)
        assert told(house, request)[0] == continuation(PROMPT, 60)
        check_all_is_over(house)


def test_a_target_that_has_forgotten_a_session_reads_it_anew() -> None:
    house = House()
    assert house.target is not None
    request = house.submit()
    small_steps(house, 22)
    house.target.logs.clear()
    forgot = house.target.verify  # type: ignore[attr-defined]

    def refuse(asked: Sequence[Any], reads: Reads | None) -> object:
        if asked[0].session in house.target.logs:  # type: ignore[union-attr]
            return forgot(asked, reads)
        return Failed(
            epoch=house.target.epoch,
            session=asked[0].session,
            round=asked[0].round,
            code="session",
            text="not open here",
        )  # type: ignore[union-attr]

    house.target.verify = refuse  # type: ignore[attr-defined]
    tokens, *_, finished = told(house, request)
    assert tokens == continuation(PROMPT, 60)
    assert finished.result.moves == 1
    check_all_is_over(house)


def test_a_session_goes_on_from_what_the_other_target_has_of_its_conversation() -> None:
    house = House(limits=ROOMY)
    assert house.target is not None
    spare = another_target(house, limits=ROOMY)
    turns = [
        house.submit(prompt=ENDLESS, max_tokens=40),
        house.submit(prompt=ENDLESS, max_tokens=40),
    ]
    house.run()
    assert len([1 for reply in house.replies() if isinstance(reply, Finished)]) == len(turns)
    both = [worker for worker in (house.target, spare) if worker.kept]
    assert len(both) == 2, "each target had one of them"
    request = house.submit(prompt=ENDLESS, max_tokens=80)
    small_steps(house, 60)
    for worker in both:
        if worker.logs:
            house.lose(worker)
    assert told(house, request)[0] == continuation(ENDLESS, 80)
    last = [
        command
        for worker in house.workers
        for command in worker.seen
        if isinstance(command, Open) and command.replied
    ]
    assert [command.kept > 0 for command in last] == [True]


def test_a_session_that_draws_at_random_goes_on_with_its_draft_too() -> None:
    house = House(draft=False)
    assert house.target is not None
    house.add(DrawingDraft, "draft")
    another_target(house)
    tree = TreeSettings(policy="static", insist=True, gamma=6, depth=3, width=2)
    request = house.submit(
        prompt=ENDLESS,
        max_tokens=60,
        sampling=Sampling(temperature=1.0, acceptance="rejection"),
        tree=tree,
    )
    small_steps(house, 30)
    house.lose(house.target)
    tokens, *_, finished = told(house, request)
    assert tokens == continuation(ENDLESS, 60)
    assert (finished.result.moves, finished.result.plain_rounds) == (1, 1)


# -- the draft -------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [12, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "asked",
    [{}, {"tree": TreeSettings()}, {"logprobs": 1, "record": True}],
    ids=["plain", "goodput", "logprobs"],
)
@pytest.mark.parametrize(
    ("reads", "later"),
    everyday(itertools.product([None, READS], repeat=2), (None, READS), (READS, None)),
    ids=["alone-then-alone", "alone-then-reads", "reads-then-alone", "reads-then-reads"],
)
def test_a_draft_that_is_lost_is_followed_by_another_in_the_midst_of_the_session(
    reads: Reads | None, later: Reads | None, asked: dict[str, Any], every: int
) -> None:
    asked = {"prompt": ENDLESS, "max_tokens": LONG, **asked}
    whole = House(reads=reads)
    undisturbed = told(whole, whole.submit(**asked))
    for steps in range(1, 60, every):
        house = House(reads=reads)
        assert house.draft is not None
        request = house.submit(**asked)
        small_steps(house, steps)
        house.lose(house.draft)
        small_steps(house, 9)
        draft = another_draft_now(house, later)
        *said, _ = told(house, request)
        assert tuple(said) == undisturbed[:4]
        orders = sum(isinstance(command, Draft) for command in draft.seen)
        assert orders > 5 or (orders and "tree" in asked), "it was not asked"
        check_all_is_over(house)


def another_draft_now(house: House, reads: Reads | None) -> ScriptedWorker:
    """A draft that registers while everybody else rests."""
    run, house.run = house.run, lambda most=0: None  # type: ignore[method-assign,assignment]
    draft = another_draft(house, reads)
    house.run = run  # type: ignore[method-assign]
    return draft


def test_a_session_that_began_without_a_draft_takes_the_first_that_comes() -> None:
    house = House(draft=False)
    request = house.submit(prompt=ENDLESS, max_tokens=LONG)
    alone = house.submit(prompt=ENDLESS, max_tokens=LONG, speculate=False)
    small_steps(house, 20)
    another_draft_now(house, READS)
    results = {
        reply.request: reply.result for reply in house.replies() if isinstance(reply, Finished)
    }
    assert {result.token_ids for result in results.values()} == {tuple(continuation(ENDLESS, LONG))}
    assert results[request].accepted_tokens > 100
    assert results[alone].drafted_tokens == 0
    assert house.report().decisions[-1].startswith("session 1 uses the draft draft-1 from token ")


def test_features_are_computed_anew_from_the_log_for_a_draft_that_reads_them() -> None:
    house = House(draft=False)
    assert house.target is not None
    request = house.submit(prompt=ENDLESS, max_tokens=LONG)
    small_steps(house, 20)
    draft = another_draft_now(house, READS)
    tokens = told(house, request)[0]
    (refeed,) = (command for command in house.target.seen if isinstance(command, Refeed))
    (opened,) = (command for command in draft.seen if isinstance(command, Open))
    assert (refeed.start, refeed.features) == (0, READS)
    assert refeed.prefix == len(opened.prompt) + 1
    assert opened.prompt == (*ENDLESS, *tokens[: opened.replied])
    first = next(command for command in draft.seen if isinstance(command, Draft))
    assert (*first.accepted, first.bonus, *first.more) == tuple(
        tokens[opened.replied : first.prefix - len(ENDLESS)]
    )


def test_a_session_does_not_wait_for_a_draft_that_reads_its_log() -> None:
    house = House(draft=False)
    request = house.submit(prompt=ENDLESS, max_tokens=LONG)
    small_steps(house, 20)
    draft = another_draft_now(house, None)
    house.workers.remove(draft)
    assert told(house, request)[0] == continuation(ENDLESS, LONG)
    draft.step()
    assert [type(command) for command in draft.seen if isinstance(command, Open | Draft)] == [Open]


@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
def test_a_draft_that_comes_when_little_is_left_is_not_bothered(reads: Reads | None) -> None:
    house = House(draft=False)
    request = house.submit(prompt=ENDLESS, max_tokens=16)
    small_steps(house, 8)
    draft = another_draft_now(house, reads)
    assert told(house, request)[0] == continuation(ENDLESS, 16)
    assert not any(isinstance(command, Open) for command in draft.seen)


def test_a_session_does_not_go_back_to_a_draft_that_sent_what_cannot_be() -> None:
    house = House()
    assert isinstance(house.draft, ScriptedDraft)
    propose = house.draft.propose
    house.draft.propose = lambda command, log: propose(command, log).model_copy(
        update={"scores": ()}
    )  # type: ignore[method-assign]
    request = house.submit(prompt=ENDLESS, max_tokens=LONG)
    small_steps(house, 24)
    another = another_draft_now(house, None)
    assert told(house, request)[0] == continuation(ENDLESS, LONG)
    assert sum(isinstance(command, Draft) for command in house.draft.seen) == 1
    assert sum(isinstance(command, Draft) for command in another.seen) > 5
    assert house.report().refused == 1


@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
def test_a_draft_that_is_not_available_any_more_hands_its_sessions_over_at_their_next_rounds(
    reads: Reads | None,
) -> None:
    house = House()
    request = house.submit(prompt=ENDLESS, max_tokens=LONG)
    small_steps(house, 20)
    other = another_draft_now(house, reads)
    house.coordinator.pump()
    first, second = (
        worker for worker in house.coordinator.registry.workers.values() if worker.plays("draft")
    )
    assert house.draft is not None
    before = len(house.draft.seen)
    first.stuck = True
    assert told(house, request)[0] == continuation(ENDLESS, LONG)
    assert sum(isinstance(command, Draft) for command in other.seen) > 5
    assert sum(isinstance(command, Draft) for command in house.draft.seen[before:]) <= 1
    assert not house.draft.logs
    assert (first.sessions, second.sessions) == (0, 0)


def test_a_late_answer_to_a_session_that_ended_there_is_not_taken_for_one_of_its_next_stay() -> (
    None
):
    house = House()
    assert house.draft is not None
    assert house.target is not None
    request = house.submit(prompt=ENDLESS, max_tokens=LONG)
    small_steps(house, 21)
    (live,) = house.coordinator._running.values()
    target = live.target
    owed = dict(target.turns.owed)
    assert list(owed) == [1], "nothing is under way"
    house.coordinator._moving.move(live, target)
    assert target.turns.void == {1}
    house.target.step()
    house.coordinator.pump()
    assert not target.turns.void
    assert house.coordinator._dropped.stale == 0, "it was to be expected"
    assert told(house, request)[0] == continuation(ENDLESS, LONG)
    assert [command.keep for command in house.target.seen if isinstance(command, Close)][:1] == [
        False
    ]


# -- both, at random -------------------------------------------------------------------------------
