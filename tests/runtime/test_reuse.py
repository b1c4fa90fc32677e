"""Conversations whose turns go on from what the workers still hold. The scripted workers check that
they have the rows that they are told to go on from, and a draft that reads its target every row of
features; what the target alone writes is the oracle."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import Failed, Feed, Finished, Limits, Open, Reads, Verify
from dovetail.protocol.settings import CoordinatorSettings, Sampling, TreeSettings
from dovetail.runtime.client import Client
from dovetail.runtime.fleet.prefix_cache import MAX_KEPT, WORTH, PrefixCache, bases, common_tokens
from dovetail.runtime.session.request import Base, Kept, pack
from support.houses import DYNAMIC, House, pumped
from support.scripted import (
    READS,
    ROOMY,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    continuation,
)

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
    assert empty.find(pack(LOG), running=running, scope="other") is None


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
    held = cache(replace(kept(1, LOG), scope="one"), replace(kept(2, LOG[:30]), scope="two"))
    prompt = pack((*LOG, 5))
    assert held.find(prompt, scope="one") == Base(1, 39)
    assert held.find(prompt, scope="two") == Base(2, 29)
    assert held.find(prompt) is None
    assert held.find(prompt, scope="three") is None


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


def test_a_draft_that_reads_its_target_reads_the_row_before_the_last_token_again() -> None:
    target, draft = cache(kept(1, LOG)), cache(kept(1, LOG))
    count = len(LOG) - 2
    assert bases(pack(LOG), target, draft, reads=True) == (Base(1, count), Base(1, count))


@given(st.lists(st.tuples(logs, st.integers(0, 60)), max_size=8), logs, st.booleans())
@example([([1] * 17, 16)], [1] * 17, True)  # a draft recomputes the row before the last token
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


PROMPT = next(
    prompt
    for first in range(1, 60)
    if len(continuation(prompt := tuple(range(first, first + 30)), 60)) == 60
)
REJECTION = Sampling(temperature=1.0, acceptance="rejection")
STATIC = TreeSettings(policy="static", insist=True, gamma=6, depth=3, width=2)


def turn(house: House, prompt: Sequence[int], **options: object) -> Finished:
    """A request, whose reply is the right one."""
    asked: dict[str, object] = {"max_tokens": 12, **options}
    finished = house.complete(prompt=tuple(prompt), **asked)
    assert list(finished.result.token_ids) == continuation(prompt, asked["max_tokens"])  # type: ignore[arg-type]
    return finished


def opens(worker: ScriptedWorker | None) -> list[Open]:
    assert worker is not None
    return [command for command in worker.seen if isinstance(command, Open)]


def held(house: House) -> list[int]:
    """Return the number of ended sessions that each worker holds."""
    return [len(worker.kept) for worker in house.workers]


@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
@pytest.mark.parametrize("repeat", [1, 3])
def test_the_next_turn_of_a_conversation_reads_only_what_is_new(
    reads: Reads | None, repeat: int
) -> None:
    house = House(limits=ROOMY, reads=reads, repeat=repeat)
    log = [*PROMPT]
    for number in range(1, 5):
        before = len(log)
        result = turn(house, log).result
        target, draft = opens(house.target)[-1], opens(house.draft)[-1]
        if number > 1:
            assert target.base == draft.base == number - 1
            assert before - 12 < target.kept < before
            assert result.reused_tokens == target.kept
            assert target.kept == draft.kept if reads else target.kept >= draft.kept
        log += [*result.token_ids, 3, number]
    assert house.report().totals.kept == 1
    assert held(house) == [1, 1]
    assert house.report().refused == 0


def test_features_for_a_draft_that_reads_its_target_begin_where_the_kept_rows_end() -> None:
    house = House(limits=ROOMY, reads=READS)
    first = turn(house, PROMPT)
    assert house.draft is not None
    house.draft.seen.clear()
    result = turn(house, (*PROMPT, *first.result.token_ids, 1, 2, 3)).result
    starts = [command.start for command in house.draft.seen if isinstance(command, Feed)]
    assert starts[0] == opens(house.draft)[0].kept == result.reused_tokens > len(PROMPT)
    assert result.accepted_tokens > 0


@pytest.mark.parametrize(("reads", "kept"), [(None, 28), (READS, 27)], ids=["alone", "reads"])
def test_a_prompt_that_goes_another_way_in_the_middle_reuses_what_is_before(
    reads: Reads | None, kept: int
) -> None:
    house = House(limits=ROOMY, reads=reads)
    turn(house, PROMPT, max_tokens=8)
    assert turn(house, (*PROMPT[:28], 90, 91, 92)).result.reused_tokens == kept


def test_a_beginning_that_many_prompts_share_costs_no_conversation_its_cache() -> None:
    house = House(limits=ROOMY)
    first = turn(house, (*PROMPT, *range(40, 90)))
    assert turn(house, (*PROMPT, 1)).result.reused_tokens == 0
    log = (*PROMPT, *range(40, 90), *first.result.token_ids)
    assert turn(house, (*log, 1)).result.reused_tokens == len(log) - 1


def test_a_prompt_that_was_only_read_is_reused_as_a_whole() -> None:
    house = House(limits=ROOMY)
    assert turn(house, PROMPT, max_tokens=0).result.finish_reason == "length"
    assert turn(house, (*PROMPT, 1)).result.reused_tokens == len(PROMPT)


def test_nothing_is_kept_where_the_setting_or_the_workers_say_so() -> None:
    for house in (House(limits=ROOMY, settings=CoordinatorSettings(reuse=False)), House()):
        turn(house, PROMPT)
        assert held(house) == [0, 0]
        assert turn(house, PROMPT).result.reused_tokens == 0


def test_the_oldest_conversation_is_let_go_where_there_is_no_more_room() -> None:
    house = House(limits=Limits(context=512, kept=130))  # the scripted workers hold no more
    prompts = [tuple((7 * number + place) % 90 + 1 for place in range(30)) for number in range(3)]
    for prompt in prompts:
        turn(house, prompt, max_tokens=8)
    assert [
        turn(house, prompt, max_tokens=8).result.reused_tokens for prompt in reversed(prompts)
    ] == [29, 29, 0]
    assert held(house) == [2, 2]


def test_kept_sessions_count_for_no_limit_of_open_ones() -> None:
    house = House(limits=Limits(context=512, kept=1 << 16, sessions=1))
    for number in range(4):
        turn(house, (number, *PROMPT))
    assert held(house) == [4, 4]
    report = house.report()
    assert [worker.sessions for worker in report.workers] == [0, 0]
    assert (report.totals.kept, report.totals.occupied) == (4, 0.0)


def test_a_draft_that_holds_less_than_its_target_reads_more() -> None:
    house = House(limits=ROOMY)
    first = turn(house, PROMPT, speculate=False).result
    prompt = (*PROMPT, *first.token_ids, 1, 2)
    second = turn(house, prompt).result
    assert (second.reused_tokens, opens(house.draft)[-1].base) == (len(prompt) - 3, None)
    turn(house, (*prompt, *second.token_ids, 1, 2), speculate=False)
    assert held(house) == [1, 1]


@pytest.mark.parametrize(
    ("reads", "reuses"), [(None, True), (READS, False)], ids=["alone", "reads"]
)
def test_another_draft_has_nothing_to_go_on_from(reads: Reads | None, reuses: bool) -> None:
    house = House(limits=ROOMY, reads=reads)
    turn(house, PROMPT)
    assert house.draft is not None
    house.lose(house.draft)
    assert turn(house, (*PROMPT, 1)).result.reused_tokens > 0, (
        "the target alone has all that it needs"
    )
    head = {"reads": reads, "vocabulary": None} if reads else {}
    draft = house.add(ScriptedDraft, "draft", limits=ROOMY, **head)
    assert (turn(house, (*PROMPT, 2)).result.reused_tokens > 0) is reuses
    assert opens(draft)[-1].base is None


def test_another_target_has_nothing_to_go_on_from() -> None:
    house = House(limits=ROOMY)
    turn(house, PROMPT)
    assert house.target is not None
    house.lose(house.target)
    house.add(ScriptedTarget, "target", limits=ROOMY)
    assert turn(house, (*PROMPT, 1)).result.reused_tokens == 0


@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
@pytest.mark.parametrize("forgetful", [["target"], ["draft"], ["target", "draft"]], ids="-".join)
def test_a_worker_that_does_not_have_what_it_was_to_go_on_from_reads_the_whole_prompt(
    reads: Reads | None, forgetful: list[str]
) -> None:
    house = House(limits=ROOMY, reads=reads)
    turn(house, PROMPT)
    for worker in house.workers:
        if worker.role in forgetful:
            worker.kept.clear()
    result = turn(house, (*PROMPT, 1)).result
    assert (result.reused_tokens == 0) is ("target" in forgetful)
    assert result.draft_failure is None
    if reads is None:  # the features of a prompt that its target does not read again are not there
        assert result.drafted_tokens > 0
    assert result.time_to_first_token_s < result.wall_s
    assert abs(result.unaccounted_s) < 1e-9 + 0.02 * result.wall_s
    report = house.report()
    assert (report.failed, report.refused, [worker.sessions for worker in report.workers]) == (
        0,
        0,
        [0, 0],
    )
    assert turn(house, (*PROMPT, 2)).result.reused_tokens > 0 or (reads and "draft" in forgetful)


def test_what_is_drawn_with_the_draft_and_what_is_scored_begins_anew_and_is_kept() -> None:
    house = House(limits=ROOMY)
    for options in ({"sampling": REJECTION, "tree": STATIC}, {"logprobs": 2, "scored": True}):
        turn(house, PROMPT)
        assert turn(house, PROMPT, **options).result.reused_tokens == 0
    assert [command.base for command in opens(house.target)] == [None, None, 2, None]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
def test_a_reply_that_is_cancelled_is_gone_on_from_once_its_prompt_has_been_read(
    steps: int, reads: Reads | None
) -> None:
    house = House(limits=ROOMY, reads=reads)
    request = house.submit(PROMPT)
    for _ in range(steps):
        house.coordinator.pump()
        for worker in house.workers:
            worker.step()
    house.client.cancel(request)
    result = house.client.complete(request).result
    assert result.finish_reason == "cancelled"
    house.run()
    read = bool(result.token_ids)
    assert held(house)[0] == read
    log = (*PROMPT, *result.token_ids)
    reused = turn(house, (*log, 3, 4)).result.reused_tokens
    assert reused == 0 if not read else reused == len(log) - 1 or (reads and reused <= len(log) - 1)


def test_what_was_to_be_gone_on_from_is_there_for_others_when_the_session_never_began() -> None:
    house = House(limits=ROOMY)
    turn(house, PROMPT)
    busy = house.submit((1, 2, 3), max_tokens=1)
    house.coordinator.pump()  # the target reads this prompt first
    waiting = house.submit((*PROMPT, 1))
    house.coordinator.pump()
    house.client.cancel(waiting)
    assert {reply.request for reply in house.replies() if isinstance(reply, Finished)} == {
        busy,
        waiting,
    }
    assert house.report().totals.kept == held(house)[0] == 1
    assert turn(house, (*PROMPT, 1)).result.reused_tokens == len(PROMPT)


@given(
    data=st.data(),
    reads=st.sampled_from([None, READS]),
    room=st.sampled_from([0, 90, 250, 1 << 16]),
)
@settings(max_examples=24, deadline=None)
def test_no_interleaving_of_conversations_changes_a_token(
    data: st.DataObject, reads: Reads | None, room: int
) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    shares, parts = rng.random() < 0.6, rng.choice([0, 7])
    limits = Limits(context=512, kept=room, shares=shares, prompt_rows=parts)
    house = House(reads=reads, limits=limits)
    logs = [[*PROMPT, 40 + number] if number % 2 else [50 + number, *PROMPT] for number in range(4)]
    running: dict[int, tuple[int, tuple[int, ...]]] = {}
    turns = reused = 0
    while turns < 25 or running:
        free = [
            number
            for number in range(4)
            if number not in {conversation for conversation, _ in running.values()}
        ]
        if free and turns < 25:
            conversation = rng.choice(free)
            prompt = tuple(logs[conversation])
            running[
                house.submit(prompt, max_tokens=rng.randint(0, 12), speculate=rng.random() < 0.8)
            ] = conversation, prompt
            turns += 1
        if running and rng.random() < 0.15:
            house.client.cancel(rng.choice([*running]))
        for _ in range(rng.randint(0, 6)):
            house.coordinator.pump()
            rng.choice(house.workers).step()
        for reply in house.replies() if rng.random() < 0.3 or turns == 25 else ():
            if isinstance(reply, Failed):
                assert reply.code == "cancelled"  # while it waited for what it begins with
                running.pop(reply.session or 0)
            if isinstance(reply, Finished):
                conversation, prompt = running.pop(reply.request)
                tokens = [*reply.result.token_ids]
                assert tokens == continuation(prompt, len(tokens)) if tokens else True
                reused += reply.result.reused_tokens
                logs[conversation] = (
                    [*prompt, *tokens, rng.randint(1, 90)]
                    if rng.random() < 0.8
                    else [*prompt[: rng.randint(20, 31)], rng.randint(1, 90)]
                )
    house.run()
    report = house.report()
    assert held(house) == [
        len(worker.shelf) for worker in house.coordinator.registry.workers.values()
    ]
    assert (report.sessions, report.refused, report.failed) == (0, 0, 0)
    assert report.totals.reused_tokens == reused
    assert bool(reused) is (room > 0) or room == 90 or shares
    if not house.report().totals.kept:
        assert [len(w.shelf.shared) for w in house.coordinator.registry.workers.values()] == [0, 0]


# -- beginnings that are shared --------------------------------------------------------------------

SHARING = Limits(context=512, kept=1 << 16, shares=True, prompt_rows=256)
BEGINNING = next(
    begins
    for last in range(1, 60)
    if all(
        len(continuation((*(begins := (*PROMPT, *range(last, 90), *range(30, 85))), own), 60)) == 60
        for own in (1, 2, 3)
    )
)


@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
def test_what_many_prompts_begin_with_is_read_once_and_costs_no_conversation_its_cache(
    reads: Reads | None,
) -> None:
    house = House(limits=SHARING, reads=reads)
    first = turn(house, (*BEGINNING, 1), max_tokens=40)
    for number in range(2, 6):
        result = turn(house, (*BEGINNING, number, number), max_tokens=40).result
        assert result.reused_tokens >= len(BEGINNING) - 1
    log = (*BEGINNING, 1, *first.result.token_ids)
    assert turn(house, (*log, 1)).result.reused_tokens >= len(log) - (6 if reads else 1)


def test_sessions_that_run_share_what_they_begin_with() -> None:
    house = House(limits=SHARING)
    requests = [house.submit((*BEGINNING, number), max_tokens=30) for number in range(1, 4)]
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    for number, request in enumerate(requests, 1):
        prompt = (*BEGINNING, number)
        assert list(ends[request].result.token_ids) == continuation(prompt, 30)
    reused = sorted(end.result.reused_tokens for end in ends.values())
    assert reused == [0, len(BEGINNING), len(BEGINNING)]
    shared = [command for command in opens(house.target) if command.shared]
    assert len(shared) == 2


def test_a_request_waits_while_what_it_begins_with_is_read_for_another_of_its_owner() -> None:
    house = House(limits=SHARING)
    first = house.submit((*BEGINNING, 1), owner="alice")
    house.coordinator.pump()
    same, other = (house.submit((*BEGINNING, 2), owner=owner) for owner in ("alice", "bob"))
    house.coordinator.pump()
    assert house.report().totals.queued == 1
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    reused = [ends[request].result.reused_tokens for request in (first, same, other)]
    assert reused == [0, len(BEGINNING), 0]


def test_what_the_draft_has_not_read_is_shared_without_it_and_the_draft_joins() -> None:
    house = House(limits=SHARING, reads=READS)
    first = house.submit((*BEGINNING, 1), max_tokens=200, speculate=False)
    while not house.target or not house.target.rounds.get(1):
        house.coordinator.pump()
        for worker in house.workers:
            worker.step()
    tokens = 150
    tree = TreeSettings(policy="dynamic")
    second = house.submit((*BEGINNING, 2), max_tokens=tokens, tree=tree)
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    result = ends[second].result
    assert list(result.token_ids) == continuation((*BEGINNING, 2), tokens)
    assert result.reused_tokens == len(BEGINNING)
    assert result.accepted_tokens > 0
    assert first in ends


def test_a_request_waits_no_longer_when_the_other_is_cancelled() -> None:
    house = House(limits=SHARING)
    first = house.submit((*BEGINNING, 1))
    house.coordinator.pump()
    second = house.submit((*BEGINNING, 2))
    house.coordinator.pump()
    house.client.cancel(first)
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    assert list(ends[second].result.token_ids) == continuation((*BEGINNING, 2), 60)


def test_rows_that_are_shared_count_once() -> None:
    most = {}
    for shares in (False, True):
        limits = SHARING.model_copy(update={"room": len(BEGINNING) + 190, "shares": shares})
        house = House(limits=limits)
        for number in range(1, 6):
            house.submit((*BEGINNING, number), max_tokens=30, speculate=False)
        house.replies()
        most[shares] = max(
            len(seen.items) for seen in house.target.seen if isinstance(seen, Verify)
        )
    assert most[False] == 1
    assert most[True] >= 3


def opening(house: House, first: int, *, stop: bool) -> list[int]:
    """Two requests that begin alike, the second of which is told to begin with the first's rows
    while the target reads another prompt; `stop`: the first is cancelled before it does."""
    one = house.submit((*BEGINNING, first), max_tokens=60, speculate=False)
    while not house.target or first not in [
        log[len(BEGINNING)] for log in house.target.logs.values()
    ]:
        house.coordinator.pump()
        house.run(1)
    other = house.submit(tuple(range(60, 90)), max_tokens=60, speculate=False)
    house.coordinator.pump()
    two = house.submit((*BEGINNING, 90), max_tokens=60, speculate=False)
    house.coordinator.pump()
    if stop:
        house.client.cancel(one)
        house.coordinator.pump()
    return [one, other, two]


def test_one_whose_beginning_has_gone_meanwhile_reads_it_and_counts_as_sharing_nothing() -> None:
    house = House(draft=False, limits=SHARING.model_copy(update={"kept": 20}))
    requests = opening(house, 1, stop=True)
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    assert list(ends[requests[2]].result.token_ids) == continuation((*BEGINNING, 90), 60)
    assert [command.shared for command in opens(house.target)] == [False, False, True, False]
    (worker,) = house.coordinator.registry.workers.values()
    assert len(worker.shelf.shared) == 0


@pytest.mark.parametrize("code", ["prefix", "memory"])
def test_a_session_that_runs_goes_on_where_another_could_not_begin_with_its_rows(code: str) -> None:
    house = House(draft=False, limits=SHARING)
    target = house.target
    assert target is not None
    take_over = target.take_over

    def refuse(command: Open, *, known: int = 0) -> Failed | None:
        if not command.shared:
            return take_over(command, known=known)
        about = {"session": command.session, "round": command.round}
        return Failed(epoch=target.epoch, **about, code=code, text="no")

    target.take_over = refuse  # type: ignore[method-assign]
    one, _, two = opening(house, 1, stop=False)
    replies = house.replies()
    ends = {reply.request: reply for reply in replies if isinstance(reply, Finished)}
    assert list(ends[one].result.token_ids) == continuation((*BEGINNING, 1), 60)
    assert (two in ends) is (code == "prefix")
    assert sum(command.prompt[-1] == 1 for command in opens(target)) == 1


def test_sessions_that_are_kept_make_no_room_by_what_they_share() -> None:
    house = House(draft=False, limits=SHARING.model_copy(update={"room": 300}))
    for number in range(1, 5):
        turn(house, (*BEGINNING, number), speculate=False, max_tokens=60)
    for first in range(4):
        house.submit((60 + first, *range(20)), max_tokens=80, speculate=False)
    house.coordinator.pump()
    assert house.coordinator.report().totals.queued == 2


def test_requests_of_the_same_owner_pass_one_that_waits_for_its_beginning() -> None:
    house = House(limits=SHARING)
    house.submit((*BEGINNING, 1))
    house.coordinator.pump()
    house.submit((*BEGINNING, 2))
    house.submit((3, 4, 5))
    house.coordinator.pump()
    assert house.coordinator.report().totals.queued == 1
    assert [one.session.request.prompt[-1] for one in house.coordinator.requests] == [1, 5]


@pytest.mark.parametrize("queue", [0, 2])
def test_nobody_is_refused_where_only_beginnings_are_waited_for(queue: int) -> None:
    house = House(limits=SHARING, settings=CoordinatorSettings(queue=queue))
    requests = [house.submit((*BEGINNING, number)) for number in range(1, 6)]
    ends = {reply.request: reply for reply in house.replies() if isinstance(reply, Finished)}
    for number, request in enumerate(requests, 1):
        assert list(ends[request].result.token_ids) == continuation((*BEGINNING, number), 60)


# -- between users ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [None, READS], ids=["alone", "reads"])
def test_what_one_user_has_sent_is_kept_from_the_others_and_for_itself(reads: Reads | None) -> None:
    house = House(limits=ROOMY, reads=reads)
    assert turn(house, PROMPT, owner="alice").result.reused_tokens == 0
    assert turn(house, (*PROMPT, 5), owner="bob").result.reused_tokens == 0
    assert turn(house, (*PROMPT, 5)).result.reused_tokens == 0
    assert all(
        command.base is None for worker in (house.target, house.draft) for command in opens(worker)
    )
    assert turn(house, (*PROMPT, 6), owner="alice").result.reused_tokens >= len(PROMPT) - 1


def test_prefixes_are_shared_between_users_where_the_settings_say_so() -> None:
    house = House(limits=ROOMY, settings=CoordinatorSettings(share_prefixes="all"))
    assert turn(house, PROMPT, owner="alice").result.reused_tokens == 0
    assert turn(house, (*PROMPT, 5), owner="bob").result.reused_tokens >= len(PROMPT) - 1
    assert turn(house, (*PROMPT, 6)).result.reused_tokens >= len(PROMPT) - 1


def test_the_keys_of_links_are_users_too() -> None:
    house = House(limits=ROOMY)
    far = [
        Client(pumped(house, house.hub.connect(PeerKey(name, ("client",), name[0] * 40))))
        for name in ("laptop", "desktop")
    ]

    def ask(client: Client, *more: int) -> int:
        request = client.submit(tokens=(*PROMPT, *more), max_tokens=12, seed=1, tree=DYNAMIC)
        return client.complete(request).result.reused_tokens

    assert [ask(far[0]), ask(far[1]), ask(house.client)] == [0, 0, 0]
    assert min(ask(far[1], 5), ask(house.client, 6)) >= len(PROMPT) - 1


def test_a_draft_that_joins_and_a_target_that_takes_over_go_on_from_nobody_elses() -> None:
    house = House(limits=ROOMY, draft=False)
    first = house.target
    turn(house, PROMPT, owner="alice")
    assert first is not None
    joiner = house.add(ScriptedDraft, "draft", limits=ROOMY)
    turn(house, PROMPT, owner="alice")
    house.lose(joiner)
    joiner = house.add(ScriptedDraft, "draft", limits=ROOMY)
    assert turn(house, PROMPT, owner="bob").result.reused_tokens == 0
    assert [command.base for command in opens(joiner)] == [None]
