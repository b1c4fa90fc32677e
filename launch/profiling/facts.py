"""Facts that a run is judged by, beside what was watched of it."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch.machine.topology import read_topology
from dovetail.launch.processes.connection import models_of, weights_of
from dovetail.launch.profiling.bounds import Model, Roofline, count_layers, has_16_bits, read_model
from dovetail.launch.profiling.evidence import Evidence
from dovetail.launch.profiling.forecast import Tree
from dovetail.launch.profiling.situation import Card, Elsewhere, Situation
from dovetail.launch.profiling.timeline import Slice
from dovetail.launch.profiling.watching import Watch
from dovetail.launch.profiling.workload import Soundings
from dovetail.protocol.calibration import MachineLimits
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Reported, WorkerState
from dovetail.protocol.settings import HEAD_KINDS
from dovetail.workers.devices.registry import entry_of
from dovetail.workers.models.checkpoints.gguf.view import resolved

HEAD, SMALL = "head", "small"
"""A draft whose kind its settings do not name: whether it reads its target's states tells which."""
NODES = {
    "auto": "the target on the best memory node",
    "shard": "the target spread over all memory nodes, each with its weights",
}
"""The meaning of the values of target.numa, except for lists of nodes."""
ALL_NODES = "the target on the memory nodes {}, its weights interleaved over them"
QUIET = 0.05
"""A GPU that is busy for less is nobody's."""


def coordinator_of(state: Reported) -> int | None:
    """Return the process number of a coordinator, if it runs on this machine."""
    return (
        state.pid
        if state.address.startswith("ipc://") and Path(f"/proc/{state.pid}").exists()
        else None
    )


def role_of(workers: Sequence[WorkerState], role: str) -> WorkerState:
    found = next(
        (worker for worker in workers if role in worker.roles and not worker.standby), None
    )
    if found is None:
        raise UserError(f"the last {role} worker has left: this run cannot be profiled")
    return found


def _folder(worker: WorkerState) -> Path | None:
    path = Path(resolved(worker.model))
    return path if worker.model and path.is_dir() else None


@dataclass(frozen=True)
class Facts:
    """The facts that a run is judged by, beside what was watched."""

    status: Reported
    soundings: Soundings
    tree: Tree
    width: int | None
    ahead: bool
    policy: str
    cuts: bool
    kind: str
    """The kind of the draft, as the settings name it."""
    shared: bool
    """True if target and draft have a core in common."""
    spare: int
    """Cores that neither of them has."""
    blocks: int | None
    limits: MachineLimits | None
    wider: MachineLimits | None
    """The limits of the target's cores and the spare ones together."""
    others_nodes: Mapping[str, MachineLimits]
    """The limits of other places that the target could have, by what target.numa would say."""
    words: str
    """The workload in words."""

    @property
    def target(self) -> WorkerState:
        return role_of(self.status.workers, "target")

    @property
    def model(self) -> Model | None:
        return read_model(_folder(self.target), weights_of(self.target), self.target.inflation)

    def evidence(self, watch: Watch) -> Evidence:
        return Evidence(
            slices=[Slice.of(span) for span in watch.spans],
            rounds=watch.rounds,
            workers=watch.workers,
            states=self.status.workers,
            pairs=self.status.pairs,
            start_ns=watch.start_ns,
            end_ns=watch.end_ns,
            samples=watch.samplers.taken,
            absent=watch.samplers.absent,
            topology=read_topology(),
            here=socket.gethostname(),
            soundings=self.soundings,
            model=self.model,
            roofline=self._roofline(self.limits),
            wider=self._roofline(self.wider),
            tree=self.tree,
            width=self.width,
            ahead=self.ahead,
            situation=self._situation(watch),
            title=models_of(self.status),
            workload=self.words,
            missed=watch.missed,
            changes=watch.changes,
            coordinator=coordinator_of(self.status),
        )

    def _situation(self, watch: Watch) -> Situation:
        drafts = [worker for worker in self.status.workers if "draft" in worker.roles]
        head = any(worker.feature_bytes for worker in drafts)
        kind = self.kind if self.kind != "auto" else HEAD if head else SMALL
        return Situation(
            policy=self.policy,
            cuts=self.cuts,
            draft_kind=kind,
            reads=head or kind in HEAD_KINDS,
            ahead_possible=not self.shared,
            weights=weights_of(self.target),
            stored_16_bits=has_16_bits(_folder(self.target)),
            threads=self.target.threads,
            spare_threads=self.spare,
            roofline=self._roofline(self.limits),
            wider=self._roofline(self.wider),
            blocks=self.blocks,
            idle_gpu=_idle_gpu(watch, drafts),
            elsewhere=tuple(self._elsewhere()),
            card=_card(watch)
            if self.target.device == "cpu" and not self.target.placement
            else None,
            layers=count_layers(_folder(self.target)) if not self.target.inflation else 0,
            weight_bytes=self.model.bytes if self.model is not None else 0,
        )

    def _elsewhere(self) -> Iterator[Elsewhere]:
        for numa, limits in self.others_nodes.items():
            if (roofline := self._roofline(limits)) is not None:
                what = NODES.get(numa, ALL_NODES.format(numa))
                yield Elsewhere(what, (f"--target.numa={numa}",), roofline)

    def _roofline(self, limits: MachineLimits | None) -> Roofline | None:
        """Return the limits of a pass; None also where a part of the target computes on a device,
        whose limits are not probed."""
        if (
            limits is None
            or self.model is None
            or self.target.device != "cpu"
            or self.target.placement
        ):
            return None
        kernels = str(self.target.fingerprint).split("/")[2] if self.target.fingerprint else ""
        return Roofline(self.model, limits, library=kernels.startswith("torch"))


def _card(watch: Watch) -> Card | None:
    """The card with the most memory free of those that a setting can name."""
    cards = watch.samplers.taken[-1].gpus if watch.samplers.taken else {}
    found = [
        Card(device, gpu.name, gpu.memory_bytes - gpu.used_bytes, gpu.link_gb_s)
        for device, gpu in cards.items()
        if entry_of(device) is not None
        and gpu.memory_bytes is not None
        and gpu.used_bytes is not None
        and not gpu.integrated
    ]
    return max(found, key=lambda card: card.free_bytes, default=None)


def _idle_gpu(watch: Watch, drafts: Sequence[WorkerState]) -> str:
    """A card that nobody uses while drafts are on the CPU."""
    if not drafts or any(draft.device != "cpu" for draft in drafts) or not watch.samplers.taken:
        return ""
    return next(
        (
            f"{name} {gpu.name}"
            for name, gpu in watch.samplers.taken[-1].gpus.items()
            if gpu.busy is not None and gpu.busy < QUIET and not gpu.integrated
        ),
        "",
    )
