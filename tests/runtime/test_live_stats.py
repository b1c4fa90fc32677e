"""The statistics that are shown live: right by the slow way of counting, bounded, and no more of
them than somebody may see."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.messages import (
    Fault,
    PairState,
    Reported,
    RoundRecord,
    Seen,
    SeenRound,
    SeenWorker,
    Totals,
)
from dovetail.runtime.telemetry.live_stats import (
    HISTORY_S,
    MAX_SESSIONS,
    QUIET_S,
    RATE_S,
    LiveStats,
)
from dovetail.runtime.telemetry.picture import (
    MAX_LABEL,
    MAX_NODES,
    cores_in_words,
    label,
    speculation,
)
from support.golden import representative

S = 10**9
NOW = 1000 * S
STATE: Reported = representative()["reported"]
WORKER = STATE.workers[0].model_copy(
    update={"roles": ("target", "draft"), "standby": False, "leaving": False}
)


def record(
    number: int,
    *,
    parents: Sequence[int] = (-1, 0, 0),
    verified: int = 2,
    accepted: Sequence[int] = (0,),
    token: int = 7,
) -> RoundRecord:
    nodes = len(parents)
    return RoundRecord(
        round=number,
        prefix=10 * number,
        tokens=tuple(range(token, token + nodes)),
        parents=tuple(parents),
        scores=(-0.5,) * nodes,
        verified=verified,
        accepted=tuple(accepted),
        bonus=token + nodes,
        verify_ns=3_000_000,
        draft_ns=1_000_000,
    )


def seen(*rounds: SeenRound, at_ns: int = NOW, epoch: int = 5, next: int = 1, **more: Any) -> Seen:
    return Seen(
        epoch=epoch,
        request=0,
        at_ns=at_ns,
        next=next,
        workers=more.pop("workers", ()),
        rounds=rounds,
        **more,
    )


def round_(at_ns: int, session: int = 1, number: int = 1, **changes: Any) -> SeenRound:
    return SeenRound(
        number=number,
        session=session,
        draft="draft",
        target="target",
        at_ns=at_ns,
        record=record(number, **changes),
    )


def worker(at_ns: int, busy_ns: int, epoch: int = WORKER.worker_epoch) -> SeenWorker:
    return SeenWorker(
        name="target",
        worker_epoch=epoch,
        roles=("target",),
        device="cpu",
        cores=(0, 1, 2, 5),
        busy_ns=busy_ns,
        at_ns=at_ns,
        waiting="draft",
    )


def picture(
    *messages: Seen, spell: Callable[[int], str] | None = None, session: int | None = None
) -> dict[str, Any]:
    live_stats = LiveStats()
    live_stats.hear(STATE)
    for message in messages:
        live_stats.see(message)
    return live_stats.view(spell=spell, session=session)


@given(
    st.lists(
        st.tuples(st.integers(0, HISTORY_S * S - 1), st.integers(1, 3), st.integers(0, 4)),
        max_size=30,
    )
)
def test_the_figures_are_those_of_counting_every_round(told: list[tuple[int, int, int]]) -> None:
    """`told`: how long ago, whose, and how many nodes of a chain of four were accepted."""
    rounds = [
        round_(NOW - ago, session, n, parents=(-1, 0, 1, 2), verified=4, accepted=range(hit))
        for n, (ago, session, hit) in enumerate(sorted(told)[::-1])
    ]
    figures = picture(seen(*rounds))["figures"]
    assert figures["rounds"] == len(told)
    if not told:
        assert figures["tau"] is None
        return
    assert figures["tau"] == pytest.approx(sum(hit + 1 for *_, hit in told) / len(told), abs=1e-3)
    assert figures["acceptance_rate"] == pytest.approx(
        sum(hit for *_, hit in told) / (4 * len(told)), abs=1e-4
    )
    for depth, share in enumerate(figures["accepted_per_position"], 1):
        assert share == pytest.approx(sum(hit >= depth for *_, hit in told) / len(told), abs=1e-4)
    assert figures["round_ms"] == {
        "draft": 1.0,
        "verify": 3.0,
        "transport": 0.0,
        "queue": 0.0,
        "coordinator": 0.0,
    }
    began = min(RATE_S, NOW // S - (NOW - max(ago for ago, *_ in told)) // S)
    late = sum(hit + 1 for ago, _, hit in told if NOW // S - RATE_S <= (NOW - ago) // S < NOW // S)
    assert figures["tokens_per_s"] == pytest.approx(late / max(1, began), abs=0.01)


def test_every_whole_second_is_in_the_history_and_none_that_is_older() -> None:
    history = picture(seen(round_(NOW - 3 * S), round_(NOW - S + 5), round_(NOW - S + 6)))[
        "history"
    ]
    assert history["tokens_per_s"] == [(3.0, 2), (2.0, 0), (1.0, 4)]
    assert history["tau"] == [(3.0, 2.0), (2.0, None), (1.0, 2.0)]
    long = picture(*(seen(round_(NOW + s * S), at_ns=NOW + s * S) for s in range(3 * HISTORY_S)))[
        "history"
    ]
    assert len(long["tau"]) == HISTORY_S


def test_a_worker_was_busy_for_the_share_of_the_time_in_between() -> None:
    shown = picture(
        *(
            seen(at_ns=at, workers=(worker(at, busy),))
            for at, busy in ((NOW, 40), (NOW + S, 40 + S // 4), (NOW + 2 * S, 40 + S))
        )
    )["workers"][0]
    assert shown["history"] == [(1.0, 0.25), (0.0, 0.75)]
    assert (shown["busy"], shown["waiting"], shown["cores"]) == (0.75, "draft", "0-2,5")


def test_what_is_busy_ahead_is_what_no_round_waited_for() -> None:
    """Two rounds of the last seconds waited a millisecond each for the draft; the target's share is
    not told."""
    at = (NOW - S, NOW)
    rounds = [seen(round_(when), at_ns=when, workers=(worker(when, 0),)) for when in at]
    draft = WORKER.model_copy(update={"name": "draft", "roles": ("draft",)})
    live_stats = LiveStats()
    live_stats.hear(
        STATE.model_copy(
            update={
                "workers": (
                    draft,
                    draft.model_copy(update={"name": "other"}),
                    WORKER.model_copy(update={"roles": ("target",)}),
                )
            }
        )
    )
    for message in rounds:
        live_stats.see(message)
    live_stats.see(seen(at_ns=NOW + S))
    assert {one["name"]: one["waited_for"] for one in live_stats.view()["workers"]} == {
        "draft": 0.001,
        "other": 0.0,
        WORKER.name: None,
    }


def test_what_is_beyond_the_end_of_a_reply_is_not_counted() -> None:
    cut = round_(NOW, parents=(-1, 0, 1, 2), verified=4, accepted=(0, 1, 2, 3))
    cut = cut.model_copy(update={"record": cut.record.model_copy(update={"committed": 2})})
    shown = picture(seen(cut))
    assert (
        shown["figures"]["tau"],
        shown["figures"]["acceptance_rate"],
        shown["sessions"][0]["length"],
    ) == (2.0, 0.5, cut.record.prefix + 2)


def test_a_foreseen_root_of_a_round_without_a_tree_is_no_hit() -> None:
    drafted, plain = round_(NOW, number=1), round_(NOW, number=2, verified=0, accepted=())
    hits = [
        one.model_copy(update={"record": one.record.model_copy(update={"hit": True})})
        for one in (drafted, plain)
    ]
    assert picture(seen(*hits))["figures"]["hit_rate"] == 1.0


def test_a_worker_that_has_not_said_anything_yet_and_its_successor_are_not_taken_for_busy() -> None:
    shown = picture(seen(workers=(worker(0, 0),)), seen(workers=(worker(NOW, 7 * S),)))["workers"][
        0
    ]
    assert (shown["busy"], shown["history"]) == (None, [])
    shown = picture(
        seen(workers=(worker(NOW, 7 * S, epoch=1),)),
        seen(at_ns=NOW + S, workers=(worker(NOW + S, S),)),
    )["workers"][0]
    assert shown["busy"] is None


def test_another_coordinator_is_asked_from_its_beginning_and_nothing_of_the_last_one_stays() -> (
    None
):
    live_stats = LiveStats()
    live_stats.hear(STATE)
    assert not live_stats.see(seen(round_(NOW), next=41))
    assert live_stats.see(seen(round_(NOW), epoch=6, next=3)), (
        "it was asked with a number of the last one"
    )
    assert live_stats.next == 0
    assert not live_stats.see(seen(round_(7 * S, session=9), at_ns=8 * S, epoch=6, next=4))
    assert [session["session"] for session in live_stats.view()["sessions"]] == [9]


def test_sessions_are_listed_while_they_have_rounds_and_a_bounded_number_of_them() -> None:
    assert [
        s["session"]
        for s in picture(seen(round_(NOW - int((QUIET_S + 1) * S), 1), round_(NOW, 2)))["sessions"]
    ] == [2]
    many = picture(seen(*(round_(NOW, session) for session in range(2 * MAX_SESSIONS))))["sessions"]
    assert [s["session"] for s in many] == [*range(MAX_SESSIONS, 2 * MAX_SESSIONS)]


def test_the_tree_is_that_of_the_session_asked_for_else_of_the_newest() -> None:
    told = seen(
        round_(NOW, 3, number=4, parents=(-1, -1, 0), verified=2, accepted=(0,)),
        round_(NOW, 2, number=7),
    )
    newest = picture(told)["tree"]
    assert (newest["session"], newest["fates"], newest["bonus_parent"], newest["parents"]) == (
        3,
        "arn",
        0,
        [-1, -1, 0],
    )
    assert picture(told, session=2)["tree"]["round"] == 7
    assert picture(told, session=99)["tree"]["session"] == 3


def test_texts_are_shown_to_whoever_may_read_them_and_the_root_where_it_is_known() -> None:
    before, last = round_(NOW - 9, number=1, token=50), round_(NOW, number=2, token=80)
    tree = picture(seen(before, last), spell=lambda token: f"<{token}>")["tree"]
    assert (tree["root"], tree["texts"], tree["bonus"]) == (
        "<53>",
        ["<80>", "<81>", "<82>"],
        "<83>",
    )
    missed = round_(NOW, number=3, token=80)
    assert picture(seen(before, missed), spell=str)["tree"]["root"] is None


def test_without_the_right_to_read_neither_texts_nor_token_ids_are_in_the_picture() -> None:
    def told(token: int) -> str:
        return json.dumps(
            picture(
                seen(round_(NOW - 9, number=1, token=token), round_(NOW, number=2, token=token))
            )
        )

    assert told(31_415_926) == told(27_182_818)


def test_tokens_that_the_coordinator_keeps_to_itself_are_not_spelt() -> None:
    hidden = record(1).model_copy(update={"tokens": (0, 0, 0), "bonus": 0})
    zeros = seen(round_(NOW).model_copy(update={"readable": False, "record": hidden}))
    assert [
        picture(zeros, spell=lambda _: "zero")["tree"][name] for name in ("texts", "bonus")
    ] == [None, None]
    own = seen(round_(NOW).model_copy(update={"record": hidden}))
    assert picture(own, spell=lambda _: "zero")["tree"]["texts"] == ["zero"] * 3, (
        "a token may be number 0"
    )


def test_a_tree_beyond_what_can_be_drawn_is_cut_and_says_so() -> None:
    nodes = MAX_NODES + 40
    tree = picture(
        seen(round_(NOW, parents=range(-1, nodes - 1), verified=nodes, accepted=range(nodes))),
        spell=str,
    )["tree"]
    assert (len(tree["parents"]), len(tree["fates"]), len(tree["texts"]), tree["offered"]) == (
        MAX_NODES,
        MAX_NODES,
        MAX_NODES,
        nodes,
    )
    assert tree["bonus_parent"] < MAX_NODES


def test_a_picture_is_json_and_has_nothing_that_a_browser_would_round() -> None:
    def integers(value: Any) -> list[int]:
        if isinstance(value, dict | list):
            return [
                found
                for inner in (value.values() if isinstance(value, dict) else value)
                for found in integers(inner)
            ]
        return [value] if isinstance(value, int) else []

    shown = json.loads(json.dumps(picture(seen(round_(NOW)))))
    assert all(abs(number) < 1 << 53 for number in integers(shown))


UNDRAFTED = "4 sessions are decoded without a draft: it was slower"
ALONE = {"workers": (WORKER.model_copy(update={"roles": ("target",)}),)}
FAULTS = (Fault(part="draft worker", why="it was killed", since_s=1.0),)


def pair(*, drafted: bool, undrafted: str = "") -> PairState:
    """A pair with or without drafting sessions, and why others do not draft."""
    update = {"speculating": drafted, "undrafted": undrafted}
    return STATE.pairs[0].model_copy(update=update)


@pytest.mark.parametrize(
    ("words", "fault", "changes"),
    [
        ("not possible: no target worker is registered", False, {"workers": ()}),
        ("not possible: no target worker is registered", True, {"workers": (), "faults": FAULTS}),
        ("not in use: no draft worker is registered: the target decodes alone", False, ALONE),
        (
            "off: no draft worker is registered: the target decodes alone",
            True,
            {**ALONE, "degraded": True},
        ),
        ("waiting for a request: no request has used a draft yet", False, {"pairs": ()}),
        ("on", False, {"pairs": (pair(drafted=True),), "decisions": ("drafting was paused",)}),
        ("on", True, {"pairs": (pair(drafted=True),), "faults": FAULTS, "degraded": True}),
        (
            "on for some sessions: 4 sessions are decoded without a draft: it was slower",
            False,
            {"pairs": (pair(drafted=True, undrafted=UNDRAFTED),)},
        ),
        (
            "on for some sessions: 4 sessions are decoded without a draft: it was slower",
            False,
            {"pairs": (pair(drafted=True), pair(drafted=False, undrafted=UNDRAFTED))},
        ),
        (
            "off: 4 sessions are decoded without a draft: it was slower",
            False,
            {"pairs": (pair(drafted=False, undrafted=UNDRAFTED),), "decisions": ("it is faster",)},
        ),
        ("off: the last round had no draft", False, {"pairs": (pair(drafted=False),)}),
    ],
)
def test_the_state_of_speculation_matches_the_sessions_and_only_faults_are_red(
    words: str, fault: bool, changes: dict[str, Any]
) -> None:
    sound = {"degraded": False, "faults": (), "totals": Totals()}
    found = speculation(STATE.model_copy(update={"workers": (WORKER,), **sound, **changes}))
    assert (found["words"], found["fault"]) == (words, fault)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b" the", "␣the"),
        (b"\n", "↵"),
        (b"a\tb", "a⇥b"),
        (b"\x1b[2J", "�[2J"),
        (b"\xff", "�"),
        ("\u202eevil".encode(), "�evil"),
        (b"<b>", "<b>"),
        (b"", ""),
    ],
)
def test_a_token_is_one_line_that_commands_nobody(content: bytes, shown: str) -> None:
    assert label(content) == shown


def test_a_long_token_is_cut() -> None:
    assert len(label(b"x" * 1000)) == MAX_LABEL


@pytest.mark.parametrize(
    ("cores", "words"), [((), ""), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((8, 0, 2, 1), "0-2,8")]
)
def test_cores_are_told_as_ranges(cores: tuple[int, ...], words: str) -> None:
    assert cores_in_words(cores) == words
