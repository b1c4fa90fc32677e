"""Tests of the census: which sessions count as running beside another one."""

from types import SimpleNamespace

import pytest

from dovetail.runtime.control.rounds import Load
from dovetail.runtime.engine.running import Census
from dovetail.runtime.session.state import State

TARGET, DRAFT = object(), object()


def counted(*states: State, opening: bool = False) -> Load:
    """Return the load that the first of sessions in these states has on its workers."""
    running = {
        number: SimpleNamespace(session=SimpleNamespace(state=state), target=TARGET, draft=DRAFT)
        for number, state in enumerate(states)
    }
    return Census(running).load(running[0], opening=opening)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [State.READY, State.BETWEEN, State.DRAFTING, State.VERIFYING])
def test_a_session_counts_itself_in_its_first_round_as_in_any_other(own: State) -> None:
    assert counted(own) == Load(1, 1)
    assert counted(own, State.VERIFYING, State.DRAFTING) == Load(3, 3)


def test_prompts_that_are_read_count_only_where_they_are_asked_for() -> None:
    states = State.READY, State.OPENING, State.WAITING, State.DONE
    assert counted(*states) == Load(1, 1)
    assert counted(*states, opening=True) == Load(2, 2)
