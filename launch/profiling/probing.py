"""Measures what cores can do at best: their bandwidth and arithmetic, measured for a second in a
process of its own that is bound to them.

`python -m dovetail.launch.profiling.probing` is that process, since torch must not be imported
before the binding.
"""

import json
import os
import sys
from collections.abc import Sequence

import click

from dovetail.launch.cli import run
from dovetail.launch.machine.binding import Place, bind
from dovetail.launch.machine.cores import parse_place
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from dovetail.launch.processes.nursery import thread_environment
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.calibration import MachineLimits

SECONDS = 0.6
"""Duration of the probe of bandwidth; half as long for each kind of arithmetic, as in
`calibrate`."""


def probe(supervisor: Supervisor, place: Place) -> MachineLimits:
    """The limits of the cores of a place; they have to be idle."""
    where = [
        f"--cores={place.cores_text}",
        f"--memory-nodes={format_numbers(place.nodes)}",
    ]
    child = supervisor.start(
        "probe of the machine", where, module="dovetail.launch.profiling.probing", reads=True
    )
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    child.process.wait()
    if not line.endswith(b"\n"):
        raise child.failure()
    supervisor.end([child])  # it has done what it was for, and nobody is to miss it
    return MachineLimits.model_validate_json(line)


@click.command()
@click.option("--cores", required=True)
@click.option("--memory-nodes", default="")
@click.option("--parent", type=int, required=True)
def measure(cores: str, memory_nodes: str, parent: int) -> None:
    """Bind this process, and only then import torch and measure; the better of two tries, since
    others may disturb one."""
    end_with(parent)
    end_when_told()
    said = claim_stdout()
    place = parse_place(cores, memory_nodes)
    bind(place)
    os.environ.update(thread_environment(len(place.cores)))
    from dovetail.workers import kernels
    from dovetail.workers.calibration.limits import best_of, measure_limits
    from dovetail.workers.devices.opening import open_device
    from dovetail.workers.kernels.shards import Shard
    from dovetail.workers.serving.sharded import begin_shards

    open_device("cpu", len(place.cores))
    if place.shards:
        begin_shards([Shard(own, node) for own, node in place.shards_at_nodes])
    if kernels.available():
        kernels.set_threads(len(place.cores))
    found = best_of(measure_limits(SECONDS), measure_limits(SECONDS))
    print(json.dumps(found.model_dump()), file=said, flush=True)


def main(arguments: Sequence[str]) -> int:
    return run(arguments, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
