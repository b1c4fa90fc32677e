"""Turns on a worker: one command at a time, verdicts together, answers matched by round."""

from dovetail.protocol.messages import Draft, Verify, VerifyItem
from dovetail.runtime.scheduler import Turns


def item(session: int, round_: int = 1) -> VerifyItem:
    return VerifyItem(session=session, round=round_, prefix=3, tokens=(), parents=())


def order(session: int, round_: int = 1) -> Draft:
    return Draft(epoch=1, session=session, round=round_, prefix=3, accepted=(), bonus=1, max_nodes=4, max_depth=2, max_width=2)


def test_a_worker_gets_nothing_while_it_owes_an_answer() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, order(1))
    turns.ask(2, order(2))
    assert turns.next() == (order(1), (1,))
    assert turns.next() is None
    assert turns.answered(1, 1)
    assert turns.next() == (order(2), (2,))


def test_everything_that_waits_for_a_verdict_goes_out_together() -> None:
    turns = Turns(epoch=9)
    turns.ask(1, item(1))
    assert turns.next() == (Verify(epoch=9, items=(item(1),)), (1,))
    turns.ask(2, item(2))
    turns.ask(3, item(3))
    assert turns.answered(1, 1)
    assert turns.next() == (Verify(epoch=9, items=(item(2), item(3))), (2, 3))
    assert turns.answered(3, 1)
    assert turns.next() is None
    assert turns.answered(2, 1)


def test_only_the_answer_of_the_round_that_was_asked_counts_and_only_once() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, order(1, 5))
    turns.next()
    assert not turns.answered(1, 4)
    assert not turns.answered(2, 5)
    assert turns.answered(1, 5)
    assert not turns.answered(1, 5)


def test_what_waits_for_a_session_that_ended_is_dropped() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, item(1))
    turns.ask(2, item(2))
    turns.forget(1)
    assert turns.next() == (Verify(epoch=1, items=(item(2),)), (2,))
