"""A process on a node as its service sees it; the node is scripted."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.machine.topology import Node, Topology
from dovetail.launch.processes.ray.bundles import NODE_ID, ClusterNode, bundles_of, why_not
from dovetail.launch.processes.ray.part import Failed, RemotePart, SeatCommand
from dovetail.launch.processes.ray.seat import claim
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import DovetailError, SettingsError, UserError
from dovetail.protocol.settings import Settings

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
    made.begin(SeatCommand(["worker"], {"target.key": "secret"}, 2))
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
    made.begin(SeatCommand(["worker"]))
    for step in range(3):
        made.poll(float(step))
    assert [call for call, _ in seat.asked] == ["introduce"]
    assert made.ending().mistake
    with pytest.raises(UserError, match=r"box has dovetail 0\.0\.9 \(protocol 1\.2\) and this"):
        raise made.failure()


def test_a_node_that_is_lost_ends_its_process_and_one_that_cannot_start_it_says_why() -> None:
    made, _ = part(NODE, {"pid": 7}, Failed("was lost with its actor (the node died)"))
    made.begin(SeatCommand(["worker"]))
    for step in range(5):
        made.poll(1e3 * step)
    assert (made.ending().code, made.ending().mistake) == (1, False)
    with pytest.raises(DovetailError, match="the target worker was lost with its actor"):
        raise made.failure()
    made, _ = part(NODE, {"why": "2 cores were requested", "mistake": True})
    made.begin(SeatCommand(["worker"]))
    for step in range(4):
        made.poll(float(step))
    with pytest.raises(UserError, match="the target worker: 2 cores were requested"):
        raise made.failure()


def test_a_part_that_waits_for_a_node_says_once_what_it_waits_for() -> None:
    made, _ = part(patience_s=1e-9)
    for step in range(3):
        made.poll(1e12 + step)
    assert made.listen() == ["it waits for a node: no node has CPU=8"]
    assert not made.ended


PAIR = {"target worker": "target", "draft worker": "draft"}


def node(name: str, *, free: float | None = None, **resources: float) -> ClusterNode:
    there = {"memory": 64e9, **resources}
    left = there if free is None else {**there, "CPU": free}
    return ClusterNode(f"id-{name}", name, there, {"zone": name, NODE_ID: f"id-{name}"}, left)


def settings(**flags: str) -> Settings:
    given = {name.replace("__", "."): text for name, text in flags.items()}
    return configure(flags=given, environment={}).settings


def wishes(nodes: list[ClusterNode], **flags: str) -> list[dict[str, float]]:
    found = bundles_of(settings(**flags), PAIR, nodes, "id-a")  # type: ignore[arg-type]
    return [{k: v for k, v in bundle.resources.items() if k != "memory"} for bundle in found]


@pytest.mark.parametrize(
    ("nodes", "flags", "expected"),
    [
        ([node("a", CPU=8)], {}, [{}, {"CPU": 7}, {"CPU": 1}]),
        ([node("a", CPU=8)], {"ray__replicas": "2"}, [{}, {"CPU": 3}, {"CPU": 1}]),
        ([node("a", CPU=8)] * 2, {"ray__replicas": "2"}, [{}, {"CPU": 7}, {"CPU": 1}]),
        ([node("a", CPU=1)], {}, [{}, {"CPU": 1}, {}]),
        ([node("a", CPU=8)], {"target__threads": "2"}, [{}, {"CPU": 2}, {"CPU": 1}]),
        ([node("a", CPU=8, GPU=1)], {}, [{}, {"CPU": 7}, {"CPU": 1, "GPU": 1}]),
        ([node("a", CPU=8, GPU=1)], {"draft__device": "cpu"}, [{}, {"CPU": 7}, {"CPU": 1}]),
        ([node("a", CPU=8)], {"draft__device": "cuda:0"}, [{}, {"CPU": 7}, {"CPU": 1, "GPU": 1}]),
        (
            [node("a", CPU=8)],
            {"ray__target": "CPU=4,big=2", "ray__draft": "CPU=0"},
            [{}, {"CPU": 4, "big": 2}, {}],
        ),
    ],
)
def test_a_part_asks_for_cores_and_a_gpu_as_settings_and_cluster_have_them(
    nodes: list[ClusterNode], flags: dict[str, str], expected: list[dict[str, float]]
) -> None:
    assert wishes(nodes, **flags) == expected


def test_a_target_reserves_what_its_weights_take_and_a_coordinator_stays_here() -> None:
    nodes = [node("a", CPU=8)]
    small, large = (
        bundles_of(settings(target__weights=weights), PAIR, nodes, "id-a")  # type: ignore[arg-type]
        for weights in ("half", "fp32")
    )
    assert large[1].resources["memory"] > small[1].resources["memory"]
    assert small[0].labels == {NODE_ID: "id-a"}
    (elsewhere, target, _) = bundles_of(
        settings(ray__coordinator="label:zone=b", ray__target="label:zone=c,memory=20GB"),
        PAIR,  # type: ignore[arg-type]
        nodes,
        "id-a",
    )
    assert elsewhere.labels == {"zone": "b"}
    assert (target.labels, target.resources["memory"]) == ({"zone": "c"}, 20e9)


def test_the_bundle_that_has_no_place_is_named_with_what_the_nodes_have() -> None:
    nodes = [node("a", CPU=2), node("b", CPU=4, free=1.0)]
    bundles = bundles_of(settings(ray__target="CPU=8"), PAIR, nodes, "id-a")  # type: ignore[arg-type]
    why = why_not(bundles, nodes, "PACK")
    assert "no node of the cluster has the resources of the target worker, CPU=8" in why
    assert "(ray.target)" in why
    assert "a has memory=64GB, CPU=2, label:zone=a; b has memory=64GB, CPU=4 (1 free)" in why
    bundles = bundles_of(settings(ray__target="CPU=4"), PAIR, nodes, "id-a")  # type: ignore[arg-type]
    assert "has free resources for the target worker" in why_not(bundles, nodes, "PACK")
    bundles = bundles_of(settings(ray__target="CPU=2"), PAIR, nodes, "id-a")  # type: ignore[arg-type]
    assert "replica (ray.strategy STRICT_PACK)" in why_not(bundles, nodes, "STRICT_PACK")


@pytest.mark.parametrize("text", ["CPU", "CPU=many", "CPU=-1", "CPU=1,CPU=2", "=1"])
def test_a_wish_that_is_none_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(SettingsError, match=r"ray.target = .*is not a node requirement: write "):
        settings(ray__target=text)


def test_there_is_at_least_one_replica() -> None:
    with pytest.raises(SettingsError, match=r"ray.replicas = '0' .* a whole number from 1 to 256"):
        settings(ray__replicas="0")


def test_without_ray_the_engine_is_refused_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in [name for name in sys.modules if name.endswith(("ray.cluster", "ray.placed"))]:
        monkeypatch.delitem(sys.modules, module)
    done = invoke("serve", "--engine=ray", "--http.port=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--engine ray needs Ray on every node" in done.stderr
    assert "pip install 'dovetail-llm[ray]'" in done.stderr


TWO_SOCKETS = Topology((Node(0, ((0, 4), (1, 5)), 1 << 30), Node(1, ((2, 6), (3, 7)), 1 << 30)))


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_each_core_is_claimed_once_with_the_memory_of_its_node_and_let_go_again() -> None:
    first = claim(2, topology=TWO_SOCKETS)
    assert (first.place.cores, first.place.nodes) == ((0, 1), (0,))
    draft = claim(1, last=True, topology=TWO_SOCKETS)
    assert (draft.place.cores, draft.place.nodes) == ((3,), (1,))
    second = claim(2, topology=TWO_SOCKETS)  # second hardware threads of one node, before two nodes
    assert (second.place.cores, second.place.nodes) == ((4, 5), (0,))
    first.close()
    assert claim(2, topology=TWO_SOCKETS).place.cores == (0, 1)


def test_cores_of_several_nodes_are_claimed_where_none_has_enough() -> None:
    assert claim(6, topology=TWO_SOCKETS).place.nodes == (0, 1)


def test_fewer_cores_than_asked_for_are_an_error_that_takes_none() -> None:
    kept = claim(7, topology=TWO_SOCKETS)
    with pytest.raises(UserError, match=r"2 cores were requested, but 1 of"):
        claim(2, topology=TWO_SOCKETS)
    assert len(claim(1, topology=TWO_SOCKETS).place.cores) == 1
    with pytest.raises(UserError, match="1 cores were requested, but 0 of"):
        claim(1, topology=TWO_SOCKETS)
    kept.close()
