"""The soak: real processes, concurrent streams, and faults at random for as long as it is told; at
the end nothing may be missing, different or left behind.

A coordinator over tcp with keys, targets and drafts of the embedded pair, each behind a proxy of
its own; whoever ends is started again. The texts of an undisturbed run are the oracle.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import psutil

from dovetail.launch.console.terminal import counted, note, print_table, progress_bar
from dovetail.protocol.errors import DovetailError, LinkClosed
from dovetail.protocol.settings import Sampling
from soak import sabotage
from soak.baseline import Compared, Held, compare, held
from soak.faults import KINDS, Faults, Happened, Kind
from soak.streams import Case, Streams
from support.fleets import Fleet
from support.inflated import as_flags, models_at
from support.stacks import PROMPTS

TEMPERATURES = (0.0, 1.0)
SILENT_S = 90.0
"""A request of which nothing comes for so long has been forgotten: three times what it waits for a
target."""
BACK_S = 90.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--faults", "count", type=click.IntRange(min=1), default=500, show_default=True, help="So many."
)
@click.option(
    "--streams",
    "together",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Requests that run at once, half of them sampled.",
)
@click.option(
    "--targets",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Target workers: one should be left of them at any time.",
)
@click.option(
    "--drafts", type=click.IntRange(min=0), default=1, show_default=True, help="Draft workers."
)
@click.option(
    "--draft",
    "kind",
    default="small",
    show_default=True,
    help="Kind of draft: small, dovetail, eagle or ngram.",
)
@click.option(
    "--inflate",
    default="32MiB",
    show_default=True,
    help="Size to which targets are inflated, so that replies take their time.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Tokens of a reply.",
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    help="Seconds between two faults, on average.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    default=KINDS,
    help="Kind of faults; can be repeated.  [default: all]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the faults.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the result and every fault, JSON.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables."
)
def main(
    count: int,
    together: int,
    targets: int,
    drafts: int,
    kind: str,
    inflate: str,
    max_tokens: int,
    every_s: float,
    kinds: Sequence[Kind],
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Decode streams while processes are killed and stopped and connections fail, and compare every
    text with the undisturbed one.

    Exit code 1 if a text differs, a request fails, but for one for each fault of the coordinator's,
    or something is left behind.
    """
    models = as_flags(models_at(inflate, kind))
    with Fleet(script=sabotage.COORDINATOR) as fleet, fleet.client() as client:
        for number in range(targets):
            fleet.add(
                f"target-{number + 1}",
                "target",
                *models,
                proxied=True,
                seed=seed + number,
                script=sabotage.WORKER,
            )
        for number in range(drafts):
            fleet.add(
                f"draft-{number + 1}",
                "draft",
                *models,
                "--draft.device=cpu",
                proxied=True,
                seed=seed + targets + number,
                script=sabotage.WORKER,
            )
        fleet.wait_until_ready(client)
        streams = Streams(client, cases(max_tokens), together)
        with progress_bar(len(streams.cases), "undisturbed texts") as step:
            for _ in streams.learn():
                step("")
        streams.run(
            0.5 * every_s, cycle(streams.cases)
        )  # so that what is held at first is what is held at work
        streams.run(SILENT_S, None)
        before = held(fleet, fleet.wait_until_ready(client))
        soak = Soak(
            fleet, streams, Faults(list(fleet.members.values()), fleet.coordinator, kinds, seed)
        )
        began = time.monotonic()
        with progress_bar(count, "faults") as step:
            for _ in range(count):
                step(soak.strike(every_s))
        after, back_s = soak.settle()
        found = Found.of(soak, compare(before, after), time.monotonic() - began, back_s)
    if out is not None:
        out.write_text(
            json.dumps(
                {**found.as_json(), "happened": [asdict(fault) for fault in found.happened]}
            ),
            encoding="utf-8",
        )
        note(f"{out} is written")
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        found.show()
    raise SystemExit(0 if found.clean else 1)


def cases(max_tokens: int) -> list[Case]:
    """The shipped prompts, each greedily and sampled."""
    samplings = [
        Sampling(temperature=temperature, min_tokens=max_tokens // 2)
        for temperature in TEMPERATURES
    ]
    return [
        Case(tuple(turns), sampling, max_tokens, seed)
        for seed, turns in enumerate(PROMPTS)
        for sampling in samplings
    ]


class Soak:
    """Streams, faults, and who looks after the processes."""

    def __init__(self, fleet: Fleet, streams: Streams, faults: Faults) -> None:
        self.fleet, self.streams, self.faults = fleet, streams, faults
        self.restarts = 0
        self.coordinator_mb: list[float] = []  # the coordinator's memory after each fault
        self._process = psutil.Process(fleet.coordinator.pid)
        self._cases = cycle(streams.cases)

    def strike(self, every_s: float) -> str:
        """The next fault, and the time after it."""
        happened = self.faults.strike()
        end = time.monotonic() + every_s * 2.0 * self.faults.chance.random()
        while time.monotonic() < end:
            self._look_after(self._cases)
        self.coordinator_mb.append(round(self._process.memory_info().rss / 1e6, 1))
        return f"{happened.kind} {happened.who}"

    def settle(self) -> tuple[dict[str, Held], float]:
        """Wait until all is over; return what everybody holds then, and how many seconds after the
        last fault everybody was back."""
        self.faults.end_due(all_of_them=True)
        began = time.monotonic()
        while self.streams.running:
            self._look_after(None)
        state = self.fleet.wait_until_ready(self.streams.client, within_s=BACK_S)
        back_s = time.monotonic() - began
        self.streams.run(1.0, self._cases)  # those who came back serve
        while self.streams.running:
            self._look_after(None)
        state = self.fleet.wait_until(
            self.streams.client,
            lambda state: self.fleet.ready(state) and not state.sessions,
            "sessions are left",
        )
        return held(self.fleet, state), back_s

    def _look_after(self, cases: "cycle[Case] | None") -> None:
        try:
            self.streams.run(0.02, cases)
        except LinkClosed as lost:
            raise DovetailError(f"{lost}\n{self.fleet.tale()}") from None
        self.faults.end_due()
        self.restarts += len(self.fleet.tend())
        silent_s = self.streams.silent_s
        assert silent_s < SILENT_S, (
            f"nothing came of a request for {silent_s:.0f} s\n{self.fleet.tale()}"
        )


@dataclass(frozen=True)
class Found:
    """The outcome of a soak."""

    happened: Sequence[Happened]
    equal: int
    different: Sequence[str]
    failed: Sequence[str]
    contained: int
    """Requests that ended with a fault of the coordinator's that was meant to be, each with nobody
    else."""
    tokens: int
    moves: int
    alone: int
    restarts: int
    seconds: float
    back_s: float
    longest_pause_s: float
    processes: Sequence[Compared]
    coordinator_mb: Sequence[float]

    @classmethod
    def of(
        cls, soak: Soak, processes: Sequence[Compared], seconds: float, back_s: float
    ) -> "Found":
        streams, meant = soak.streams, f"internal: .*{sabotage.NAME}"
        return cls(
            happened=soak.faults.happened,
            equal=streams.equal,
            different=[wrong.what for wrong in streams.wrong],
            failed=[wrong.what for wrong in streams.failed if not re.match(meant, wrong.what)],
            contained=sum(bool(re.match(meant, wrong.what)) for wrong in streams.failed),
            tokens=streams.tokens,
            moves=streams.moves,
            alone=streams.alone,
            restarts=soak.restarts,
            seconds=seconds,
            back_s=back_s,
            longest_pause_s=streams.longest_pause_s,
            processes=processes,
            coordinator_mb=soak.coordinator_mb,
        )

    @property
    def clean(self) -> bool:
        as_meant = self.contained <= self.counts["fault"]
        return (
            as_meant
            and not self.different
            and not self.failed
            and all(process.clean for process in self.processes)
        )

    @property
    def counts(self) -> dict[str, int]:
        return {kind: sum(fault.kind == kind for fault in self.happened) for kind in KINDS}

    def as_json(self) -> dict[str, Any]:
        plain = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("happened", "processes")
        }
        return {
            **plain,
            "faults": self.counts,
            "processes": [process.as_json() for process in self.processes],
            "clean": self.clean,
        }

    def show(self) -> None:
        print_table(("fault", "times"), [*self.counts.items()])
        rows = [
            (
                process.name,
                *(
                    f"{getattr(process.before, name):.4g} -> {getattr(process.after, name):.4g}"
                    for name in Held.__dataclass_fields__
                ),
                process.clean,
            )
            for process in self.processes
        ]
        print_table(("process", "RSS, MB", "files", "threads", "sessions", "as before"), rows)
        replies = (
            f"{counted(self.equal, 'text')} of {self.tokens} tokens equal the "
            f"undisturbed ones, {len(self.different)} differ, {len(self.failed)} failed"
        )
        click.echo(f"{counted(len(self.happened), 'fault')} in {self.seconds:.0f} s: {replies}")
        moved, alone = counted(self.moves, "time"), counted(self.alone, "reply", "replies")
        click.echo(
            f"{counted(self.contained, 'request')} ended with a fault of the coordinator's "
            "that was meant to be; ",
            nl=False,
        )
        click.echo(
            f"sessions moved {moved}, {alone} went without a draft, {self.restarts} restarts",
            nl=False,
        )
        click.echo(
            f"; longest pause of a stream {self.longest_pause_s:.2f} s, all back "
            f"{self.back_s:.1f} s after the last fault"
        )
        for what in (*self.different, *self.failed):
            click.echo(f"  {what}")
