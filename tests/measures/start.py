"""Measures how long a command of the embedded pair takes to start, and to end.

    python tests/measures/start.py [--runs N] [--before FOLDER]

In seconds, medians and ranges over the runs: `word` from the start of `dovetail generate` to the
first word on its stdout, `end` from the end of its text to the end of the command, `cpu` what all
its processes computed together; `serve` from the start of `dovetail serve` to the line that says
where it is, `cpu` again up to its end. All of it is warm: the first run of each is not counted.
`--before` names another checkout, whose runs alternate with those of this one. It uses caches of
its own. Times are of this machine at this hour: nothing else should run on it, and where something
does, `cpu` says more.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATE = (
    *("generate", "--max-tokens", "1", "--temperature", "0", "--draft.device", "cpu"),
    "Could you tell me a story about a young hedgehog who lost his red balloon?",
)
SERVE = ("serve", "--http.port", "0", "--draft.device", "cpu")
WHAT = ("word", "end", "cpu", "serve", "cpu")


def environment(root: Path, own: Path) -> dict[str, str]:
    """Return an environment in which `dovetail` is the checkout `root`, with caches of its own."""
    place = own / str(abs(hash(root)))
    (place / "runtime").mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (place / "dovetail").exists():
        (place / "dovetail").symlink_to(root, target_is_directory=True)
    return {
        **os.environ,
        "PYTHONPATH": str(place),
        "XDG_CACHE_HOME": str(place / "cache"),
        "XDG_RUNTIME_DIR": str(place / "runtime"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def begin(given: dict[str, str], arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a command of ours."""
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli", *arguments]
    return subprocess.Popen(
        command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )


def ended(process: subprocess.Popen[bytes]) -> float:
    """Wait for a command, and return the seconds that its processes have computed."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def check(process: subprocess.Popen[bytes], said: bytes) -> None:
    """End this command where one of ours failed."""
    if process.returncode not in (0, 128 + signal.SIGTERM) or not said:
        assert process.stderr is not None
        sys.exit(f"exit code {process.returncode}: {process.stderr.read().decode()[-2000:]}")


def generated(given: dict[str, str]) -> tuple[float, float, float]:
    """Return the seconds to the first word, from the end of the text to the end, and computed."""
    began = time.monotonic()
    process = begin(given, GENERATE)
    assert process.stdout is not None
    said = process.stdout.read(1)
    first = last = time.monotonic()
    while not said.endswith(b"\n") and (more := process.stdout.read(1)):
        said, last = said + more, time.monotonic()
    cpu = ended(process)
    end = time.monotonic()
    check(process, said)
    return first - began, end - last, cpu


def served(given: dict[str, str]) -> tuple[float, float]:
    """Return the seconds until a server says that it is ready, and computed until its end."""
    began = time.monotonic()
    process = begin(given, SERVE)
    assert process.stdout is not None
    said = process.stdout.readline()
    ready = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    cpu = ended(process)
    check(process, said)
    return ready - began, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    options = parser.parse_args()
    trees = {"here": ROOT}
    if options.before is not None:
        trees = {"before": options.before.resolve(), **trees}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="dovetail-start-") as own:
        for _ in range(options.runs + 1):
            for name, root in trees.items():
                given = environment(root, Path(own))
                found[name].append((*generated(given), *served(given)))
    sys.stdout.write(f"{'s':8}" + "".join(f"{what:>24}" for what in WHAT) + "\n")
    for name, runs in found.items():
        cells = [
            f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
            for times in zip(*runs[1:], strict=True)
        ]
        sys.stdout.write(f"{name:8}" + "".join(f"{cell:>24}" for cell in cells) + "\n")


if __name__ == "__main__":
    main()
