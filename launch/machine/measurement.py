"""The measuring process (`python -m dovetail.launch.machine.measurement`): binds its cores, then
imports torch; prints progress, line by line, and the results."""

import json
import os
import sys
from dataclasses import asdict
from typing import Any, Literal, TextIO

import click

from dovetail.launch.cli import run
from dovetail.launch.files.directory import substitutes_path, writable_profile_path
from dovetail.launch.machine.cores import parse_place
from dovetail.launch.machine.others import Others
from dovetail.launch.machine.topology import bind
from dovetail.launch.processes.child import claim_stdout, handle_signals
from dovetail.launch.processes.nursery import thread_environment
from dovetail.launch.processes.preflight import free_memory_bytes
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.errors import DovetailError
from dovetail.protocol.settings import DraftSettings, TargetSettings

Role = Literal["target", "draft"]


def beside_cpu(configuration: Configuration) -> str:
    """Return the device to measure in addition to the CPU; empty if none."""
    target = configuration.settings.target
    return target.split.device or (target.device if target.device != "cpu" else "")


@click.command()
@click.option("--role", type=click.Choice(["target", "draft"]), required=True)
@click.option("--cores", required=True)
@click.option("--memory-nodes", default="")
@click.option("--seconds", type=float, required=True)
@click.option("--context", "contexts", type=int, multiple=True)
@click.option("--parent", type=int, required=True)
@settings_flags("target", "draft")
def measure(
    configuration: Configuration,
    role: Role,
    cores: str,
    memory_nodes: str,
    seconds: float,
    contexts: tuple[int, ...],
    parent: int,
) -> None:
    """Bind this process, and only then import torch and measure."""
    handle_signals(parent)
    said = claim_stdout()
    place = parse_place(cores, memory_nodes)
    bind(place)
    target, draft = configuration.settings.target, configuration.settings.draft
    threads = target.threads if role == "target" and target.threads != "auto" else len(place.cores)
    os.environ.update(thread_environment(threads))
    from dovetail.workers.devices.memory import is_out_of_memory
    from dovetail.workers.devices.opening import open_device
    from dovetail.workers.kernels.shards import Shard
    from dovetail.workers.serving.sharded import begin_shards

    found: dict[str, Any]
    if place.shards:
        begin_shards([Shard(own, node) for own, node in place.shards_at_nodes])
    device = beside_cpu(configuration)
    if device:
        open_device(device, threads)  # a missing one is reported now, not after the measurement
    others = Others(place.cores)
    try:
        if role == "draft":
            found = _measured_draft(with_draft(draft), with_target(target), threads, seconds / 4)
        else:
            found = _measured_target(
                with_target(target),
                device,
                threads=threads,
                profile=writable_profile_path(),
                seconds=seconds,
                contexts=contexts,
                say=lambda text, share: _tell(said, {"doing": text, "share": share}),
            )
    except Exception as error:
        if is_out_of_memory(error):
            raise DovetailError(
                "memory ran out while the model was measured: name a smaller model or other weights"
            ) from None
        raise
    load = others.load(lambda pid, _: pid == parent)
    _tell(said, {"found": {**found, "others": None if load is None else asdict(load)}})


def _measured_draft(
    draft: DraftSettings, target: TargetSettings, threads: int, seconds: float
) -> dict[str, Any]:
    from dovetail.workers.calibration.draft import calibrate_draft

    key, levels = calibrate_draft(
        draft,
        threads=threads,
        target=target.model,
        context=target.longest,
        cache=substitutes_path(),
        seconds=seconds,
    )
    return {"key": key.model_dump(), "levels": levels.model_dump()}


def _measured_target(
    target: TargetSettings, device: str, *, threads: int, seconds: float, **options: Any
) -> dict[str, Any]:
    """Return the costs of a target's passes and, if `device` is given, of its layers there;
    `options` are those of `calibrate`."""
    from dovetail.workers.calibration.devices import measure_device
    from dovetail.workers.calibration.target import calibrate

    memory_bytes = free_memory_bytes()
    found = calibrate(
        target, threads=threads, memory_bytes=memory_bytes, seconds=seconds, **options
    )
    costs = None
    if device:
        costs = measure_device(target, device=device, threads=threads, seconds=seconds)
    return {**found, "device": None if costs is None else costs.model_dump()}


def _tell(said: TextIO, message: object) -> None:
    print(json.dumps(message), file=said, flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], measure))
