"""`dovetail worker`: one draft or target worker on cores of its own.

Binds cores and sets thread counts before torch is imported - threads inherit the binding, and torch reads the counts once - and then hands over to the
worker's loop. Knows where the embedded models are; what a model is, the worker knows.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dovetail.launch.binding import Binding, Place, bind
from dovetail.launch.child import end_undisturbed, end_when_told, end_with
from dovetail.launch.configure import Configuration, SettingsCommand, settings_flags
from dovetail.launch.cores import lay_out_here, parse_cores, parse_nodes
from dovetail.launch.directory import writable_profile_path
from dovetail.launch.embedded import with_draft, with_target
from dovetail.launch.preflight import check_draft, check_target, estimated_bytes
from dovetail.launch.terminal import counted, note
from dovetail.launch.topology import format_numbers
from dovetail.protocol.errors import UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.settings import TargetSettings

if TYPE_CHECKING:
    from dovetail.workers.loop import Worker

Role = Literal["draft", "target"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@click.command(cls=SettingsCommand)
@click.option("--role", type=click.Choice(["draft", "target"]), required=True, help="What this worker does.")
@click.option("--connect", metavar="ADDRESS", required=True, help="The coordinator: ipc://PATH or tcp://HOST:PORT.")
@click.option("--cores", metavar="LIST", help="Cores to bind to, such as 0,2-3.  [default: not bound]")
@click.option("--memory-nodes", metavar="LIST", default="", help="Memory nodes to take memory from, with --cores.  [default: not bound]")
@click.option("--name", help="Name of this worker in `dovetail status`.  [default: its role]")
@click.option("--parent", type=int, hidden=True, help="End when this process, which started us, ends.")
@settings_flags("target", "draft", "coordinator")
def command(configuration: Configuration, role: Role, connect: str, cores: str | None, memory_nodes: str, name: str | None, parent: int | None) -> None:
    """Run one draft or target worker by hand, on any machine, until its coordinator ends.

    Without --cores a target is bound to its memory nodes (target.numa) if there are several or one is named; else nothing is bound, and it takes
    target.threads threads (auto: one less than there are cores); a draft on the CPU one, or where there are several nodes as many as one has cores.

    A draft that is a head of its target's takes the target's embedding from target.model on this machine.
    """
    if parent is not None:
        end_with(parent)
    end_when_told()
    check = check_target if role == "target" else check_draft
    check(configuration.settings)
    place = place_of(role, configuration.settings.target, cores, memory_nodes)
    binding = bind(place) if place is not None else Binding("none", Place(()))
    threads = thread_count(role, configuration.settings.target, place)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    say = note if parent is None else lambda _: None
    _serve(configuration, role, connect, name or role, threads, str(binding), say)


def place_of(role: Role, target: TargetSettings, cores: str | None, memory_nodes: str) -> Place | None:
    """Where this worker is to be bound: where it is told; else a target on a machine of several nodes to those that its settings mean; None: nowhere."""
    if cores is not None:
        return Place(parse_cores(cores), parse_nodes(memory_nodes))
    if memory_nodes:
        raise UserError("--memory-nodes goes with --cores: name the cores too, or leave both out and set target.numa")
    if role == "draft":  # what the settings say of the target may hold for another machine
        return None
    place = lay_out_here(numa=target.numa, threads=target.threads, target_bytes=estimated_bytes(target)).target
    return place if place.nodes or target.numa not in ("auto", "off") else None


def thread_count(role: Role, target: TargetSettings, place: Place | None) -> int:
    """Threads for this worker: what the settings say, else one for each core that it is bound to, else what the layout of one machine would give it."""
    if role == "target" and target.threads != "auto":
        if place is not None and target.threads > len(place.cores):
            raise UserError(f"target.threads = {target.threads} is more than the cores {format_numbers(place.cores)} that it is bound to: leave it out")
        return target.threads
    if place is not None:
        return len(place.cores)
    return len(lay_out_here(numa=target.numa).target.cores if role == "target" else lay_out_here().draft.cores)


def _serve(configuration: Configuration, role: Role, connect: str, name: str, threads: int, binding: str, say: Callable[[str], None]) -> None:
    """Connect first: a wrong address or key is told at once, not after a model has been loaded."""
    keys = configuration.settings.coordinator.keys
    link = open_link(connect, keys=Path(keys) if keys else None, role=role)
    try:
        from dovetail.workers.loop import serve  # torch comes in here, after the binding

        worker = _opener(configuration, role)(name, threads)
        say(f"{role} worker {name} is loaded, {counted(threads, 'thread')}, bound: {binding}; it serves {connect}")
        serve(link, worker, binding=binding)
        end_undisturbed()
        say(f"{role} worker {name} ends: its coordinator let it go, or has gone")
    finally:
        link.close()


def _opener(configuration: Configuration, role: Role) -> "Callable[[str, int], Worker]":
    """How the worker of this role is opened: (name, threads) -> worker."""
    target, profile = with_target(configuration.settings.target), writable_profile_path()
    if role == "target":
        from dovetail.workers.target import open_target_worker

        return lambda name, threads: open_target_worker(target, name=name, threads=threads, profile=profile)
    draft = configuration.settings.draft
    if draft.kind == "none":
        raise UserError("draft.kind = 'none' is no worker: leave the draft worker out to decode with the target alone")
    draft = with_draft(draft)
    from dovetail.workers.draft import open_draft_worker

    return lambda name, threads: open_draft_worker(draft, name=name, threads=threads, target=target.model, profile=profile)
