"""A group of processes that may use a part of one CPU, and the commands that must work in it."""

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import click

from real.servers import DIRECT, PATIENCE_S, PROMPT, own_places, served

PERIOD_US = 100_000
ROOT = Path("/sys/fs/cgroup")
STREAMED = 100_000
QUIET_S = 20.0
"""Seconds of the stream before the first swap and behind the last."""


@contextmanager
def group(share: float) -> Iterator[Path]:
    """Yield the file to whose processes, named there, `share` of one CPU is given together."""
    first = ROOT / "cpu" if (ROOT / "cpu" / "cpu.cfs_quota_us").exists() else ROOT
    own = first / f"dovetail-{secrets.token_hex(4)}"
    try:
        own.mkdir()
        quota = str(int(share * PERIOD_US))
        if (own / "cpu.cfs_quota_us").exists():
            (own / "cpu.shares").write_text("262144")  # whatever else runs
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(quota)
        else:
            (own / "cpu.weight").write_text("10000")
            (own / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    except OSError as error:
        raise click.ClickException(f"no control group with a quota can be made: {error}") from None
    try:
        yield own / "cgroup.procs"
    finally:
        while True:
            try:
                own.rmdir()
                break
            except OSError:  # what a command left
                for pid in map(int, (own / "cgroup.procs").read_text().split()):
                    os.kill(pid, 9)
                time.sleep(0.1)


@dataclass
class Stream:
    """A reply that is read in a thread, and when each of its pieces came."""

    url: str
    times: list[float] = field(default_factory=list)
    failure: str = ""

    def start(self, prompt: str) -> None:
        """Ask for a long reply, and read it."""
        body = {"prompt": prompt, "max_tokens": STREAMED, "stream": True, "ignore_eos": True}
        body["temperature"] = 0
        self._request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self.failure:
            self._read_once()

    def _read_once(self) -> None:
        """Read one reply to its end; the next one goes on behind it."""
        try:
            with DIRECT.open(self._request, timeout=PATIENCE_S) as reply:
                for line in reply:
                    if line.startswith(b"data: {"):
                        self.times.append(time.monotonic())
                        if b'"error":' in line:
                            self.failure = line.decode()
        except OSError as error:
            self.failure = str(error)

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Return the seconds from piece to piece within a time."""
        times = [one for one in self.times if begin_s <= one <= end_s]
        return [after - before for before, after in pairwise(times)]


def run(command: Sequence[str], given: Mapping[str, str], procs: Path) -> tuple[float, str]:
    """Run a command in the group; returns its seconds, and why it failed or nothing."""
    began = time.monotonic()
    done = subprocess.run(inside(command, procs), env=given, capture_output=True, text=True)
    said = (done.stderr or done.stdout)[-2000:] if done.returncode else ""
    return time.monotonic() - began, said


def inside(command: Sequence[str], procs: Path) -> list[str]:
    """Return the command that runs this command in a group."""
    return ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--share", default=0.2, show_default=True, help="Of one CPU, for everything.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["generate", "selftest", "profile", "draft", "target"]),
    help="Run these alone.",
)
@click.argument("more", nargs=-1)
def quota(file: Path, share: float, only: tuple[str, ...], more: tuple[str, ...]) -> None:
    """Run commands with FILE, and swap its workers under a stream, on a part of one CPU.

    Prints the seconds of every command, and the pauses of the stream: the median and the longest
    before anything is swapped, the longest while a worker is swapped, and by how much that one is
    longer. MORE are further options of every command, behind `--`. Exit code 1 if anything failed.
    """
    dovetail = [sys.executable, "-P", "-m", "dovetail.launch.cli"]
    model = ["--target", str(file), "--target.context", "8192", *more]
    failures = []
    os.nice(-20)  # the group has priority over everything else, and its streams must be read
    with tempfile.TemporaryDirectory(prefix="dovetail-quota-") as folder, group(share) as procs:
        given = own_places(folder)
        commands = {
            "generate": ["generate", *model, "--max-tokens", "16", PROMPT],
            "selftest": ["selftest", *model, "--draft", "ngram", "--limit", "1"],
            "profile": ["profile", *model, "--draft", "ngram", "--prompt", PROMPT, "--out", folder],
        }
        for name, command in commands.items():
            if only and name not in only:
                continue
            seconds, failure = run([*dovetail, *command], given, procs)
            failures += [failure] if failure else []
            click.echo(f"{name}: {seconds:.1f} s{', failed: ' + failure if failure else ''}")
        if roles := [role for role in ("draft", "target") if not only or role in only]:
            failures += swapped(dovetail, model, roles, given, procs)
    if failures:
        raise click.ClickException(f"{len(failures)} of these failed")


def swapped(
    dovetail: Sequence[str],
    model: Sequence[str],
    roles: Sequence[str],
    given: Mapping[str, str],
    procs: Path,
) -> list[str]:
    """Swap workers of a service under a stream, the draft for the target's own model; returns what
    failed."""
    serve = inside([*dovetail, "serve", *model, "--http.deadline_s", "7200"], procs)
    failures = []
    with served(serve, "--http.port", given, watched=True) as (process, address, ready_s):
        click.echo(f"serve: ready after {ready_s:.1f} s")
        pids = {child.name(): child.pid for child in process.children(recursive=True)}
        stream = Stream(address)
        stream.start(PROMPT)
        time.sleep(QUIET_S)
        usual = stream.gaps(0.0, time.monotonic())[2:]
        click.echo(
            f"stream alone: {1 / statistics.mean(usual):.1f} pieces/s, pauses: "
            f"median {statistics.median(usual):.3f} s, longest {max(usual):.3f} s"
        )
        draft = ["--draft", model[1], "--draft.kind", "small"]
        for role in roles:
            began = time.monotonic()
            swap = [*dovetail, "swap", "--role", role, *(draft if role == "draft" else ())]
            seconds, failure = run(swap, given, procs)
            pauses = stream.gaps(began, time.monotonic()) or [0.0]
            longest = sorted(zip(pauses, accumulate(pauses), strict=True), reverse=True)[:3]
            failures += [failure] if failure else []
            click.echo(
                f"swap of the {role}: {seconds:.1f} s{', failed: ' + failure if failure else ''}; "
                f"pauses: median {statistics.median(pauses):.3f} s, longest "
                + ", ".join(f"{pause:.3f} s (until {end:.1f} s)" for pause, end in longest)
                + f"; the longest by {max(pauses) - max(usual):+.3f} s"
            )
        time.sleep(QUIET_S)
        after = {child.name(): child.pid for child in process.children(recursive=True)}
        kept = ("dovetail:coordi", "dovetail:http")
        lost = [name for name in kept if pids.get(name) != after.get(name)]
        failures += [f"the stream ended: {stream.failure}"] if stream.failure else []
        failures += [f"restarted: {', '.join(lost)}"] if lost else []
        click.echo("; ".join(failures[-2:]) if stream.failure or lost else "nothing was killed")
    return failures
