"""What is done to sessions when workers go, noted instead of done."""

from typing import Any

import pytest

from dovetail.protocol.messages import Open
from dovetail.runtime.session.actions import Ask
from dovetail.runtime.session.draft_sync import Joining
from dovetail.runtime.session.state import State
from support.houses import House
from support.scripted import ScriptedDraft


def drafting() -> House:
    """A house with two drafts and one session, which waits for its draft."""
    house = House()
    house.add(ScriptedDraft, "draft", name="another")
    house.submit()
    for _ in range(3):
        house.coordinator.pump()
        for worker in house.workers:
            worker.step()
    house.coordinator.pump()
    (live,) = house.coordinator._running.values()
    assert live.session.state is State.DRAFTING
    return house


def noted(house: House) -> list[tuple[Any, ...]]:
    """Note from now on what is to be done to sessions."""
    acts, found = house.coordinator._acts, list[tuple[Any, ...]]()
    for name in ("perform", "forget_on", "broken", "decide"):
        setattr(acts, name, lambda *what, name=name: found.append((name, *what)))
    return found


def test_a_session_whose_target_goes_is_forgotten_there_and_goes_on_where_it_can() -> None:
    house = drafting()
    (live,), moving = house.coordinator._running.values(), house.coordinator._moving
    target, acts = live.target, noted(house)
    moving.part_with(target, "has gone")
    assert acts == [("forget_on", target, live), ("perform", live, [])]
    assert live.session.state is State.WAITING
    acts.clear()
    moving.resettle()  # it has come back
    (decided, words), (performed, _, (ask,)) = acts
    assert (decided, performed) == ("decide", "perform")
    assert "continues on target" in words
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Open)


def test_a_draft_that_is_not_available_any_more_is_left_for_one_that_is() -> None:
    house = drafting()
    (live,), moving = house.coordinator._running.values(), house.coordinator._moving
    left, drafts = live.draft, house.coordinator.registry.workers.values()
    (other,) = (one for one in drafts if one.plays("draft") and one is not left)
    assert left is not None
    left.leaving = True
    acts = noted(house)
    assert moving.seek(live) == Joining()
    forgotten, (decided, words) = acts
    assert forgotten == ("forget_on", left, live)
    assert decided == "decide"
    assert f"gets drafts from {other.name}" in words
    assert live.draft is other


def test_a_fault_of_ours_at_one_session_keeps_no_other_from_being_seen_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = drafting()
    house.submit((9, 8))
    house.coordinator.pump()
    first, second = house.coordinator._running.values()
    moving, error = house.coordinator._moving, KeyError("x")

    def fail() -> None:
        raise error

    monkeypatch.setattr(first.session, "target_lost", fail)
    acts = noted(house)
    moving.part_with(first.target, "has gone")
    assert acts == [
        ("forget_on", first.target, first),
        ("broken", first, error),
        ("forget_on", first.target, second),
        ("perform", second, []),
    ]
