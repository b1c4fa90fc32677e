"""The accounts of one request."""

import pytest

from dovetail.protocol.messages import Drafted
from dovetail.runtime.metrics import Accounts, extent_ns
from dovetail.runtime.trace import trace_events


def test_extent_reaches_from_the_first_start_to_the_last_end() -> None:
    assert extent_ns([("a", 10, 5), ("b", 12, 20), ("c", 11, 1)]) == 22
    assert extent_ns([]) == 0


def test_a_reply_is_split_into_work_and_transport() -> None:
    accounts = Accounts(0)
    accounts.reply("verify", 100, [("verify", 5, 70)])
    assert (accounts.ns["verify"], accounts.ns["transport"]) == (70, 30)
    accounts.reply("verify", 50, [("verify", 5, 70)])
    assert (accounts.ns["verify"], accounts.ns["transport"]) == (120, 30)


def proposal(*, grown: int, hit: bool) -> Drafted:
    return Drafted(epoch=1, session=1, round=1, tokens=(), parents=(), scores=(), grown=grown, hit=hit, ahead=7, wasted=3)


def test_figures_follow_their_definitions() -> None:
    accounts = Accounts(0)
    accounts.first_token_ns = 1_000_000_000
    accounts.proposal(proposal(grown=20, hit=False))
    accounts.verdict(4, 2)
    accounts.proposal(proposal(grown=10, hit=True))
    accounts.verdict(4, 0)
    accounts.verdict(0, 0)
    figures = accounts.figures(3_000_000_000, 7)
    assert figures["rounds"] == 3
    assert figures["tau"] == pytest.approx(2.0)
    assert figures["acceptance_rate"] == pytest.approx(0.25)
    assert figures["accepted_per_position"] == pytest.approx((1 / 3, 1 / 3))
    assert figures["hit_rate"] == pytest.approx(0.5)
    assert figures["tokens_per_s"] == pytest.approx(3.0)
    assert (figures["ahead_nodes"], figures["wasted_nodes"], figures["verified_rows"], figures["plain_rounds"]) == (14, 6, 11, 1)
    assert figures["grown_nodes"] == 30
    assert figures["unaccounted_s"] == pytest.approx(3.0)


def test_nothing_is_divided_by_zero() -> None:
    figures = Accounts(5).figures(5, 0)
    assert figures["tau"] is None
    assert figures["acceptance_rate"] is None
    assert figures["hit_rate"] is None


def test_a_trace_has_a_row_for_each_process_and_a_slice_for_each_span() -> None:
    events = trace_events([("target", ("verify", 2000, 1000)), ("draft", ("draft", 1000, 500)), ("target", ("commit", 3000, 10))])
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["target", "draft"]
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [("verify", 2.0, 1.0), ("draft", 1.0, 0.5), ("commit", 3.0, 0.01)]
    assert slices[0]["pid"] == slices[2]["pid"] != slices[1]["pid"]
