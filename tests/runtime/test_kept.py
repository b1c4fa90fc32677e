"""The prefix cache of ended sessions, as values: packed logs in, sessions to go on from and
sessions to let go out."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.fleet.prefix_cache import MAX_KEPT, WORTH, PrefixCache, bases, common_tokens
from dovetail.runtime.session.kept import Base, Kept, pack

LOG = tuple(range(100, 140))
logs = st.builds(
    lambda alike, rest: [1] * alike + rest,
    st.integers(0, 40),
    st.lists(st.integers(0, 2), max_size=20),
)


def kept(session: int, log: Sequence[int], rows: int | None = None) -> Kept:
    return Kept(session, pack(log), len(log) - 1 if rows is None else rows, len(log))


def cache(*sessions: Kept, limit: int = 1 << 20) -> PrefixCache:
    filled = PrefixCache(limit)
    for session in sessions:
        assert filled.add(session) == []
    return filled


@given(logs, logs)
def test_packed_logs_begin_alike_as_far_as_the_logs_do(one: list[int], other: list[int]) -> None:
    alike = next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_tokens(pack(one), pack(other)) == alike


def test_a_prompt_goes_on_from_the_session_with_most_of_it() -> None:
    held = cache(kept(1, (*LOG[:20], 7, 8)), kept(2, LOG), kept(3, (*LOG[:30], 7, 8)))
    assert held.find(pack((*LOG, 1, 2))) == Base(2, 39)
    assert held.find(pack((*LOG[:30], 7, 8, 9))) == Base(3, 31)


def test_the_last_token_of_a_prompt_is_always_read() -> None:
    held = cache(kept(1, LOG))
    assert held.find(pack(LOG)) == Base(1, 39)
    assert held.find(pack(LOG[:30])) == Base(1, 29)


def test_what_begins_alike_for_a_few_tokens_is_not_worth_it() -> None:
    assert cache(kept(1, LOG[: WORTH + 1])).find(pack((*LOG[:WORTH], 7))) == Base(1, WORTH)
    assert cache(kept(1, LOG[: WORTH + 1])).find(pack((*LOG[: WORTH - 1], 7, 8))) is None
    assert PrefixCache(1000).add(kept(1, LOG[:WORTH])) is None


def test_a_long_session_is_not_lost_for_what_many_prompts_begin_with() -> None:
    held = cache(kept(1, (*LOG[:18], *range(500, 600))), kept(2, (*LOG[:18], 5, 6, 7)))
    assert held.find(pack((*LOG[:18], 9))) == Base(2, 18)
    held.pin(Base(2, 18))
    assert held.find(pack((*LOG[:18], 9))) is None


def test_where_sessions_share_it_is_left_to_its_next_turn_and_others_begin_with_its_rows() -> None:
    held = replace(cache(kept(1, (*LOG, *range(500, 600)))), shares=True)
    prompt = pack((*LOG[:18], 9))
    assert held.find(prompt) == Base(1, 18, shared=True)
    assert held.find(pack((*LOG, *range(500, 600), 4))) == Base(1, 139)
    running = [replace(kept(7, LOG[:30]), rows=25), kept(8, LOG[:17])]
    assert held.find(pack((*LOG[:22], 9)), running=running) == Base(1, 22, shared=True)
    assert cache().find(prompt, running=running) is None
    empty = replace(cache(), shares=True)
    assert empty.find(pack(LOG), running=running) == Base(7, 25, shared=True)
    assert empty.find(pack(LOG), running=running, owner="other") is None


def test_rows_that_several_sessions_share_are_counted_once() -> None:
    held = replace(cache(kept(1, LOG * 5)), shares=True)
    for session in (2, 3):
        held.taken(session, Base(1, 163, shared=True))
    assert held.shared.saved(range(10)) == 2 * 160
    held.taken(4, Base(3, 199, shared=True))
    assert held.shared.saved(range(10)) == 3 * 160
    held.pin(Base(1, 199))
    held.taken(5, Base(1, 199))
    assert held.shared.saved(range(10)) == 3 * 160
    held.taken(6, Base(9, 127, shared=True))
    assert held.shared.saved(range(10)) == 3 * 160
    assert held.shared.saved([2, 3]) == held.shared.saved_by(2, 163, [2, 3]) == 160
    for session, saved in ((5, 2 * 160), (2, 160), (9, 160), (4, 0), (3, 0)):
        held.shared.end(session)
        assert held.shared.saved(range(10)) == saved


def test_what_a_worker_refused_to_share_is_not_counted() -> None:
    held = replace(cache(kept(1, LOG * 5)), shares=True)
    for session, base, lost in ((2, 1, False), (3, 1, True), (4, 77, True)):
        held.taken(session, Base(base, 163, shared=True))
        held.refused(session, Base(base, 163, shared=True), lost=lost)
        assert held.shared.saved(range(100)) == 0
        assert len(held) == (not lost)
    assert len(held.shared) == 0


def test_rows_that_are_many_more_are_shared_anew() -> None:
    held = replace(cache(), shares=True)
    held.taken(2, Base(1, 128, shared=True))
    for session in (3, 4):
        held.taken(session, Base(2, 320, shared=True))
    assert held.shared.saved(range(10)) == 2 * 320


def test_the_oldest_go_when_there_is_no_more_room_and_what_is_too_large_is_not_kept() -> None:
    held = cache(kept(1, LOG), kept(2, LOG), limit=100)
    assert held.add(kept(3, LOG)) == [1]
    assert held.add(kept(4, (*LOG, *LOG))) == [2, 3]
    assert held.add(kept(5, LOG * 3)) is None
    assert (len(held), held.tokens) == (1, 80)


def test_what_a_session_is_to_begin_with_goes_last_and_its_rows_count_once() -> None:
    for left, gone in ((48, []), (47, [2]), (8, [2]), (7, [2, 1]), (-90, [2, 1])):
        held = replace(cache(kept(1, LOG), kept(2, LOG)), shares=True)
        assert held.give_up(left, Base(1, 36, shared=True)) == gone
    assert cache(kept(1, LOG), kept(2, LOG)).give_up(40) == [1]


def test_what_is_pinned_takes_room_until_it_is_taken_and_can_be_given_back() -> None:
    held = cache(kept(1, LOG), kept(2, LOG), limit=100)
    held.pin(Base(1, 39))
    assert held.add(kept(3, LOG)) == [2]
    assert held.add(kept(4, (*LOG, *LOG))) is None
    held.give_back(Base(1, 39))
    assert held.find(pack((*LOG, 5))) == Base(1, 39)
    held.pin(Base(1, 39))
    held.taken(9, Base(1, 39))
    held.give_back(Base(1, 39))
    assert (len(held), held.tokens) == (1, 40)


def test_nobody_goes_on_from_what_another_has_sent() -> None:
    held = cache(replace(kept(1, LOG), owner="one"), replace(kept(2, LOG[:30]), owner="two"))
    prompt = pack((*LOG, 5))
    assert held.find(prompt, owner="one") == Base(1, 39)
    assert held.find(prompt, owner="two") == Base(2, 29)
    assert held.find(prompt) is None
    assert held.find(prompt, owner="three") is None


def test_there_is_a_limit_to_the_sessions_that_are_looked_through() -> None:
    held = cache(*(kept(number, LOG) for number in range(MAX_KEPT)))
    assert held.add(kept(MAX_KEPT, LOG)) == [0]


def test_a_target_and_a_draft_that_does_not_read_it_each_go_on_from_what_they_have() -> None:
    target, draft = cache(kept(1, LOG)), cache(kept(2, LOG, rows=30))
    assert bases(pack((*LOG, 1)), target, draft, reads=False) == (Base(1, 39), Base(2, 30))
    assert len(target) == len(draft) == 1
    assert bases(pack((*LOG, 1)), target, draft, reads=False) == (None, None)


def test_a_draft_that_reads_its_target_goes_on_from_where_the_target_does_or_neither_does() -> None:
    target, draft = cache(kept(1, LOG)), cache(kept(1, LOG, rows=30))
    assert bases(pack((*LOG, 1)), target, PrefixCache(0), reads=True) == (None, None)
    assert bases(pack((*LOG, 1)), PrefixCache(0), draft, reads=True) == (None, None)
    assert bases(pack((*LOG, 1)), target, draft, reads=True) == (Base(1, 30), Base(1, 30))


def test_a_row_of_a_draft_that_reads_its_target_counts_only_with_the_token_behind_it() -> None:
    target, draft = cache(kept(1, LOG)), cache(kept(1, LOG))
    assert bases(pack((*LOG[:30], 1, 2)), target, draft, reads=True) == (Base(1, 29), Base(1, 29))


@given(st.lists(st.tuples(logs, st.integers(0, 60)), max_size=8), logs, st.booleans())
def test_whatever_is_found_has_the_rows_that_the_prompt_begins_with(
    held: list[tuple[list[int], int]], prompt: list[int], reads: bool
) -> None:
    sessions = {number: (log, min(rows, len(log))) for number, (log, rows) in enumerate(held)}
    target, draft = PrefixCache(100), PrefixCache(1000)
    for number, (log, rows) in sessions.items():
        target.add(kept(number, log, rows))
        draft.add(kept(number, log, rows))
    assert target.tokens <= target.limit
    for base in filter(None, bases(pack(prompt), target, draft, reads=reads)):
        log, rows = sessions[base.session]
        assert WORTH <= base.tokens <= min(rows, len(prompt) - 1)
        assert log[: base.tokens] == prompt[: base.tokens]
