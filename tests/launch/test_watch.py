"""The times at which processes of a service are started again: events and times in, actions out."""

import math
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.launch.processes.serving.service import RETRY_S, Inquiry
from dovetail.launch.processes.serving.watch import (
    FIRST_PAUSE_S,
    HEALTHY_S,
    LONGEST_PAUSE_S,
    LONGEST_SPARED_PAUSE_S,
    MOST_RESTARTS,
    RESTARTED,
    STANDSTILL_S,
    WITHIN_S,
    Action,
    GiveUp,
    Leave,
    Outage,
    Part,
    Replace,
    Start,
    Stop,
    Tell,
    Watch,
)
from dovetail.launch.processes.supervise import Ending
from dovetail.protocol.codec import REQUEST, encode
from dovetail.protocol.errors import LinkClosed
from dovetail.protocol.links import Link
from dovetail.protocol.messages import Hello, Message, Reported, Status, Welcome
from support.golden import representative
from support.memory_links import MemoryHub, memory_links

PARTS = (
    Part("hub"),
    Part("web", ("hub",)),
    Part("target", ("hub", "web"), known=True),
    Part("draft", ("hub", "web"), known=True, needed=False),
)
WORKERS = ("target", "draft")
KILLED = Ending(-9, "was killed by SIGKILL")
STUCK_S = 10.0


def starting() -> Watch:
    return Watch(PARTS, 0.0, stuck_s=STUCK_S)


def serving() -> Watch:
    """Everything is ready, at second 0."""
    watch = starting()
    for name in ("hub", "web"):
        watch.due(0.0)
        watch.ready(name, 0.0)
    watch.due(0.0)
    watch.answered(WORKERS, 0.0)
    assert watch.serving
    return watch


def look(
    watch: Watch,
    first_s: float,
    last_s: float,
    known: Collection[str] | None = WORKERS,
    filled: Collection[str] = (),
) -> list[tuple[float, Action]]:
    """Return what is done, and when, as the watch looks once a second. Each time the root answers
    that it knows `known`; None: it does not answer."""
    actions = []
    for second in range(math.ceil(first_s), math.floor(last_s) + 1):
        answers = [] if known is None else watch.answered(known, second, filled)
        actions += [
            (float(second), action)
            for action in [*answers, *watch.due(second)]
            if not isinstance(action, Tell)
        ]
    return actions


def without_words(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Tell)]


def wait_s(watch: Watch, name: str, ended_s: float) -> float:
    """Return the pause after which the part is started again, to a tenth of a second."""
    for tenths in range(math.ceil(LONGEST_SPARED_PAUSE_S * 10) + 1):
        if Start(name) in watch.due(ended_s + tenths / 10):
            return tenths / 10
    raise AssertionError(f"{name} is not started again")


def test_a_part_starts_when_those_before_it_are_ready() -> None:
    watch = starting()
    assert watch.due(0.0) == [Start("hub")]
    assert watch.due(1.0) == []
    watch.ready("hub", 1.0)
    assert watch.due(1.0) == [Start("web")]
    watch.ready("web", 2.0)
    assert watch.due(2.0) == [Start("target"), Start("draft")]
    watch.answered(["draft"], 3.0)
    assert not watch.serving
    watch.answered(WORKERS, 4.0)
    assert watch.serving


@pytest.mark.parametrize("name", ["hub", "web", "target"])
def test_the_first_loss_before_all_was_ready_ends_the_service(name: str) -> None:
    watch = starting()
    for part in ("hub", "web"):
        watch.due(0.0)
        watch.ready(part, 0.0)
    watch.due(0.0)
    assert watch.ended(name, KILLED, 1.0) == [GiveUp(name)]


def test_a_lost_worker_is_started_again_after_half_a_second_and_nothing_else_is_touched() -> None:
    watch = serving()
    assert watch.ended("draft", KILLED, 10.0) == [
        Tell("the draft was killed by SIGKILL; it is restarted in 0.5 s")
    ]
    assert watch.due(10.49) == []
    assert watch.due(10.5) == [Start("draft")]
    assert watch.due(10.6) == []
    assert watch.answered(["target"], 10.8) == []
    assert watch.answered(WORKERS, 11.0) == [Tell("the draft is ready again")]


def test_the_pause_doubles_from_loss_to_loss_and_begins_anew_after_a_minute_of_health() -> None:
    watch = serving()
    now_s, pauses = HEALTHY_S + 1, []
    for _ in range(4):
        watch.ended("draft", KILLED, now_s)
        pauses.append(wait_s(watch, "draft", now_s))
        now_s += pauses[-1]
        watch.answered(WORKERS, now_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    now_s += HEALTHY_S
    watch.ended("draft", KILLED, now_s)
    assert wait_s(watch, "draft", now_s) == 0.5


@pytest.mark.parametrize(
    ("name", "longest_s"), [("target", LONGEST_PAUSE_S), ("draft", LONGEST_SPARED_PAUSE_S)]
)
def test_the_pause_is_never_longer_than_half_a_minute_or_five_of_what_is_not_needed(
    name: str, longest_s: float
) -> None:
    watch = serving()
    now_s = 0.0
    for _ in range(12):  # a minute and more between them, but none of it in health
        now_s += HEALTHY_S + 1
        watch.ended(name, KILLED, now_s)
        pause = wait_s(watch, name, now_s)
        now_s += pause
    assert pause == longest_s


def test_the_sixth_loss_of_a_needed_part_within_five_minutes_ends_the_service() -> None:
    watch = serving()
    for now_s in range(MOST_RESTARTS):
        assert without_words(watch.ended("target", KILLED, 50.0 * now_s)) == []
        wait_s(watch, "target", 50.0 * now_s)
    why = "ended 6 times within 5 minutes, and is not restarted"
    assert watch.ended("target", KILLED, 250.0) == [GiveUp("target", why)]


@pytest.mark.parametrize("mistake", [False, True])
def test_a_draft_that_ends_whenever_it_starts_is_tried_ever_more_rarely_and_for_ever(
    mistake: bool,
) -> None:
    watch, now_s, pauses = serving(), 0.0, []
    for _ in range(200):
        assert (
            without_words(
                watch.ended("draft", Ending(2, "ended with exit code 2", mistake=mistake), now_s)
            )
            == []
        )
        pauses.append(wait_s(watch, "draft", now_s))
        now_s += pauses[-1]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_SPARED_PAUSE_S


def test_a_draft_that_ends_each_time_it_is_healthy_is_started_again_each_time() -> None:
    watch, now_s = serving(), 0.0
    for _ in range(20):
        now_s += HEALTHY_S
        assert without_words(watch.ended("draft", KILLED, now_s)) == []
        assert wait_s(watch, "draft", now_s) == FIRST_PAUSE_S
        now_s += FIRST_PAUSE_S
        watch.answered(WORKERS, now_s)


def test_what_is_lost_is_told_with_its_reason_its_beginning_and_its_next_try() -> None:
    watch = serving()
    assert watch.outages == ()
    watch.ended("draft", Ending(1, "ended with exit code 1", last_line="no such device"), 10.0)
    assert watch.outages == (
        Outage("draft", "it ended with exit code 1: no such device", 10.0, 10.5),
    )
    watch.due(10.5)
    assert watch.outages == (
        Outage("draft", "it ended with exit code 1: no such device" + RESTARTED, 10.0, None),
    )
    watch.ended("draft", KILLED, 11.0)
    assert watch.outages == (Outage("draft", "it was killed by SIGKILL", 10.0, 12.0),)
    watch.due(12.0)
    watch.answered(WORKERS, 13.0)
    assert watch.outages == ()


def test_a_stuck_part_that_was_ended_is_told_to_have_been_stuck() -> None:
    watch = serving()
    look(watch, 1.0, 5.0)
    assert look(watch, 6.0, 16.0, ["target"])[-1][1] == Replace("draft")
    watch.ended("draft", KILLED, 16.0)
    (outage,) = watch.outages
    assert (outage.why, outage.since_s) == ("it did not respond for 10 s", 6.0)


def test_two_parts_that_are_lost_at_once_are_both_told() -> None:
    watch = serving()
    watch.ended("target", KILLED, 10.0)
    watch.ended("draft", KILLED, 10.0)
    assert [outage.part for outage in watch.outages] == ["target", "draft"]


def test_a_target_beside_another_one_is_not_needed_until_that_has_gone() -> None:
    watch, now_s = serving(), 0.0
    for _ in range(12):
        watch.answered(WORKERS, now_s, ["target"])
        assert without_words(watch.ended("target", KILLED, now_s)) == []
        (outage,) = watch.outages
        assert outage.retry_s is not None
        now_s = outage.retry_s
        watch.answered(["draft"], now_s, ["target"])
        watch.due(now_s)
    watch.ended("target", KILLED, now_s)
    assert watch.outages[0].retry_s == now_s + LONGEST_SPARED_PAUSE_S
    watch.answered(["draft"], now_s + 1.0)  # the other one has gone
    assert watch.outages[0].retry_s == now_s + 1.0 + LONGEST_PAUSE_S


def test_a_draft_that_crashes_before_all_was_ready_holds_nobody_up() -> None:
    watch = starting()
    for part in ("hub", "web"):
        watch.due(0.0)
        watch.ready(part, 0.0)
    watch.due(0.0)
    assert without_words(watch.ended("draft", Ending(1, "ended with exit code 1"), 1.0)) == []
    assert not watch.serving
    watch.answered(["target"], 2.0)
    assert watch.serving
    assert [outage.part for outage in watch.outages] == ["draft"]


def test_a_draft_that_the_user_got_wrong_ends_a_service_that_starts() -> None:
    watch = starting()
    for part in ("hub", "web"):
        watch.due(0.0)
        watch.ready(part, 0.0)
    watch.due(0.0)
    assert watch.ended("draft", Ending(2, "ended with exit code 2", mistake=True), 1.0) == [
        GiveUp("draft")
    ]


def test_losses_of_different_parts_are_not_added_up() -> None:
    watch = serving()
    for now_s in range(2 * MOST_RESTARTS):
        name = ("draft", "target")[now_s % 2]
        assert without_words(watch.ended(name, KILLED, 20.0 * now_s)) == []
        wait_s(watch, name, 20.0 * now_s)


def test_a_root_that_is_lost_starts_again_alone_and_the_workers_come_back_to_it() -> None:
    watch = serving()
    assert watch.ended("hub", KILLED, 10.0) == [
        Tell("the hub was killed by SIGKILL; it is restarted in 0.5 s")
    ]
    assert watch.missing == ("hub", "target", "draft")
    assert watch.due(10.4) == []
    assert watch.due(10.5) == [Start("hub")]
    assert watch.ready("hub", 11.0) == [Tell("the hub is ready again")]
    assert watch.due(11.0) == []
    assert watch.answered([], 11.1) == []
    assert watch.answered(["draft"], 11.5) == [Tell("the draft is ready again")]
    assert watch.answered(WORKERS, 12.0) == [Tell("the target is ready again")]
    assert look(watch, 13.0, 40.0) == []


def test_a_worker_that_is_lost_with_the_root_waits_for_the_next_one() -> None:
    watch = serving()
    watch.ended("draft", KILLED, 10.0)
    watch.ended("hub", KILLED, 10.0)
    assert watch.due(10.5) == [Start("hub")]
    watch.ready("hub", 11.0)
    assert watch.due(11.0) == [Start("draft")]


def test_a_worker_that_the_root_knows_no_more_comes_back_or_is_replaced() -> None:
    watch = serving()
    assert look(watch, 1.0, 5.0) == []
    why = {"draft": "disconnected"}
    lost = Tell("the hub has lost the draft: it disconnected")
    assert watch.answered(["target"], 6.0, why=why) == [lost]
    assert look(watch, 7.0, 12.0, ["target"]) == []
    assert watch.answered(WORKERS, 13.0) == [Tell("the draft is ready again")]
    assert look(watch, 14.0, 30.0, ["target"]) == [(23.0, Replace("draft"))]
    assert watch.ended("draft", KILLED, 30.0) == [
        Tell("the draft was killed by SIGKILL; it is restarted in 0.5 s")
    ]
    assert look(watch, 31.0, 90.0, ["target"]) == [(31.0, Start("draft"))]


def test_a_worker_that_does_not_come_back_to_a_root_that_was_lost_is_replaced() -> None:
    watch = serving()
    watch.ended("hub", KILLED, 50.0)
    watch.due(51.0)
    watch.ready("hub", 60.0)
    assert look(watch, 60.0, 100.0, ["draft"]) == [(60.0 + STUCK_S, Replace("target"))]


def test_a_root_that_does_not_answer_is_replaced_and_its_workers_are_not() -> None:
    watch = serving()
    assert look(watch, 1.0, 5.0) == []
    assert look(watch, 6.0, 60.0, None) == [(5.0 + STUCK_S, Replace("hub"))]


BEATING = (Part("hub"), Part("web", ("hub",), beats=True))


def test_a_part_whose_heartbeats_stop_is_replaced_unless_it_computes() -> None:
    """It may compute for six times the patience, in CPU time."""
    watch = Watch(BEATING, 0.0, stuck_s=STUCK_S)
    for name in ("hub", "web"):
        watch.due(0.0)
        watch.ready(name, 0.0)
    assert watch.serving
    for second in range(1, 31):
        watch.heartbeat("web", float(second))
        assert look(watch, second, second, ()) == []
    assert look(watch, 31.0, 39.0, ()) == []
    for second in range(40, 100):  # half a processor
        watch.computes("web", (second - 39) / 2, float(second))
        assert look(watch, second, second, ()) == []
    assert look(watch, 100.0, 108.0, ()) == []
    assert look(watch, 109.0, 109.0, ()) == [(109.0, Replace("web"))]
    assert watch.ended("web", KILLED, 109.5) == [
        Tell("the web was killed by SIGKILL; it is restarted in 0.5 s")
    ]
    assert look(watch, 110.0, 110.0, ()) == [(110.0, Start("web"))]
    watch.ready("web", 110.0)
    for second in range(111, 190):  # a processor without an end
        watch.computes("web", second - 110.0, float(second))
        if found := look(watch, second, second, ()):
            break
    assert found == [(179.0, Replace("web"))]


def test_a_part_that_stands_still_before_it_is_ready_is_replaced() -> None:
    watch = serving()
    watch.ended("target", KILLED, 10.0)
    assert look(watch, 10.5, 11.0, ["draft"]) == [(11.0, Start("target"))]
    for second in range(12, 200):  # it reads a model
        watch.computes("target", (second - 11) * 0.9, float(second))
        assert look(watch, second, second, ["draft"]) == []
    assert look(watch, 200.0, 258.0, ["draft"]) == []
    assert look(watch, 259.0, 259.0, ["draft"]) == [(259.0, Replace("target"))]


def test_the_time_in_which_nobody_looked_is_no_silence() -> None:
    """Nobody looks while the machine is suspended, or this process is."""
    watch = serving()
    assert look(watch, 1.0, 5.0) == []
    assert look(watch, 1000.0, 1000.0, None) == []
    assert look(watch, 1001.0, 1100.0, None) == [(1000.0 + STUCK_S, Replace("hub"))]
    assert STANDSTILL_S < STUCK_S


def test_before_all_was_ready_nothing_is_replaced() -> None:
    watch = starting()
    for part in ("hub", "web"):
        watch.due(0.0)
        watch.ready(part, 0.0)
    watch.due(0.0)
    watch.answered(["draft"], 1.0)
    assert look(watch, 2.0, 60.0, []) == []
    assert look(watch, 60.0, 99.0, None) == []


def test_a_worker_that_was_let_go_stays_away() -> None:
    watch = serving()
    assert watch.ended("draft", Ending(3, "ended with exit code 3", let_go=True), 10.0) == [
        Tell("the draft has left, and is not restarted: it was replaced or drained")
    ]
    assert watch.drained == ("draft",)
    assert look(watch, 11.0, 60.0, ["target"]) == []
    assert watch.missing == ()


def test_a_worker_that_was_let_go_for_another_one_is_started_again_when_that_is_gone() -> None:
    watch = serving()
    watch.ended("draft", Ending(3, "ended with exit code 3", let_go=True), 10.0)
    assert look(watch, 1.0, 20.0, ["target"], ["target", "draft"]) == []
    assert look(watch, 21.0, 29.0, ["target"]) == []
    assert watch.answered(["target"], 20.0 + STUCK_S) == [
        Tell("no worker replaces the draft any longer; it is restarted")
    ]
    assert watch.due(20.0 + STUCK_S) == [Start("draft")]
    assert watch.answered(WORKERS, 31.0) == [Tell("the draft is ready again")]


def test_a_worker_stays_away_when_the_one_in_its_place_was_drained() -> None:
    watch = serving()
    watch.ended("draft", Ending(3, "ended with exit code 3", let_go=True), 10.0)
    assert look(watch, 11.0, 20.0, ["target"], ["target", "draft"]) == []
    assert watch.drained == ()
    assert watch.answered(["target"], 21.0, drained=["draft"]) == []
    assert look(watch, 22.0, 900.0, ["target"]) == []
    assert watch.drained == ("draft",)


def test_a_drained_worker_that_does_not_end_is_ended_and_stays_away() -> None:
    watch = serving()
    assert watch.answered(["target"], 10.0, drained=["draft"]) == []
    assert watch.outages == ()
    actions = [
        action
        for second in range(11, 30)
        for action in [*watch.answered(["target"], second, drained=["draft"]), *watch.due(second)]
    ]
    assert without_words(actions) == [Replace("draft")]
    assert watch.ended("draft", KILLED, 30.0) == [
        Tell("the draft has left, and is not restarted: it was replaced or drained")
    ]
    assert look(watch, 31.0, 900.0, ["target"]) == []


@pytest.mark.parametrize("back", [False, True], ids=["waiting", "on its way back"])
@pytest.mark.parametrize("name", WORKERS)
def test_a_lost_worker_whose_place_was_given_to_another_one_is_not_started_beside_it(
    name: str, back: bool
) -> None:
    watch, others = serving(), [worker for worker in WORKERS if worker != name]
    watch.ended(name, KILLED, 10.0)
    if back:
        assert watch.due(11.0) == [Start(name)]
    known = WORKERS if back else others  # it may have registered just now
    (told, *actions) = watch.answered(known, 11.5, [name], [name])
    assert told == Tell(
        f"another worker has replaced the {name}, which is not restarted while it serves"
    )
    assert actions == ([Stop(name)] if back else [])
    assert watch.outages == ()
    for second in range(12, 900):
        assert [*watch.answered(others, second, [name], [name]), *watch.due(second)] == []
    assert watch.answered(others, 900.0 + STUCK_S) == [
        Tell(f"no worker replaces the {name} any longer; it is restarted")
    ]
    assert watch.due(900.0 + STUCK_S) == [Start(name)]


def test_a_lost_worker_beside_another_one_that_was_put_there_before_or_came_by_itself_is_started_again() -> (  # noqa: E501
    None
):
    watch = serving()
    for placed in ([], ["draft"]):
        watch.answered(WORKERS, 10.0, ["draft"], placed)
        watch.ended("draft", KILLED, 10.5)
        assert [
            action
            for second in (11.0, 12.0)
            for action in [
                *watch.answered(["target"], second, ["draft"], placed),
                *watch.due(second),
            ]
        ] == [Start("draft")]
        assert watch.answered(WORKERS, 12.5, ["draft"], placed) == [
            Tell("the draft is ready again")
        ]


def test_whoever_is_in_the_place_of_a_worker_has_as_long_as_a_worker_to_come_back_to_the_next_root() -> (  # noqa: E501
    None
):
    watch = serving()
    watch.ended("draft", Ending(3, "ended with exit code 3", let_go=True), 10.0)
    assert look(watch, 1.0, 11.0, ["target"], ["draft"]) == []
    watch.ended("hub", KILLED, 12.0)
    assert look(watch, 12.0, 13.0, None) == [(13.0, Start("hub"))]
    assert look(watch, 14.0, 30.0, None) == []
    watch.ready("hub", 30.0)
    assert look(watch, 31.0, 39.0, ["target"]) == []
    assert look(watch, 40.0, 40.0, ["target"]) == [(40.0, Start("draft"))]


def test_what_has_served_was_no_mistake_and_is_tried_again() -> None:
    """A port may be free again in a moment, and memory too."""
    watch = serving()
    assert (
        without_words(watch.ended("web", Ending(2, "ended with exit code 2", mistake=True), 10.0))
        == []
    )
    assert wait_s(watch, "web", 10.0) == FIRST_PAUSE_S


def test_a_worker_that_cannot_be_started_at_present_is_tried_ever_more_rarely_ends_nothing_and_is_told() -> (  # noqa: E501
    None
):
    watch, at_s = serving(), 10.0
    watch.ended("target", KILLED, at_s)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S):
        at_s += wait_s(watch, "target", at_s)
        assert watch.refused("target", "too big", at_s) == [
            Tell(f"the target was not started; the next attempt is in {pause_s:g} s: too big")
        ]
        assert watch.outages[-1] == Outage(
            "target", "it was not started: too big", 10.0, at_s + pause_s
        )
    at_s += wait_s(watch, "target", at_s)
    assert watch.answered(WORKERS, at_s) == [Tell("the target is ready again")]


def test_a_root_that_was_told_to_stop_ends_the_service_and_other_parts_that_leave_are_started_again() -> (  # noqa: E501
    None
):
    left = Ending(0, "ended with exit code 0")
    assert Leave() in serving().ended("hub", left, 10.0)
    assert without_words(serving().ended("target", left, 10.0)) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from([part.name for part in PARTS]), st.floats(0.01, 100.0), st.booleans()
        ),
        max_size=40,
    )
)
def test_whatever_ends_when_each_part_is_started_once_until_it_ends_and_none_before_its_pause(
    events: list[tuple[str, float, bool]],
) -> None:
    watch = serving()
    running, now_s, last_end = (
        {part.name for part in PARTS},
        0.0,
        dict.fromkeys((part.name for part in PARTS), -math.inf),
    )
    for name, wait_s, becomes_ready in events:
        now_s += wait_s
        for action in without_words(watch.due(now_s)):
            if isinstance(action, Replace):
                assert action.name in running
                continue
            assert isinstance(action, Start)
            assert action.name not in running
            assert now_s >= last_end[action.name] + FIRST_PAUSE_S
            assert action.name == "hub" or "hub" in running
            running.add(action.name)
        if becomes_ready and name in running:
            if name in WORKERS:
                watch.answered([name], now_s)
            else:
                watch.ready(name, now_s)
        elif name in running:
            if any(isinstance(action, GiveUp) for action in watch.ended(name, KILLED, now_s)):
                return
            running.remove(name)
            last_end[name] = now_s


def test_the_numbers_fit_each_other() -> None:
    """All the pauses of a part that ends at once fit into the time within which its ends are
    counted."""
    assert sum(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(MOST_RESTARTS)) < WITHIN_S


EVERY_S = 1.0


class Place:
    """A place at which a coordinator may be."""

    def __init__(self) -> None:
        self.hub: MemoryHub | None = memory_links()
        self.tries = 0
        self.peer = b""

    def connect(self) -> Link:
        self.tries += 1
        if self.hub is None:
            raise LinkClosed("nobody is there")
        return self.hub.connect()

    def arrived(self) -> list[Message]:
        """Return what was asked since the last call."""
        messages = []
        assert self.hub is not None
        while (received := self.hub.receive()) is not None:
            self.peer, frames = received
            messages.append(REQUEST.decode(frames))
        return messages

    def answers(self, message: Message) -> None:
        assert self.hub is not None
        self.hub.send(self.peer, encode(message))


def report(uptime_s: float) -> Reported:
    told: Reported = representative()["reported"]
    return told.model_copy(update={"uptime_s": uptime_s, "address": "memory"})


def types(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]


def registered(place: Place, inquiry: Inquiry, now_s: float) -> None:
    assert inquiry.news(now_s, EVERY_S) is None
    assert types(place.arrived()) == [Hello]
    place.answers(Welcome(epoch=1))


def test_it_asks_again_and_again_and_hears_what_is_answered() -> None:
    place = Place()
    inquiry = Inquiry(place.connect)
    registered(place, inquiry, 10.0)
    for second in (11.0, 12.0, 13.0):
        assert inquiry.news(second, EVERY_S) is None
        assert inquiry.news(second + 0.1, EVERY_S) is None
        assert types(place.arrived()) == [Status]
        place.answers(report(second))
        assert inquiry.news(second + 0.2, EVERY_S) == report(second)
        assert inquiry.news(second + 0.3, EVERY_S) is None
        assert place.arrived() == []
    inquiry.close()


def test_one_that_does_not_answer_is_not_waited_for_and_is_asked_but_once() -> None:
    place = Place()
    inquiry = Inquiry(place.connect)
    registered(place, inquiry, 10.0)
    assert [inquiry.news(11.0 + tenths / 10, EVERY_S) for tenths in range(100)] == [None] * 100
    assert (types(place.arrived()), place.tries) == ([Status], 1)
    inquiry.close()


def test_it_comes_back_to_a_coordinator_that_goes_and_comes() -> None:
    place = Place()
    inquiry = Inquiry(place.connect)
    registered(place, inquiry, 10.0)
    assert place.hub is not None
    place.hub.close()
    place.hub = None
    assert [inquiry.news(11.0 + tenths / 10, EVERY_S) for tenths in range(21)] == [None] * 21
    assert place.tries - 1 <= 2.0 / RETRY_S + 1
    place.hub = memory_links()
    registered(place, inquiry, 14.0)
    inquiry.news(15.0, EVERY_S)
    place.arrived()
    place.answers(report(1.0))
    assert inquiry.news(15.1, EVERY_S) == report(1.0)
    inquiry.close()
