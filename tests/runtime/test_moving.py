"""The effects to carry out when workers go, as values: nothing is done until somebody carries them
out."""

import pytest

from dovetail.protocol.messages import Open
from dovetail.runtime.engine.effects import Break, Follow, Forget, Say
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


def test_a_session_whose_target_goes_is_forgotten_there_and_goes_on_where_it_can() -> None:
    house = drafting()
    (live,), moving = house.coordinator._running.values(), house.coordinator._moving
    target = live.target
    assert [*moving.part_with(target, "has gone")] == [Forget(live, target), Follow(live, [])]
    assert live.session.state is State.WAITING
    said, follow = moving.resettle()  # it has come back
    assert isinstance(said, Say)
    assert "continues on target" in said.words
    assert isinstance(follow, Follow)
    (ask,) = follow.actions
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Open)


def test_a_draft_that_is_not_available_any_more_is_left_for_one_that_is() -> None:
    house = drafting()
    (live,), moving = house.coordinator._running.values(), house.coordinator._moving
    left, drafts = live.draft, house.coordinator.registry.workers.values()
    (other,) = (one for one in drafts if one.plays("draft") and one is not left)
    assert left is not None
    left.leaving = True
    effects = moving.seek(live)
    assert next(effects) == Forget(live, left)
    assert isinstance(said := next(effects), Say)
    assert f"gets drafts from {other.name}" in said.words
    with pytest.raises(StopIteration) as end:
        next(effects)
    assert end.value.value == Joining()
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
    assert [*moving.part_with(first.target, "has gone")] == [
        Forget(first, first.target),
        Break(first, error),
        Forget(second, first.target),
        Follow(second, []),
    ]
