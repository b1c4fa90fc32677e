"""Every check and figure that wants a GPU, in one command and under nine minutes unless it is given
more, with no network.

Each step is a process of its own with a limit of time: one that fails or hangs is named, with its
last words, and the others go on. What they found is written as they find it. Steps that time
something run alone, one after the other; those that only check run side by side behind them where
the machine has cores and memory for that.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from dovetail.launch.console.terminal import note, print_table
from dovetail.protocol.errors import DovetailError
from gpu.report import Line, Report

LIMIT_S = 525.0
"""Limit of the whole command unless `--seconds` sets another."""
LIMITS = {
    "facts": 60.0,
    "products": 90.0,
    "levels": 120.0,
    "offload": 300.0,
    "drafts": 240.0,
    "margins": 240.0,
    "tests": 240.0,
}
"""Limit of each step in a command of `LIMIT_S`; the last ones have what is left."""
CHECKS = ("drafts", "margins", "tests")
"""Steps that time nothing."""
CORES_BESIDE, GB_BESIDE = 8, 16
"""The least cores, and GB of the device's memory, with which `CHECKS` run side by side."""
SHM = Path("/dev/shm")
NEEDED_BYTES = 40 << 30
MOST_GB = 1024
PRETENDED = "pretended"
LAST_WORDS = 12
"""Lines of what a failed step said."""
LAST_OF_TESTS = 80
"""Lines that pytest said last."""
MOST_AT_ONCE = 6
"""Processes with tests on one GPU."""
TESTS = Path(__file__).resolve().parent.parent


@dataclass
class Step:
    """The outcome of one step."""

    name: str
    seconds: float
    failure: str = ""
    lines: list[Line] = field(default_factory=list)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--device",
    default="cuda:0",
    show_default=True,
    help="cuda:N; or cpu in place of a GPU, or pretended, the CPU behind the rules of one.",
)
@click.option(
    "--vram", default="8,24", show_default=True, help="Caps of the device's memory in GB."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Sizes at which figures mean nothing, to see that everything runs.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*LIMITS]),
    help="These steps; can be repeated.  [default: all]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for all results, JSON, written after every step.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    default=LIMIT_S,
    show_default=True,
    help="Limit of the whole command, and in proportion of its steps.",
)
@click.option("--step", hidden=True, type=click.Choice([*LIMITS]))
@click.option("--work", hidden=True, type=click.Path(file_okay=False, path_type=Path))
def main(
    device: str,
    vram: str,
    quick: bool,
    only: Sequence[str],
    out: Path | None,
    seconds: float,
    step: str | None,
    work: Path | None,
) -> None:
    """Check and measure what only a GPU can show; one table at the end: wanted, measured, whether
    it holds.

    Exit code 1 if a check fails: tokens that differ beyond a near-tie, a test, memory beyond its
    cap, a step that ends early. A figure that misses what is wanted of it does not fail.
    """
    caps = _caps(vram)
    if step is not None:
        assert work is not None
        try:
            _do(step, Report(work / f"{step}.jsonl", quick), device, caps, work)
        except DovetailError as error:
            raise click.ClickException(str(error)) from error
        return
    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"--out {out}: there is no folder {out.parent}")
    began = time.monotonic()
    done: list[Step] = []
    with _workplace() as place:
        flags = [f"--device={device}", f"--vram={vram}", *(["--quick"] if quick else [])]
        writing = threading.Lock()

        def take(name: str) -> None:
            left = seconds - (time.monotonic() - began)
            limit = min(left, LIMITS[name] * seconds / LIMIT_S)
            note(f"{name}: at most {limit:.0f} s, {left:.0f} s left for all")
            step = _run(name, place, limit, flags)
            note(f"{name}: {step.failure or 'done'}, {step.seconds:.0f} s")
            with writing:
                done.append(step)
                if out is not None:
                    said = json.dumps([asdict(s) for s in done], indent=1)
                    out.write_text(said, encoding="utf-8")

        wanted = [name for name in LIMITS if not only or name in only]
        for name in wanted:
            if name not in CHECKS:
                take(name)
        with ThreadPoolExecutor(len(CHECKS) if _roomy(device) else 1) as pool:
            list(pool.map(take, [name for name in wanted if name in CHECKS]))
    _show(done)
    note(f"{time.monotonic() - began:.0f} s" + (f"; {out} is written" if out is not None else ""))
    failed = any(
        s.failure or any(line.kind == "check" and not line.holds for line in s.lines) for s in done
    )
    raise SystemExit(1 if failed else 0)


def _caps(vram: str) -> list[float]:
    try:
        caps = [float(part) for part in vram.split(",")]
    except ValueError:
        raise click.BadParameter(f"{vram!r} is no list of GB, such as 8,24") from None
    if not all(0 < cap < MOST_GB for cap in caps):
        raise click.BadParameter(f"{vram!r}: a cap lies between 0 and {MOST_GB} GB")
    return caps


@contextmanager
def _workplace() -> Iterator[Path]:
    """A folder for a large model: in memory where there is room for it beside the model itself."""
    stat = os.statvfs(SHM) if SHM.is_dir() else None
    roomy = stat is not None and stat.f_bavail * stat.f_frsize > NEEDED_BYTES
    with tempfile.TemporaryDirectory(prefix="dovetail-gpu-", dir=SHM if roomy else None) as folder:
        yield Path(folder)


def _roomy(device: str) -> bool:
    """Return whether `CHECKS` can run side by side. A device that is not there is for each step to
    name."""
    import torch

    kind, _, number = device.partition(":")
    index = int(number) if number.isdecimal() else 0
    if kind != "cuda" or index >= torch.cuda.device_count():
        return False
    memory = torch.cuda.get_device_properties(index).total_memory
    return len(os.sched_getaffinity(0)) >= CORES_BESIDE and memory >= GB_BESIDE * 1e9


def _run(name: str, place: Path, limit: float, flags: Sequence[str]) -> Step:
    """A step in a process group of its own, which ends with it."""
    start, log = time.monotonic(), place / f"{name}.log"
    command = [sys.executable, str(TESTS / "gpu"), f"--step={name}", f"--work={place}", *flags]
    # what a step caches goes with it, and nothing is asked of a network
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    failure = ""
    with (
        log.open("w", encoding="utf-8") as said,
        subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        ) as process,
    ):
        reader = _Follower(log)
        while process.poll() is None:
            reader.pass_on()
            if time.monotonic() - start > limit:
                failure = f"was ended after {limit:.0f} s: allow more with --seconds"
                break
            time.sleep(0.2)
        _end(process)
        reader.pass_on()
    if not failure and process.returncode:
        failure = f"ended with code {process.returncode}"
    if failure:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
        note("\n".join(f"  {name} | {line}" for line in last))
    return Step(
        name,
        round(time.monotonic() - start, 1),
        failure,
        [*Report(place / f"{name}.jsonl").lines()],
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Whatever of the step still runs."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class _Follower:
    """Passes on what a step says of its progress."""

    def __init__(self, log: Path) -> None:
        self._log, self._at = log, 0

    def pass_on(self) -> None:
        with self._log.open("rb") as said:
            said.seek(self._at)
            text = said.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            note(line)


def _do(step: str, report: Report, device: str, caps: Sequence[float], work: Path) -> None:
    """One step, in this process."""
    from dovetail.workers.devices.opening import open_device

    if step == "margins":
        from gpu import margins

        margins.run(report, device, lambda what: note(f"- {what}"))
        return
    if step == "drafts":
        from gpu import drafts

        drafts.run(report, device, work, lambda what: note(f"- {what}"))
        return
    if step == "tests":
        _tests(report, device)
        return
    opened = open_device(device, len(os.sched_getaffinity(0)))
    if step == "facts":
        from gpu import chip

        size = chip.QUICK_BYTES if report.quick else chip.COPY_BYTES
        for name, fact in chip.describe(opened.torch_device).items():
            report.note(name, fact)
        there, back = chip.link_gb_s(opened.torch_device, size)
        report.note("link, pinned", f"{there:.1f} GB/s to the device, {back:.1f} GB/s back")
        report.note("memory", f"{chip.memory_gb_s(opened.torch_device, size):.0f} GB/s")
    elif step == "products":
        from gpu import products

        products.run(report, opened, lambda what: note(f"- {what}"))
    elif step == "levels":
        from gpu import levels

        levels.run(report, opened, work / "levels", lambda what: note(f"- {what}"))
    elif device == PRETENDED:
        report.note(
            "offload", f"left out: {device} has neither times nor a limit of memory of its own"
        )
    else:
        from gpu import offload

        offload.run(report, opened, caps, work, lambda what: note(f"- {what}"))


def _tests(report: Report, device: str) -> None:
    """Every test that is marked gpu; without one that they can be collected. A test that fails is
    named at once, so that it is known where the step is ended."""
    collected = device in ("cpu", PRETENDED)
    options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    side_by_side = min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // 2)
    if collected:
        options.append("--collect-only")
    elif side_by_side > 1 and importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(side_by_side)]
    if not collected and not device.endswith(":0"):
        report.note("tests", "they are of cuda:0")
    said: list[str] = []
    command = [sys.executable, "-m", "pytest", str(TESTS), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS.parent
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if " FAILED " in line:
                report.note("failed", next(word for word in line.split() if "::" in word))
    report.check(
        "pytest -m gpu" + (", collected" if collected else ""),
        process.returncode == 0,
        said[-1] if said else "no word",
        "all pass",
    )
    if process.returncode:
        note("\n".join(said[-LAST_OF_TESTS:]))


def _show(done: Sequence[Step]) -> None:
    rows = [
        (step.name, line.name, line.measured, line.wanted, _word(line))
        for step in done
        for line in step.lines
    ]
    rows += [
        (step.name, "the step", step.failure, "ends by itself", "NO")
        for step in done
        if step.failure
    ]
    print_table(("step", "what", "measured", "wanted", "holds"), rows)


def _word(line: Line) -> str:
    return (
        ""
        if line.holds is None
        else "yes"
        if line.holds
        else "NO"
        if line.kind == "check"
        else "missed"
    )
