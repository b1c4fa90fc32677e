"""The accounts of one request."""

import pytest

from dovetail.protocol.messages import Drafted, SeenSpan
from dovetail.runtime.telemetry.metrics import Accounts, extent_ns
from dovetail.runtime.telemetry.trace import trace_events


def test_extent_reaches_from_the_first_start_to_the_last_end() -> None:
    assert extent_ns([("a", 10, 5), ("b", 12, 20), ("c", 11, 1)]) == 22
    assert extent_ns([]) == 0


def test_a_reply_is_split_into_work_and_transport() -> None:
    accounts = Accounts(0)
    accounts.reply("verify", 100, [("verify", 5, 70)], 0)
    assert (accounts.ns["verify"], accounts.ns["transport"]) == (70, 30)
    accounts.reply("verify", 50, [("verify", 5, 70)], 0)
    assert (accounts.ns["verify"], accounts.ns["transport"]) == (120, 30)


def proposal(*, grown: int, hit: bool) -> Drafted:
    return Drafted(
        epoch=1,
        session=1,
        round=1,
        tokens=(),
        parents=(),
        scores=(),
        grown=grown,
        hit=hit,
        ahead=7,
        wasted=3,
    )


def test_figures_follow_their_definitions() -> None:
    accounts = Accounts(0)
    accounts.first_token_ns = 1_000_000_000
    accounts.proposal(proposal(grown=20, hit=False))
    accounts.verdict(4, 2, 3)
    accounts.proposal(proposal(grown=10, hit=True))
    accounts.verdict(4, 0, 1)
    accounts.verdict(0, 0, 1)
    figures = accounts.figures(3_000_000_000, 7)
    assert figures["rounds"] == 3
    assert figures["tau"] == pytest.approx(2.0)
    assert figures["acceptance_rate"] == pytest.approx(0.25)
    assert figures["accepted_per_position"] == pytest.approx((1 / 3, 1 / 3))
    assert figures["hit_rate"] == pytest.approx(0.5)
    assert figures["tokens_per_s"] == pytest.approx(3.0)
    assert (
        figures["ahead_nodes"],
        figures["wasted_nodes"],
        figures["verified_rows"],
        figures["plain_rounds"],
    ) == (14, 6, 11, 1)
    assert figures["grown_nodes"] == 30
    assert accounts.tally.completion_tokens == 5
    assert figures["unaccounted_s"] == pytest.approx(3.0)


def test_nothing_is_divided_by_zero() -> None:
    figures = Accounts(5).figures(5, 0)
    assert figures["tau"] is None
    assert figures["acceptance_rate"] is None
    assert figures["hit_rate"] is None


def test_a_trace_has_a_row_for_each_process_and_a_slice_for_each_span() -> None:
    spans = [
        ("target", ("verify", 2000, 1000)),
        ("draft", ("draft", 1000, 500)),
        ("target", ("commit", 3000, 10)),
    ]
    events = trace_events(
        [SeenSpan(process=process, span=span) for process, span in spans], {"target": 12_000}
    )
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "draft",
        "target (aligned within 12 us)",
    ]
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("draft", 1.0, 0.5),
        ("verify", 2.0, 1.0),
        ("commit", 3.0, 0.01),
    ]
    assert slices[1]["pid"] == slices[2]["pid"] != slices[0]["pid"]


def test_arrows_follow_a_tree_from_the_draft_to_the_verdict_and_back() -> None:
    def seen(process: str, name: str, round: int, start: int) -> SeenSpan:
        return SeenSpan(process=process, session=3, round=round, span=(name, start, 10))

    first = [
        seen("coordinator", "handle", 1, 0),
        seen("draft", "draft", 1, 20),
        seen("coordinator", "handle", 1, 40),
        seen("target", "verify", 1, 60),
    ]
    then = [
        seen("target", "commit", 1, 70),
        seen("coordinator", "handle", 2, 90),
        seen("draft", "draft", 2, 110),
        seen("coordinator", "handle", 2, 130),
    ]
    events = trace_events([*first, *then])
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    starts, ends = ([e for e in events if e["ph"] == kind] for kind in "sf")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [1, 2, 3, 4]
    arrows = [
        (slices[s["pid"], s["tid"], round(s["ts"] - 0.009, 3)], slices[f["pid"], f["tid"], f["ts"]])
        for s, f in zip(starts, ends, strict=True)
    ]
    assert arrows == [
        ("draft", "handle"),
        ("handle", "verify"),
        ("verify", "commit"),
        ("commit", "draft"),
    ]


def test_a_pass_for_several_sessions_is_on_the_way_of_each_of_their_trees() -> None:
    trees = [
        SeenSpan(
            process=f"draft-{session}", session=session, round=1, span=("draft", 10 * session, 5)
        )
        for session in (3, 5)
    ]
    events = trace_events(
        [*trees, SeenSpan(process="target", shared=((3, 1), (5, 1)), span=("verify", 60, 10))]
    )
    (shared,) = [e for e in events if e["ph"] == "X" and e["name"] == "verify"]
    assert shared["args"] == {"sessions": [3, 5], "rounds": [1, 1]}
    ends = [e for e in events if e["ph"] == "f"]
    assert [(e["pid"], e["ts"]) for e in ends] == [(shared["pid"], shared["ts"])] * 2
    assert len({e["pid"] for e in events if e["ph"] == "s"}) == 2


def test_what_overlaps_in_part_is_on_another_track_and_what_lies_within_is_not() -> None:
    spans = {
        "verify": (0, 100),
        "linears": (10, 40),
        "head": (50, 50),
        "send": (90, 30),
        "next": (120, 10),
    }
    events = trace_events(
        [SeenSpan(process="target", span=(name, *when)) for name, when in spans.items()]
    )
    tracks = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert (
        tracks["verify"] == tracks["linears"] == tracks["head"] == tracks["next"] != tracks["send"]
    )
    assert {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        tracks["verify"]: "target",
        tracks["send"]: "target, overlapping",
    }


def test_no_arrow_points_back_in_time() -> None:
    about = {"session": 1, "round": 1}
    spans = [
        ("draft", "draft", 0, 50),
        ("coordinator", "handle", 60, 40),
        ("target", "verify", 70, 30),
        ("target", "commit", 65, 2),
    ]
    events = trace_events(
        [
            SeenSpan(process=process, span=(name, start, length), **about)
            for process, name, start, length in spans
        ]
    )
    starts, ends = ([e["ts"] for e in events if e["ph"] == kind] for kind in "sf")
    assert len(starts) == 2
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
