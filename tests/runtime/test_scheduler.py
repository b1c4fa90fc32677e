"""Turns on a worker: one command at a time, verdicts together, answers matched by what they
answer."""

from collections.abc import Sequence

import pytest

from dovetail.protocol.arrays import ITEM_BYTES, MAX_ARRAY_BYTES, Array
from dovetail.protocol.codec import COMMAND, MAX_BODY_BYTES, encode
from dovetail.protocol.links.sockets import MAX_MESSAGE_BYTES
from dovetail.protocol.messages import (
    MAX_CANDIDATES,
    MAX_NODES,
    MAX_SESSIONS,
    Draft,
    Drafted,
    Drafts,
    Fed,
    Feed,
    Open,
    Opened,
    Read,
    ReadItem,
    Reads,
    Refed,
    Refeed,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import MAX_GAMMA, Sampling, TreeSettings
from dovetail.runtime.fleet.scheduler import Owed, Rest, Turns
from dovetail.workers.speculation.rejection import CANDIDATES


def item(session: int, nodes: int = 0) -> VerifyItem:
    return VerifyItem(
        session=session, round=1, prefix=3, tokens=tuple(range(nodes)), parents=(-1,) * nodes
    )


def verify(*sessions: int) -> Verify:
    return Verify(epoch=1, items=tuple(item(session) for session in sessions))


def drawn(session: int, nodes: int, width: int) -> Verify:
    """The order to verify a tree whose nodes were drawn from `width` candidates each, which say the
    session's number."""
    rows = Array(
        dtype="int32",
        shape=(1 + nodes, width),
        data=session.to_bytes(4, "little") * (1 + nodes) * width,
    )
    return Verify(
        epoch=1,
        items=(item(session, nodes),),
        candidates=rows,
        probabilities=rows.model_copy(update={"dtype": "float32"}),
    )


def order(session: int, round_: int = 1) -> Draft:
    return Draft(
        epoch=1,
        session=session,
        round=round_,
        prefix=3,
        accepted=(),
        bonus=1,
        max_nodes=4,
        max_depth=2,
        max_width=2,
    )


def feed(session: int, start: int) -> Feed:
    return Feed(
        epoch=1,
        session=session,
        start=start,
        features=Array(dtype="float16", shape=(1, 1), data=b"ab"),
    )


def refeed(session: int) -> Refeed:
    return Refeed(
        epoch=1,
        session=session,
        round=1,
        start=0,
        prefix=3,
        features=Reads(width=1, dtype="float16", vocabulary_size=9),
    )


def test_a_worker_gets_nothing_while_it_owes_an_answer() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, order(1))
    turns.ask(2, order(2))
    assert turns.next() == (order(1), (1,))
    assert turns.next() is None
    assert turns.answered(1, Owed(Drafted, 1))
    assert turns.next() == (order(2), (2,))


def test_everything_that_waits_for_a_verdict_goes_out_together() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, verify(1))
    assert turns.next() == (verify(1), (1,))
    turns.ask(2, verify(2))
    turns.ask(3, verify(3))
    assert turns.answered(1, Owed(Verified, 1))
    assert turns.next() == (verify(2, 3), (2, 3))
    assert turns.answered(3, Owed(Verified, 1))
    assert turns.next() is None
    assert turns.answered(2, Owed(Verified, 1))


def test_drawn_trees_go_out_with_others_drawn_from_as_many_candidates() -> None:
    turns = Turns(epoch=1)
    for command in (drawn(1, 2, 4), verify(2), drawn(3, 0, 4), drawn(4, 1, 5), verify(5)):
        turns.ask(command.items[0].session, command)
    sent = []
    while (turn := turns.next()) is not None:
        sent.append(turn)
        for session in turn[1]:
            assert turns.answered(session, Owed(Verified, 1))
    assert [sessions for _, sessions in sent] == [(1, 3), (2, 5), (4,)]
    together, plain, alone = (command for command, _ in sent)
    assert isinstance(together, Verify)
    assert together.items == (item(1, 2), item(3))
    assert together.candidates == Array(
        dtype="int32", shape=(4, 4), data=b"\1\0\0\0" * 12 + b"\3\0\0\0" * 4
    )
    assert together.probabilities is not None
    assert (together.probabilities.dtype, together.probabilities.data) == (
        "float32",
        together.candidates.data,
    )
    assert plain == verify(2, 5)
    assert alone == drawn(4, 1, 5)


def test_a_message_that_cannot_be_built_is_owed_by_nobody() -> None:
    turns = Turns(epoch=1)
    unlike = drawn(1, 0, 4).model_copy(
        update={"candidates": Array(dtype="int64", shape=(1, 4), data=bytes(32))}
    )
    turns.ask(1, unlike)
    turns.ask(2, drawn(2, 0, 4))
    with pytest.raises(ValueError, match="bytes"):
        turns.next()
    assert not turns.owed
    turns.forget(1)
    assert turns.next() == (drawn(2, 0, 4), (2,))


def test_the_laws_of_as_many_trees_as_a_pass_may_have_can_travel_together() -> None:
    assert CANDIDATES <= MAX_CANDIDATES
    numbers = MAX_SESSIONS * MAX_NODES * MAX_CANDIDATES
    assert (
        numbers * (ITEM_BYTES["int32"] + ITEM_BYTES["float32"])
        <= MAX_ARRAY_BYTES
        <= MAX_MESSAGE_BYTES - MAX_BODY_BYTES
    )
    assert MAX_GAMMA + 1 <= MAX_NODES


def test_only_the_answer_that_was_asked_for_counts_and_only_once() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, order(1, 5))
    turns.next()
    assert not turns.answered(1, Owed(Drafted, 4))
    assert not turns.answered(1, Owed(Verified, 5))
    assert not turns.answered(2, Owed(Drafted, 5))
    assert turns.answered(1, Owed(Drafted, 5))
    assert not turns.answered(1, Owed(Drafted, 5))


def test_parts_of_a_prompt_are_fed_one_by_one() -> None:
    turns = Turns(epoch=1)
    for start in (0, 1):
        turns.ask(1, feed(1, start))
    assert turns.next() == (feed(1, 0), (1,))
    assert turns.answered(1, Owed(Fed, 0, 0))
    assert turns.next() == (feed(1, 1), (1,))
    assert not turns.answered(1, Owed(Fed, 0, 0))
    assert turns.answered(1, Owed(Fed, 0, 1))


def test_what_waits_for_a_session_that_ended_is_dropped() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, verify(1))
    turns.ask(2, verify(2))
    turns.forget(1)
    assert turns.next() == (verify(2), (2,))


def test_a_verdict_waits_for_what_its_session_asked_for_before_it() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, verify(1))
    turns.ask(2, refeed(2))
    turns.ask(2, verify(2))
    assert turns.next() == (verify(1), (1,))
    assert turns.answered(1, Owed(Verified, 1))
    assert turns.next() == (refeed(2), (2,))
    assert turns.answered(2, Owed(Refed, 1))
    assert turns.next() == (verify(2), (2,))


def test_the_answer_to_a_session_that_ended_is_wanted_by_none_that_follows_it() -> None:
    turns = Turns(epoch=1)
    turns.ask(1, order(1))
    assert turns.next() is not None
    turns.forget(1)
    turns.ask(1, order(1))
    assert turns.busy_with(1)
    assert turns.next() is None, "it still owes the first answer"
    assert not turns.answered(1, Owed(Drafted, 1))
    assert turns.next() == (order(1), (1,))
    assert turns.answered(1, Owed(Drafted, 1))


def test_what_a_session_does_not_want_any_more_is_withdrawn_by_its_type() -> None:
    turns = Turns(epoch=1)
    for command in (refeed(1), verify(1)):
        turns.ask(1, command)
    turns.ask(2, refeed(2))
    assert turns.withdraw(1, Refeed) == [refeed(1)]
    assert [command for _, command in turns.waiting] == [verify(1), refeed(2)]


def test_a_prompt_that_was_put_off_is_read_in_its_turn_once_it_is_wanted() -> None:
    turns = Turns(epoch=1)
    read = Open(
        epoch=1,
        session=1,
        key=bytes(16),
        prompt=(1, 2),
        capacity=9,
        vocabulary_size=9,
        sampling=Sampling(),
        tree=TreeSettings(),
    )
    turns.postpone(1, read)
    assert turns.next() is None
    assert (turns.busy_with(1), turns.reads(1), turns.reading) == (True, True, False)
    turns.ask(2, order(2))
    assert turns.resume(1)
    assert not turns.resume(1)
    assert turns.next() == (order(2), (2,))
    assert turns.answered(2, Owed(Drafted, 1))
    assert turns.next() == (read, (1,))
    assert turns.answered(1, Owed(Opened, 0))


def test_a_prompt_that_was_put_off_is_dropped_with_its_session() -> None:
    turns = Turns(epoch=1)
    read = Open(
        epoch=1,
        session=1,
        key=bytes(16),
        prompt=(1, 2),
        capacity=9,
        vocabulary_size=9,
        sampling=Sampling(),
        tree=TreeSettings(),
    )
    turns.postpone(1, read)
    assert turns.withdraw(1, Refeed) == []
    assert turns.forget(1) == [read]
    assert not turns.busy_with(1)


# -- logs that are read in parts -------------------------------------------------------------------


def prompt_of(session: int, tokens: int = 20) -> Open:
    return Open(
        epoch=1,
        session=session,
        key=bytes(16),
        prompt=tuple(range(1, tokens + 1)),
        capacity=99,
        vocabulary_size=99,
        sampling=Sampling(),
        tree=TreeSettings(),
    )


def in_parts(rows: int) -> Turns:
    """Turns of a worker that reads so many rows at a time, and none as it begins."""

    def share(_items: Sequence[VerifyItem], logs: Sequence[Rest]) -> Sequence[int]:
        return [0 if log.done < 0 else min(rows, log.left) for log in logs]

    return Turns(epoch=1, share=share, parts=True)


def part(session: int, start: int, rows: int) -> ReadItem:
    return ReadItem(session=session, round=0, start=start, rows=rows)


def begun(turns: Turns, session: int) -> None:
    """A prompt has begun to be read."""
    turns.ask(session, prompt_of(session))
    opened = prompt_of(session).model_copy(update={"read": 0})
    assert turns.next() == (opened, (session,))
    assert turns.read(session, 0, 0)


def test_a_prompt_is_read_in_the_passes_of_others() -> None:
    turns = in_parts(8)
    begun(turns, 2)
    for start in (0, 8):
        turns.ask(1, verify(1))
        shared = verify(1).model_copy(update={"reads": (part(2, start, 8),)})
        assert turns.next() == (shared, (1, 2))
        assert turns.answered(1, Owed(Verified, 1))
        assert turns.next() is None, "it still owes the part"
        assert turns.read(2, 0, start + 8)
    assert turns.next() == (Read(epoch=1, item=part(2, 16, 4)), (2,))
    assert turns.reading
    assert turns.answered(2, Owed(Opened, 0))
    assert not turns.reading
    assert not turns.busy_with(2)


def test_the_rest_of_a_prompt_waits_behind_what_others_asked_for() -> None:
    turns = in_parts(8)
    begun(turns, 2)
    assert turns.next() == (Read(epoch=1, item=part(2, 0, 8)), (2,))
    turns.ask(2, order(2))
    turns.ask(1, order(1))
    assert turns.read(2, 0, 8)
    assert turns.next() == (order(1), (1,))
    assert turns.answered(1, Owed(Drafted, 1))
    assert turns.next() == (Read(epoch=1, item=part(2, 8, 8)), (2,)), "before its own order"


def test_an_answer_that_comes_twice_reads_nothing_twice() -> None:
    turns = in_parts(8)
    begun(turns, 2)
    assert turns.next() is not None
    assert not turns.read(2, 0, 0)
    assert not turns.read(2, 1, 8)
    assert turns.read(2, 0, 8)
    assert not turns.read(2, 0, 8)


def test_a_prompt_of_a_session_that_ended_is_read_no_further() -> None:
    turns = in_parts(8)
    begun(turns, 2)
    assert turns.next() is not None
    assert turns.forget(2) == []
    assert not turns.read(2, 0, 8)
    assert not turns.busy_with(2)
    begun(turns, 2)
    assert turns.forget(2) == []
    assert turns.next() is None


def test_features_that_nobody_reads_any_more_are_computed_no_further() -> None:
    turns = in_parts(2)
    long = refeed(1).model_copy(update={"prefix": 9})
    turns.ask(1, long)
    turns.ask(1, verify(1))
    assert turns.next() == (long.model_copy(update={"read": 0}), (1,))
    assert turns.withdraw(1, Refeed) == []
    assert not turns.read(1, 1, 0)
    assert turns.next() == (verify(1), (1,))


def test_a_pass_that_could_not_be_sent_is_asked_for_again_with_its_part() -> None:
    turns = in_parts(8)
    begun(turns, 2)
    turns.ask(1, verify(1))
    sent = turns.next()
    turns.take_back()
    assert turns.next() == sent
    turns.take_back()
    assert turns.next(most=1) == (verify(1), (1,)), "a session alone has a pass without"


# -- orders that go together -----------------------------------------------------------------------


def together(*orders: Draft) -> Drafts:
    return Drafts.of(orders)


def test_orders_that_wait_when_a_draft_falls_idle_go_together_and_are_answered_one_by_one() -> None:
    turns = Turns(epoch=1, together=64)
    turns.ask(1, order(1))
    assert turns.next() == (order(1), (1,))
    for session in (2, 3, 4):
        turns.ask(session, order(session))
    assert turns.next() is None
    assert turns.answered(1, Owed(Drafted, 1))
    assert turns.next() == (together(order(2), order(3), order(4)), (2, 3, 4))
    assert turns.answered(4, Owed(Drafted, 1))
    turns.ask(4, order(4, 2))
    assert turns.next() is None, "it still owes two answers"
    assert turns.answered(2, Owed(Drafted, 1))
    assert turns.answered(3, Owed(Drafted, 1))
    assert turns.next() == (order(4, 2), (4,))


def test_no_more_orders_go_together_than_the_draft_takes() -> None:
    for most, expected in ((1, [(1,), (2,), (3,)]), (2, [(1, 2), (3,)])):
        turns, sent = Turns(epoch=1, together=most), []
        for session in (1, 2, 3):
            turns.ask(session, order(session))
        while (turn := turns.next()) is not None:
            sent.append(turn[1])
            for session in turn[1]:
                assert turns.answered(session, Owed(Drafted, 1))
        assert sent == expected


def test_an_order_does_not_overtake_what_its_own_session_asked_for() -> None:
    turns = Turns(epoch=1, together=64)
    turns.ask(1, order(1))
    turns.ask(2, feed(2, 0))
    turns.ask(2, order(2))
    turns.ask(3, order(3))
    assert turns.next() == (together(order(1), order(3)), (1, 3))
    for session in (1, 3):
        assert turns.answered(session, Owed(Drafted, 1))
    assert turns.next() == (feed(2, 0), (2,))


def test_orders_whose_features_are_not_alike_do_not_go_together() -> None:
    turns = Turns(epoch=1, together=64)
    rows = [Array(dtype="float16", shape=(1, width), data=bytes(2 * width)) for width in (2, 2, 3)]
    orders = [
        order(session).model_copy(update={"features": features})
        for session, features in enumerate([*rows, None])
    ]
    for session, asked in enumerate(orders):
        turns.ask(session, asked)
    message, sessions = turns.next() or (None, ())
    assert isinstance(message, Drafts)
    assert (sessions, message.rows) == ((0, 1, 3), (1, 1, 0))
    assert [*message.split()] == [orders[0], orders[1], orders[3]]


def test_an_order_without_features_brings_together_none_that_are_not_alike() -> None:
    turns = Turns(epoch=1, together=64)
    for session, width in enumerate((0, 2, 3)):
        rows = Array(dtype="float16", shape=(1, width), data=bytes(2 * width)) if width else None
        turns.ask(session, order(session).model_copy(update={"features": rows}))
    message, sessions = turns.next() or (None, ())
    assert isinstance(message, Drafts)
    assert (sessions, message.rows) == ((0, 1), (0, 1))


def test_of_orders_that_went_together_one_that_ended_is_wanted_by_nobody() -> None:
    turns = Turns(epoch=1, together=64)
    for session in (1, 2):
        turns.ask(session, order(session))
    assert turns.next() is not None
    turns.forget(1)
    assert not turns.answered(1, Owed(Drafted, 1))
    assert turns.next() is None
    assert turns.answered(2, Owed(Drafted, 1))


def test_orders_that_could_not_be_sent_wait_again() -> None:
    turns = Turns(epoch=1, together=64)
    for session in (1, 2):
        turns.ask(session, order(session))
    sent = turns.next()
    turns.take_back()
    assert not turns.owed
    assert turns.next() == sent
    turns.take_back()
    assert turns.next(1) == (order(1), (1,))


def test_a_pass_that_is_cut_is_packed_as_one_whose_fields_were_checked() -> None:
    turns = Turns(epoch=1, cut=lambda items: [1] * len(items))
    for session in (1, 2):
        turns.ask(session, Verify(epoch=1, items=(item(session, 3),)))
    sent, _ = turns.next() or pytest.fail("nothing is sent")
    frames = encode(sent)
    assert encode(COMMAND.decode(frames)) == frames
