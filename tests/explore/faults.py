"""The effects of a schedule's faults on a world."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.runtime.fleet.scheduler import Owed
from explore.clock import MS
from explore.coordinators import Machine
from explore.processes import Process
from explore.sabotage import sabotage_handler, sabotage_session
from explore.schedules import Fault
from explore.wires import Fuse

if TYPE_CHECKING:
    from explore.world import World


def happen(world: "World", fault: Fault) -> bool:
    """Have a fault happen; return False if there was nothing that it could happen to."""
    for_ns = fault.for_ms * MS
    world.over_ns = max(world.over_ns, world.time.now_ns + for_ns)
    match fault.kind:
        case "cancel":
            return world.reader.cancel(fault.who)
        case "fault":
            return _fail_at_a_session(world, fault)
        case "handler":
            return _fail_in_a_room(world, fault)
        case "leave":
            world.leave()
        case "deaf":
            world.reader.hub.deaf[world.reader.peer] = world.time.now_ns + for_ns
            world.reader.deaf = True
            for told in world.reader.told.values():
                told.late |= told.open
        case "sever":
            world.hub.sever()
        case "crash" if world.lead.disk is not None and fault.who == 3:
            _light(world.lead, fault.for_ms)
        case "crash" if fault.who < 2:
            world.hub.fuse = Fuse(fault.for_ms % 100, leaves=bool(fault.who))
        case "crash":
            world.died()
        case "join":
            world.add(("target", "draft")[fault.who % 2])
        case "swap":
            newcomer = world.add(("target", "draft")[fault.who % 2], standby=True, load_ns=MS)
            world.over_ns = max(world.over_ns, world.time.now_ns + 3 * MS)
            world.time.later(2 * MS, lambda: _swap(world, newcomer, fault.who))
        case "drain":
            worker = _process(world, fault).worker
            if worker is not None:
                world.reader.dismiss(worker.epoch)
            return worker is not None
        case _:
            return _harm(world, _process(world, fault), fault, for_ns)
    return True


def _light(machine: Machine, form: int) -> None:
    """Have a coordinator die at a write to its journal, which is there then or not."""
    assert machine.disk is not None
    machine.disk.fuse, lasts = divmod(form, 2)
    machine.disk.lasts = bool(lasts)


def _process(world: "World", fault: Fault) -> Process:
    return world.processes[fault.who % len(world.processes)]


def _fail_at_a_session(world: "World", fault: Fault) -> bool:
    """Have the coordinator fail at one of the sessions that run, the next time that it does
    something with it."""
    lives = [live for live in world.coordinator._running.values() if not live.trial]
    if not lives:
        return False
    live = lives[fault.who % len(lives)]
    world.note(sabotage_session(live, fault.for_ms, world.fired))
    if live.client.peer == world.reader.peer:
        world.reader.told[live.request].sabotaged = True
    return True


def _fail_in_a_room(world: "World", fault: Fault) -> bool:
    """Have the coordinator fail in one of its rooms, once: it may be about any request that is open
    then."""

    def failed(where: str) -> None:
        world.fired(where)
        world.sabotages += 1
        for told in world.reader.told.values():
            told.sabotaged |= told.open

    planted = sabotage_handler(world.coordinator, fault.for_ms, failed)
    world.note(planted.words)
    world.planted.append(planted.remove)
    return True


def _owed(world: "World", process: Process) -> Mapping[int, Owed]:
    """Return the answers that the coordinator waits for from a process, by session."""
    peer = None if process.wire is None else process.wire.peer
    worker = None if peer is None else world.coordinator.registry.workers.get(peer)
    return {} if worker is None else worker.turns.owed


def _swap(world: "World", newcomer: Process, who: int) -> None:
    """Have it take the place of one of its role, if it has registered, or come beside it."""
    if newcomer.worker is not None:
        olds = [
            process.worker.epoch
            for process in world.processes
            if process.role == newcomer.role and process is not newcomer and process.worker
        ]
        world.reader.swap(
            newcomer.worker.epoch, olds[who % len(olds)] if olds and who < 4 else None
        )


def _harm(world: "World", process: Process, fault: Fault, for_ns: int) -> bool:
    there, forms = process.wire is not None, fault.for_ms
    match fault.kind:
        case "kill":
            there = process.alive
            process.restart_ns = for_ns
            process.kill()
        case "stop":
            there = process.alive and not process.stopped
            process.stop(for_ns)
        case "stick":
            there = process.sticks = process.alive
        case "cut":
            if process.wire is not None:
                process.wire.hub_closes()
        case "silence" | "silence up" | "silence down":
            process.silence(
                up=fault.kind != "silence down", down=fault.kind != "silence up", for_ns=for_ns
            )
        case "slow":
            process.slow_down(1 + forms % 200)
            world.time.later(for_ns, lambda: process.slow_down(0))
        case "twice":
            process.again += 1 + forms % 8
        case "asked twice":
            process.asked_again += 1 + forms % 8
        case "late":
            there = process.repeat_late(forms, _owed(world, process) if forms % 2 else None)
        case "babble":
            process.babble(1 + forms % 9)
        case "drop":
            process.drops += 1
        case "refuse":
            there = process.refuses = process.role == "draft"
        case _:
            process.forget()
    return there
