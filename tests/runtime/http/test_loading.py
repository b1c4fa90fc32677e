"""A worker's progress in loading its model is told where people and programs look."""

from collections.abc import Iterator

import pytest

from dovetail.launch.console.terminal import SAY_EVERY_S, Intervals, loading_text
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.links import Link, open_link
from dovetail.protocol.messages import LoadingState
from dovetail.runtime.fleet.registry import LOADING_NS, MAX_WORKERS, Registry
from dovetail.workers.serving.loading import TELL_EVERY_S, Telling
from support.scripted import ScriptedTarget
from support.web import Backend, api, backend

GB = 10**9


class Clock:
    """Virtual seconds."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def house() -> Iterator[Backend]:
    with backend(target=False, draft=False) as started:
        yield started


@pytest.fixture
def link(house: Backend) -> Iterator[Link]:
    opened = open_link(house.address, role="target")
    yield opened
    opened.close()


def told(house: Backend) -> tuple[LoadingState, ...]:
    return house.coordinator.report().loading


def test_bytes_rate_and_time_left_are_told_before_the_worker_is_registered(
    house: Backend, link: Link
) -> None:
    clock = Clock()
    tell = Telling(link, "target", ("target",), "demo", clock)
    with api(house.address) as server:
        state = server.client.get("/readyz").json()
        assert (state["status"], state["loading"]) == ("waiting", [])
        tell("checking", 0, 6 * GB)
        clock.now_s = 2.0
        tell("checking", 1 * GB, 6 * GB)
        house.until(lambda: any(state.done for state in told(house)))
        reply = server.client.get("/readyz")
        state = reply.json()
        assert (reply.status_code, state["status"]) == (503, "loading")
        (loading,) = state["loading"]
        assert (loading["doing"], loading["done"], loading["total"]) == ("checking", 1 * GB, 6 * GB)
        assert (loading["bytes_per_s"], loading["left_s"]) == (0.5 * GB, 10.0)
        words = "the target is checking its weights: 1.00 of 6.00 GB, 500 MB/s, 0:10 left"
        assert words in state["missing"]
        picture = server.client.get("/dashboard/state").json()
        assert [entry["words"] for entry in picture["loading"]] == [words]
        tell("loading", 0, 6 * GB)
        house.until(lambda: [state.doing for state in told(house)] == ["loading"])
        house.add(ScriptedTarget, "target")
        house.coordinator.registry.hear_loading(
            b"", told(house)[0], None, house.coordinator.now_ns()
        )
        assert server.client.get("/readyz").json()["ready"] is True


def test_a_worker_that_is_registered_loads_no_more(house: Backend) -> None:
    worker = house.add(ScriptedTarget, "target")
    registered = house.coordinator.report().workers[0]
    tell = Telling(worker.link, "target", ("target",), "demo")
    tell("loading", 0, 5)
    house.coordinator.registry.hear_loading(
        b"other", state(pid=registered.pid, host=registered.host), None, house.coordinator.now_ns()
    )
    house.add(ScriptedTarget, "target")  # by now what was told has arrived
    assert told(house) == ()
    assert not house.coordinator.report().refused


def test_one_that_loads_beside_those_that_serve_makes_nothing_worse(
    house: Backend, link: Link
) -> None:
    house.add(ScriptedTarget, "target")
    Telling(link, "target-2", ("target",), "demo")("loading", 1, 5)
    house.until(lambda: told(house) != ())
    with api(house.address) as server:
        found = server.client.get("/readyz").json()
    assert (found["ready"], found["status"], found["degraded"]) == (True, "ready", False)
    assert [entry["name"] for entry in found["loading"]] == ["target-2"]


def state(name: str = "target", *, pid: int = 1, host: str = "here", done: int = 0) -> LoadingState:
    return LoadingState(
        name=name,
        roles=("target",),
        host=host,
        pid=pid,
        model="m",
        doing="loading",
        done=done,
        total=8,
        bytes_per_s=0.0,
    )


def test_what_is_not_heard_of_for_long_or_was_started_again_is_not_told() -> None:
    registry = Registry(1)
    registry.hear_loading(b"a", state(done=1), None, 0)
    registry.hear_loading(b"b", state(done=2, pid=2), None, 1)
    assert [told.done for told in registry.loading(1)] == [2]
    assert registry.loading(1 + LOADING_NS) == ()


def test_no_more_are_noted_than_may_work_here_and_nobody_whose_key_says_otherwise() -> None:
    registry = Registry(1)
    for number in range(2 * MAX_WORKERS):
        registry.hear_loading(bytes([number]), state(f"target-{number}"), None, 0)
    assert len(registry.loading(0)) == MAX_WORKERS
    registry = Registry(1)
    registry.hear_loading(b"a", state(), PeerKey("draft", ("draft",), ""), 0)
    assert registry.loading(0) == ()
    registry.hear_loading(b"a", state(), PeerKey("target", ("target",), ""), 0)
    assert len(registry.loading(0)) == 1


class Sent(list[list[bytes]]):
    """A link that keeps what is sent."""

    def offer(self, frames: list[bytes]) -> None:
        self.append(frames)


def test_it_is_told_a_few_times_a_second_and_when_something_begins_or_ends() -> None:
    clock, sent = Clock(), Sent()
    tell = Telling(sent, "target", ("target",), "m" * 1000, clock)  # type: ignore[arg-type]
    for done in range(1001):
        clock.now_s += 0.001
        tell("checking", done, 1000)
    assert 1 / TELL_EVERY_S <= len(sent) <= 2 + 1 / TELL_EVERY_S
    tell("loading", 0, 1000)
    tell("loading", 1000, 1000)
    assert len(sent) <= 4 + 1 / TELL_EVERY_S


def test_a_terminal_has_a_bar_for_each() -> None:
    half = state().model_copy(update={"done": 4, "bytes_per_s": 2.0})
    first, second = loading_text((half, state("target-2"))).strip("\n").split("\n")
    assert first.split()[0] == 12 * "━" + 12 * "╌"
    assert first.endswith("the target is loading its weights: 0.0 of 0.0 MB, 0 MB/s, 0:02 left")
    assert "the target target-2 is loading" in second
    assert loading_text(()) == ""


def test_without_a_terminal_there_is_a_line_now_and_then_and_none_for_what_is_soon_there() -> None:
    clock, said = Clock(), list[str]()
    intervals = Intervals(said.append, clock)
    for second in range(int(3 * SAY_EVERY_S) + 1):
        clock.now_s = float(second)
        intervals.tell((state(),))
    assert len(said) == 3
    intervals.tell(())
    clock.now_s += SAY_EVERY_S
    intervals.tell((state(),))
    assert len(said) == 3


def test_a_worker_that_reads_or_proves_names_no_bytes() -> None:
    shown = [replaced.words for replaced in map(doing, ("reading", "proving"))]
    assert shown == ["the target is reading its tokenizer", "the target is proving its model"]


def doing(what: str) -> LoadingState:
    """Return the state of a worker that does something without counting bytes."""
    return LoadingState.model_validate({**state().model_dump(), "doing": what, "total": 0})
