"""The failure of a draft is said in the result of its request, in the coordinator's report and its
counters, until it drafts a whole request again."""

from collections.abc import Callable

import pytest

from dovetail.protocol.codec import encode
from dovetail.protocol.messages import (
    Command,
    Draft,
    DraftFailure,
    Event,
    Failed,
    Feed,
    Finished,
    Open,
)
from support.houses import DYNAMIC, PROMPT, House
from support.scripted import READS, ScriptedDraft, continuation

WORDS = "IndexError: the index is on another device than the states"


class FailingDraft(ScriptedDraft):
    """Fails where it is told to."""

    fails: Callable[[Command], bool]

    def work(self, command: Command) -> list[Event]:
        if self.fails(command) and isinstance(command, Open | Feed | Draft):
            return [
                Failed(
                    epoch=self.epoch,
                    session=command.session,
                    round=command.round,
                    code="internal",
                    text=WORDS,
                )
            ]
        return super().work(command)


def house_of(fails: Callable[[Command], bool], *, head: bool = False) -> House:
    house = House(draft=False)
    FailingDraft.fails = staticmethod(fails)  # type: ignore[assignment]
    house.draft = house.add(
        FailingDraft, "draft", **({"reads": READS, "vocabulary": None} if head else {})
    )
    return house


def finished_of(house: House) -> Finished:
    return next(reply for reply in house.replies() if isinstance(reply, Finished))


WAYS: dict[str, tuple[bool, Callable[[Command], bool]]] = {
    "opening": (False, lambda command: isinstance(command, Open)),
    "feeding": (True, lambda command: isinstance(command, Feed)),
    "the first order": (False, lambda command: isinstance(command, Draft)),
    "a later order": (False, lambda command: isinstance(command, Draft) and command.round >= 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_is_in_the_result_the_report_and_the_counters(way: str) -> None:
    head, fails = WAYS[way]
    house = house_of(fails, head=head)
    result = house.complete(tree=DYNAMIC).result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    failure = result.draft_failure
    assert failure is not None
    assert (failure.draft, failure.error) == ("draft", WORDS)
    assert 0.0 <= failure.after_s <= result.wall_s
    assert (failure.round >= 4) == (way == "a later order")
    state = house.report()
    (fault,) = state.faults
    assert (fault.part, state.degraded, state.totals.draft_failures) == ("draft worker", True, 1)
    assert fault.why == f"{WORDS}, in round {failure.round} of session 1"
    assert any(WORDS in reason for reason in state.reasons)


def test_failures_are_counted_and_the_first_one_is_told_with_how_long_ago_it_was() -> None:
    house = house_of(lambda command: isinstance(command, Draft))
    house.complete(tree=DYNAMIC)
    house.later_ns += 90_000_000_000
    house.complete(tree=DYNAMIC)
    (fault,) = house.report().faults
    assert fault.since_s >= 90.0
    assert fault.why.endswith("of session 1 (2 failures so far)")
    assert house.report().totals.draft_failures == 2


def test_a_fault_stands_until_a_request_that_began_after_it_was_drafted_for_to_its_end() -> None:
    house = house_of(lambda command: isinstance(command, Draft) and command.session == 1)
    house.submit(tree=DYNAMIC)
    house.complete(tree=DYNAMIC, speculate=False)
    assert house.report().faults
    assert house.complete(tree=DYNAMIC).result.draft_failure is None
    state = house.report()
    assert (state.faults, state.degraded, state.totals.draft_failures) == ((), False, 1)


def test_work_ahead_of_orders_that_fails_is_said_and_drafting_goes_on() -> None:
    house = House()
    assert house.draft is not None
    house.submit(tree=DYNAMIC)
    house.run(12)
    house.draft.link.send(encode(Failed(epoch=house.draft.epoch, code="internal", text=WORDS)))
    finished = finished_of(house)
    failure = finished.result.draft_failure
    assert isinstance(failure, DraftFailure)
    assert failure.error == WORDS
    assert finished.result.accepted_tokens > 0
    (fault,) = house.report().faults
    assert fault.why == f"{WORDS}, while drafting ahead"


def test_a_draft_that_is_lost_is_in_the_result_of_its_request() -> None:
    house = House()
    assert house.draft is not None
    house.submit(tree=DYNAMIC)
    house.run(12)
    house.lose(house.draft)
    house.coordinator.look_around()
    failure = finished_of(house).result.draft_failure
    assert failure is not None
    assert failure.error == "it disconnected"
