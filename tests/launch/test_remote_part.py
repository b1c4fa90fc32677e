"""A process on a node as its service sees it; the node is scripted."""

from typing import Any

import pytest

from dovetail.launch.processes.ray.part import Command, Failed, RemotePart
from dovetail.protocol.errors import DovetailError, UserError

OURS = {"release": "0.1.0", "protocol": [1, 19]}
NODE = {"host": "box", "ip": "10.0.0.1", **OURS}
QUIET = {"heard": "", "beats": False, "cpu_s": 0.0, "lines": [], "ending": None, "failure": ""}
ENDED = {"code": 1, "words": "ended with exit code 1", "last_line": "no memory"}


class ScriptedSeat:
    """A seat that has its answers already."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.ordered = [*answers], list[Any](), list[Any]()
        self.idle = True

    def ask(self, call: str, *arguments: Any, **named: Any) -> None:
        self.asked.append((call, arguments))
        self.idle = False

    def order(self, call: str, *arguments: Any) -> None:
        self.ordered.append((call, *arguments))

    def answer(self, wait_s: float = 0.0) -> Any:
        del wait_s
        if self.idle or not self.answers:
            return None
        self.idle = True
        answer = self.answers.pop(0)
        if isinstance(answer, Failed):
            raise answer
        return answer

    def kill(self) -> None:
        self.ordered.append(("kill",))


def part(*answers: Any, patience_s: float = 1e9) -> tuple[RemotePart, ScriptedSeat]:
    seat = ScriptedSeat(*answers)
    made = RemotePart(
        "target worker",
        seat,
        release=OURS,
        patience_s=patience_s,
        why_waiting=lambda: "no node has CPU=8",
    )
    return made, seat


def test_a_process_is_started_on_its_node_told_looked_at_and_its_end_is_its_own() -> None:
    words = "the target worker ended with exit code 1"
    said = {**QUIET, "heard": "ipc:///x", "lines": ["loading"]}
    ended = {**said, "lines": [], "ending": ENDED, "failure": words}
    made, seat = part(NODE, {"pid": 7}, said, ended)
    made.begin(Command(["worker"], {"target.key": "secret"}, 2))
    made.tell("tcp://10.0.0.9:5")  # it is not there yet
    for step in range(6):
        made.poll(1e3 * step)
    assert [call for call, _ in seat.asked] == ["introduce", "start", "look", "look"]
    assert seat.asked[1][1] == ("target worker", ["worker"], {"target.key": "secret"}, 2)
    assert seat.ordered == [("tell", "tcp://10.0.0.9:5")]
    assert (made.host, made.pid, made.heard(), made.listen()) == ("box", 7, "ipc:///x", ["loading"])
    assert made.ended
    assert (made.ending().code, made.ending().last_line) == (1, "no memory")
    assert str(made.failure()) == words


def test_a_node_with_another_release_is_a_mistake_that_names_both() -> None:
    made, seat = part({**NODE, "release": "0.0.9", "protocol": [1, 2]})
    made.begin(Command(["worker"]))
    for step in range(3):
        made.poll(float(step))
    assert [call for call, _ in seat.asked] == ["introduce"]
    assert made.ending().mistake
    with pytest.raises(UserError, match=r"box has dovetail 0\.0\.9 \(protocol 1\.2\) and this"):
        raise made.failure()


def test_a_node_that_is_lost_ends_its_process_and_one_that_cannot_start_it_says_why() -> None:
    made, _ = part(NODE, {"pid": 7}, Failed("was lost with its actor (the node died)"))
    made.begin(Command(["worker"]))
    for step in range(5):
        made.poll(1e3 * step)
    assert (made.ending().code, made.ending().mistake) == (1, False)
    with pytest.raises(DovetailError, match="the target worker was lost with its actor"):
        raise made.failure()
    made, _ = part(NODE, {"why": "2 cores were asked for", "mistake": True})
    made.begin(Command(["worker"]))
    for step in range(4):
        made.poll(float(step))
    with pytest.raises(UserError, match="the target worker: 2 cores were asked for"):
        raise made.failure()


def test_a_part_that_waits_for_a_node_says_once_what_it_waits_for() -> None:
    made, _ = part(patience_s=1e-9)
    for step in range(3):
        made.poll(1e12 + step)
    assert made.listen() == ["it waits for a node: no node has CPU=8"]
    assert not made.ended
