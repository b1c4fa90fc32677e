"""The share of a node that each part of a service asks for, and what is said of one that has no
place."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from dovetail.launch.processes.ray.bundles import NODE_ID, Node, bundles_of, why_not
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import Settings

PAIR = {"target worker": "target", "draft worker": "draft"}


def node(name: str, *, free: float | None = None, **resources: float) -> Node:
    there = {"memory": 64e9, **resources}
    left = there if free is None else {**there, "CPU": free}
    return Node(f"id-{name}", name, there, {"zone": name, NODE_ID: f"id-{name}"}, left)


def settings(**flags: str) -> Settings:
    given = {name.replace("__", "."): text for name, text in flags.items()}
    return configure(flags=given, environment={}).settings


def wishes(nodes: list[Node], **flags: str) -> list[dict[str, float]]:
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
    nodes: list[Node], flags: dict[str, str], expected: list[dict[str, float]]
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
    assert "no node of the cluster has what the target worker asks for, CPU=8" in why
    assert "(ray.target)" in why
    assert "a has memory=64GB, CPU=2, label:zone=a; b has memory=64GB, CPU=4 (1 free)" in why
    bundles = bundles_of(settings(ray__target="CPU=4"), PAIR, nodes, "id-a")  # type: ignore[arg-type]
    assert "has free what the target worker asks for" in why_not(bundles, nodes, "PACK")
    bundles = bundles_of(settings(ray__target="CPU=2"), PAIR, nodes, "id-a")  # type: ignore[arg-type]
    assert "together (ray.strategy STRICT_PACK)" in why_not(bundles, nodes, "STRICT_PACK")


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
    assert "pip install 'dovetail[ray]'" in done.stderr
