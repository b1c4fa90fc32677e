"""Decides which node resources a service's parts need in a cluster, and reports what is missing.
Pure: settings and nodes are arguments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.launch.machine.fit import needed_bytes
from dovetail.launch.processes.serving.service import COORDINATOR
from dovetail.launch.processes.stack import Played
from dovetail.protocol.settings import Settings, node_wishes
from dovetail.workers.devices.registry import Memory, memory_of

CPU, GPU, MEMORY = "CPU", "GPU", "memory"
NODE_ID = "ray.io/node-id"  # the label that Ray gives each node
LEAST_BYTES = 256e6
"""Bytes reserved for a part of unknown size: two processes without torch, with some margin."""


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster that is alive."""

    id: str
    name: str
    resources: Mapping[str, float]  # all of its resources, in use or not
    labels: Mapping[str, str]
    free: Mapping[str, float]  # its free resources


@dataclass(frozen=True)
class Bundle:
    """The share of a node for one part; the HTTP API is in the coordinator's."""

    part: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    setting: str  # the setting that changes it

    @property
    def cores(self) -> int:
        """Return to how many cores its process is bound; 0 if it is not bound."""
        return int(self.resources.get(CPU, 0.0))

    @property
    def words(self) -> str:
        wishes = [f"{name}={_amount(name, value)}" for name, value in self.resources.items()]
        return ",".join([*wishes, *(f"label:{key}={value}" for key, value in self.labels.items())])

    def fits(self, node: ClusterNode, *, now: bool = False) -> bool:
        """True if a node has its resources; `now`: if they are also free."""
        there = node.free if now else node.resources
        return all(there.get(name, 0.0) >= value for name, value in self.resources.items()) and all(
            node.labels.get(key) == value for key, value in self.labels.items()
        )


def bundles_of(
    settings: Settings, workers: Mapping[str, Played], nodes: Sequence[ClusterNode], here: str
) -> list[Bundle]:
    """The bundles of one replica, the coordinator's first; `here`: the id of the node on which the
    service is started."""
    wished, labels = node_wishes(settings.ray.coordinator)
    labels = labels if settings.ray.coordinator else {NODE_ID: here}
    reserved = _reserved({MEMORY: LEAST_BYTES, **wished})
    found = [Bundle(COORDINATOR, reserved, labels, "ray.coordinator")]
    cores = _cores(settings, [*workers.values()], nodes)
    for name, role in workers.items():
        section = "draft" if role == "draft" else "target"
        wished, labels = node_wishes(getattr(settings.ray, section))
        memory = max(LEAST_BYTES, float(needed_bytes(settings, role)))
        automatic = {CPU: float(cores[section]), MEMORY: memory}
        if _wants_gpu(settings, role, nodes):
            automatic[GPU] = 1.0
        resources = _reserved({**automatic, **wished})
        found.append(Bundle(name, resources, labels, f"ray.{section}"))
    return found


def why_not(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode], strategy: str) -> str:
    """Return in one sentence which bundle fits on no node, and what the nodes have."""
    has = "; ".join(f"{node.name} has {_listed(node)}" for node in nodes) or "there is no node"
    for bundle in bundles:
        if not any(bundle.fits(node) for node in nodes):
            return (
                f"no node of the cluster has the resources of the {bundle.part}, {bundle.words} "
                f"({bundle.setting}): {has}"
            )
    for bundle in bundles:
        if not any(bundle.fits(node, now=True) for node in nodes):
            return (
                f"no node of the cluster has free resources for the {bundle.part}, {bundle.words} "
                f"({bundle.setting}): {has}"
            )
    asked = ", ".join(f"the {bundle.part} {bundle.words}" for bundle in bundles)
    return f"the cluster has no room for a whole replica (ray.strategy {strategy}): {asked}; {has}"


def _reserved(wishes: Mapping[str, float]) -> dict[str, float]:
    """Return the resources above 0, with at least a minimal one, since a bundle cannot be empty."""
    return {name: value for name, value in wishes.items() if value} or {MEMORY: 1.0}


def _cores(
    settings: Settings, roles: Sequence[Played], nodes: Sequence[ClusterNode]
) -> dict[str, int]:
    """Return the cores of a target and a draft: those of the settings, else a replica's share of
    the largest nodes, one of which is the draft's if there are two or more."""
    largest = max((node.resources.get(CPU, 0.0) for node in nodes), default=1.0)
    alike = sum(node.resources.get(CPU, 0.0) == largest for node in nodes) or 1
    share = int(largest // math.ceil(settings.ray.replicas / alike))
    draft = 1 if "draft" in roles and share > 1 else 0
    threads = settings.target.threads
    target = max(1, share - draft) if threads == "auto" else threads
    return {"target": target, "draft": draft}


def _wants_gpu(settings: Settings, role: Played, nodes: Sequence[ClusterNode]) -> bool:
    if role == "draft":
        if settings.draft.kind == "ngram":
            return False
        if settings.draft.device == "auto":
            return any(node.resources.get(GPU, 0.0) >= 1.0 for node in nodes)
        return _is_gpu(settings.draft.device)
    target = settings.target
    return any(map(_is_gpu, (target.device, target.split.device)))


def _is_gpu(device: str) -> bool:
    return memory_of(device) is Memory.OWN


def _listed(node: ClusterNode) -> str:
    own = {
        name: value
        for name, value in node.resources.items()
        if not name.startswith(("node:", "object_store"))
    }
    wishes = [
        f"{name}={_amount(name, value)}"
        + (f" ({_amount(name, free)} free)" if (free := node.free.get(name, 0.0)) < value else "")
        for name, value in own.items()
    ]
    labels = [(key, value) for key, value in node.labels.items() if not key.startswith("ray.io/")]
    return ", ".join([*wishes, *(f"label:{key}={value}" for key, value in labels)]) or "nothing"


def _amount(name: str, value: float) -> str:
    return f"{value / 1e9:.3g}GB" if name == MEMORY else f"{value:g}"
