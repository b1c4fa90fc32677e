"""The only import of Ray: a cluster, its placement groups, and actors whose calls never block."""

import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dovetail.launch.processes.ray.bundles import CPU, GPU, MEMORY, Bundle, ClusterNode
from dovetail.launch.processes.ray.part import Failed
from dovetail.launch.processes.ray.seat import Seat, end_with
from dovetail.protocol.errors import UserError

try:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.exceptions import RayError
    from ray.util import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as missing:
    raise UserError(
        f"--engine ray needs Ray on every node ({missing}): pip install 'dovetail-llm[ray]'"
    ) from None

CONNECT_S = 5.0
LOCAL = "local"  # ray's address of a cluster that it starts for us
RAYLET = "raylet"  # ray's name of a node's process
DOVETAIL_MISSING = "No module named 'dovetail"


class Cluster:
    """A cluster that this process has joined or started; use it as a context."""

    def __init__(self, address: str) -> None:
        """`UserError` without an answer."""
        _check(address)
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # do not announce it
        self._own = not address
        if self._own:
            os.environ.setdefault("RAY_worker_niceness", "0")  # that of this process
        try:
            ray.init(
                address=address or LOCAL,
                include_dashboard=None if address else False,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = "run `ray start --address HOST:PORT` here first"
            raise UserError(f"ray.address = {address!r}: cannot join ({why}): {remedy}") from None
        self.here: str = ray.get_runtime_context().get_node_id()
        """The id of the node on which this process runs."""

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    @property
    def gone(self) -> bool:
        """True if this process has started the cluster, and its only node has ended."""
        node = ray._private.worker._global_node
        return self._own and any(kind == RAYLET for kind, _ in node.dead_processes())

    def nodes(self) -> list[ClusterNode]:
        free = available_resources_per_node()
        return [
            ClusterNode(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["Resources"],
                node["Labels"],
                free.get(node["NodeID"], {}),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def reserve(self, bundles: Sequence[Bundle], strategy: str) -> "Reservation":
        return Reservation(bundles, strategy)


class Reservation:
    """The placement group of one replica, which Ray places again when a node is lost."""

    def __init__(self, bundles: Sequence[Bundle], strategy: str) -> None:
        self.bundles = bundles
        self._group = placement_group(
            [dict(bundle.resources) for bundle in bundles],
            strategy=strategy,
            bundle_label_selector=[dict(bundle.labels) for bundle in bundles],
        )

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds until it is placed; return whether it is."""
        return bool(self._group.wait(timeout_seconds=seconds))

    def nodes(self) -> list[str]:
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return [found[index] for index in range(len(self.bundles))]

    def seat(self, index: int, *, guest: bool = False) -> "RemoteSeat":
        """Start an actor in a bundle; a `guest` uses none of its resources."""
        wishes = {} if guest else dict(self.bundles[index].resources)
        options = {
            "num_cpus": wishes.pop(CPU, 0.0),
            "num_gpus": wishes.pop(GPU, 0.0),
            "memory": wishes.pop(MEMORY, 0.0) or None,
            "resources": wishes or None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
            "max_restarts": 0,
        }
        return RemoteSeat(ray.remote(_Seat).options(**options).remote())

    def close(self) -> None:
        with suppress(RayError):
            remove_placement_group(self._group)


class _Seat(Seat):
    """A seat with the address of its node."""

    def __init__(self) -> None:
        super().__init__(ray.util.get_node_ip_address())
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()


class RemoteSeat:
    """A seat on any node: one call at a time, whose result is fetched later."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._asked: Any = None

    @property
    def idle(self) -> bool:
        return self._asked is None

    def ask(self, call: str, *arguments: Any, **named: Any) -> None:
        """Call a method; fetch its result with `answer`."""
        self._asked = getattr(self._actor, call).remote(*arguments, **named)

    def order(self, call: str, *arguments: Any) -> None:
        getattr(self._actor, call).remote(*arguments)

    def answer(self, wait_s: float = 0.0) -> Any:
        """Return the result of the call, None while it is pending; `Failed` if it was lost."""
        if self._asked is None:
            return None
        done, _ = ray.wait([self._asked], timeout=wait_s)
        if not done:
            return None
        asked, self._asked = self._asked, None
        try:
            return ray.get(asked)
        except RayError as error:
            raise _failed(error) from None

    def kill(self) -> None:
        """End the actor at once; the kernel ends its process."""
        with suppress(RayError, ValueError):
            ray.kill(self._actor)


def _failed(error: RayError) -> Failed:
    text = str(error)
    if DOVETAIL_MISSING in text:
        return Failed(
            "a node of the cluster has no dovetail: install the same release on all of them",
            mistake=True,
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line for line in lines if "died" in line or "node" in line.lower()), lines[-1])
    return Failed(f"was lost with its actor ({told[:200]})")


def _check(address: str) -> None:
    if address in ("", "auto"):
        return
    if "://" in address:
        why = "is not HOST:PORT: Ray's client (ray://) is not used"
        raise UserError(f"ray.address = {address!r} {why}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"ray.address = {address!r} is not HOST:PORT: write one, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        remedy = "run `ray start --head` there, or leave it out"
        raise UserError(f"ray.address = {address!r}: no answer ({error}): {remedy}") from None
