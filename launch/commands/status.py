"""`dovetail status`: the coordinator, its workers, its sessions, and the results of drafts and
targets."""

import json
from collections.abc import Sequence

import click

from dovetail.launch.console.help import HelpCommand, connect_option, json_option
from dovetail.launch.console.terminal import counted, format_cell, in_print, print_table
from dovetail.launch.files.directory import announcements
from dovetail.launch.processes.connection import find_coordinator, shorten_model, slow_kernels
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.calibration import RowsSeconds
from dovetail.protocol.messages import JournalState, PairState, ProcessState, Reported, WorkerState

WORKER = ("worker", "roles", "model", "weights", "busy so far", "sessions", "RSS MB", "pid")
LINK = ("worker", "host", "device", "kernels", "trip us", "clock us", "bytes/round")
PROCESS = ("process", "host", "CPU s", "RSS MB", "pid")
SHOWN_DECISIONS = 8  # the number of latest decisions shown; `--json` has all


@click.command(cls=HelpCommand)
@connect_option()
@json_option()
@settings_flags("coordinator.keys", "coordinator.answer_s", shown=("coordinator.keys",))
def command(configuration: Configuration, connect: str | None, as_json: bool) -> None:
    """Show the state of a coordinator.

    "busy so far" is the share of the time since it registered that a worker was busy; `dovetail
    top` shows the current share. "RSS" is resident memory; pages that processes share count in each
    of them. "trip" is the fastest recent round trip.
    """
    with find_coordinator(configuration, connect) as client:
        state = client.status()
    if as_json:
        click.echo(json.dumps(state.model_dump(exclude={"type", "epoch"})))
    else:
        _show(Reported.model_validate(in_print(state.model_dump())))


def _show(state: Reported) -> None:
    totals = state.totals
    ended = f"{state.failed} failed, {state.cancelled} cancelled, {totals.refused_requests} refused"
    dropped = f"messages dropped: {state.stale} stale, {state.refused} refused"
    click.echo(f"coordinator {state.address} (pid {state.pid}), up {state.uptime_s:.0f} s")
    click.echo(f"sessions    {state.sessions} running, {state.finished} finished, {ended}")
    click.echo(f"finished    {state.rounds} rounds, tau {format_cell(state.tau)}; {dropped}")
    if totals.moves:
        faster = f"{totals.rebalanced} of them to a faster one"
        click.echo(f"moves       {totals.moves} to another target, {faster}")
    if url := next((found.url for found in announcements() if found.address == state.address), ""):
        click.echo(f"http        {url}")
    if state.journal is not None and not state.journal.failed:
        click.echo(f"journal     {_journal(state.journal)}")
    served = any("target" in w.roles and not w.standby for w in state.workers)
    label = "note" if not state.degraded else "degraded" if served else "not ready"
    for reason in state.reasons:
        click.echo(f"{label:<12}{reason}")
    for warning in slow_kernels(state):
        click.echo(f"warning     {warning}")
    if queue := totals.queue_words:
        click.echo(f"note        {queue}")
    if state.workers:
        print_table(WORKER, [_row(worker) for worker in state.workers])
        print_table(LINK, [_link(worker) for worker in state.workers])
    if state.processes:
        print_table(PROCESS, [_process(process) for process in state.processes])
    for name in ("binding", "placement", "fingerprint"):
        for worker in state.workers:
            if told := getattr(worker, name) or ("not reported" if name == "binding" else ""):
                click.echo(f"{name} of {worker.name}: {told}")
    for worker in state.workers:
        if "draft" in worker.roles and not worker.grammars:
            what = "constrained replies are correct, but fewer of its tokens are accepted"
            click.echo(f"note        {worker.name} does not mask tokens: {what}")
    _show_pairs(state.pairs)
    if state.decisions:
        click.echo("last decisions")
    for decision in state.decisions[-SHOWN_DECISIONS:]:
        click.echo(f"  {decision}")


def _journal(journal: JournalState) -> str:
    kept = f"{counted(journal.replies, 'reply', 'replies')}, {journal.bytes / 1e6:.1f} MB"
    if journal.write_us is not None:
        kept += f", a write takes {journal.write_us:.0f} us"
    if journal.sync_ms is not None:
        kept += f", the disk takes {journal.sync_ms:.1f} ms"
    return f"{journal.folder}: {kept}"


def _show_pairs(pairs: Sequence[PairState]) -> None:
    if not pairs:
        return
    rates = ("tokens/s", "alone", "predicted")
    headings = ("draft", "target", "drafting", "rounds", "hit", "gamma", *rates)
    print_table(headings, [_pair(pair) for pair in pairs])
    for pair in pairs:
        both = f"{pair.draft} and {pair.target}"
        if pair.hops_us is not None:
            click.echo(f"messages of a round of {both}: {pair.hops_us:.0f} us")
        for name, curve in (("T_V", pair.t_v), ("t_D", pair.t_d)):
            if curve is not None:
                click.echo(f"{name} of {both}, ms by rows: {_curve(curve)}")


def _pair(pair: PairState) -> tuple[object, ...]:
    hits = None if pair.hit_rate is None else f"{pair.hit_rate:.0%}"
    rates = (pair.tokens_per_s, pair.alone_tokens_per_s, pair.predicted_tokens_per_s)
    drafting = "on" if pair.speculating else "off"
    return (pair.draft, pair.target, drafting, pair.rounds, hits, pair.gamma, *rates)


def _curve(curve: RowsSeconds) -> str:
    points = zip(curve.rows, curve.seconds, strict=True)
    return ", ".join(f"{rows}: {1e3 * seconds:.3g}" for rows, seconds in points)


def _row(worker: WorkerState) -> tuple[object, ...]:
    load = (f"{worker.busy_share:.0%}", worker.sessions, round(worker.rss_mb))
    model = (shorten_model(worker.model), worker.weights or None)
    return (worker.name + _standing(worker), "+".join(worker.roles), *model, *load, worker.pid)


def _link(worker: WorkerState) -> tuple[object, ...]:
    """The fastest recent round trip; under load it includes computation before the answer."""
    device = f"{worker.device}, {counted(worker.threads, 'thread')}"
    kernels = worker.kernels.partition(":")[0] or None
    link = (_whole(worker.round_trip_us), _clock(worker), _whole(worker.bytes_per_round))
    return (worker.name, worker.host, device, kernels, *link)


def _process(process: ProcessState) -> tuple[object, ...]:
    cpu_s = None if process.cpu_s is None else round(process.cpu_s, 1)
    return (process.name, process.host, cpu_s, _whole(process.rss_mb), process.pid)


def _whole(figure: float | None) -> int | None:
    return None if figure is None else round(figure)


def _clock(worker: WorkerState) -> str:
    if worker.clock_offset_us is None or worker.clock_bound_us is None:
        return "-"
    return f"{worker.clock_offset_us:+.0f} ± {worker.clock_bound_us:.0f}"


def _standing(worker: WorkerState) -> str:
    said = [word for word in ("standby", "leaving", "stuck") if getattr(worker, word)]
    return f" ({', '.join(said)})" if said else ""
