"""Runs every test marked slow, one file after the other, and records what passed on which tree.

    python tests/slow [FILE ...] [--jobs N] [--limit SECONDS] [--since COMMIT]

Each file is a pytest process with a time limit. record.toml has the last result of each: commit,
day, counts, seconds. An interrupted run continues where it stopped: what has passed on this commit,
or with --since on COMMIT or later, is not run again. GPU tests and tests/qemu are run by hand.
"""

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).parent / "record.toml"
HEAD = (
    "# The last run of each file of slow tests, by python tests/slow: commit, day, counts, seconds."
)
COUNTS = ("passed", "failed", "skipped")


def git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def marked() -> list[str]:
    """The files with slow tests, by their text: pytest needs half a minute to collect them."""
    found = sorted(ROOT.glob("tests/**/test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in found
        if re.search(r"mark\.slow|\beveryday\(", file.read_text())
    ]


def ancestor(commit: str, descendant: str) -> bool:
    command = ("git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, descendant)
    return subprocess.run(command, capture_output=True).returncode == 0


def write(record: dict[str, Any]) -> None:
    """Put the record in its place in one step."""
    lines = [HEAD]
    for file, result in sorted(record.items()):
        values = ", ".join(
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
            for key, value in result.items()
        )
        lines.append(f'"{file}" = {{ {values} }}')
    made = RECORD.with_suffix(".new")
    made.write_text("\n".join(lines) + "\n")
    made.replace(RECORD)


def run(file: str, limit: float) -> tuple[dict[str, Any], str]:
    """Return the counts and seconds of a file's slow tests, and pytest's output. A file that is cut
    off at its limit has one more failure, that of the test which ran then."""
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-m", "slow and not gpu", file),
        *(f"--timeout={limit}", "-o", f"faulthandler_timeout={limit + 60}"),
    )
    began = time.monotonic()
    pytest = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = pytest.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        output = pytest.communicate()[0] + f"\n{file}: cut off after {limit:g} s\n"
    last = next((line for line in reversed(output.splitlines()) if " in " in line), "")
    found = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last)}
    result: dict[str, Any] = {word: found.get(word, 0) for word in COUNTS}
    result["failed"] += found.get("error", 0) + found.get("errors", 0)
    if pytest.returncode not in (0, 5):  # 5: no test of this file is slow
        result["failed"] = max(1, result["failed"])
    return {**result, "seconds": round(time.monotonic() - began)}, output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="these alone, whatever is recorded"
    )
    parser.add_argument("--jobs", type=int, default=2, help="files at a time (default: 2)")
    parser.add_argument(
        "--limit", type=float, default=4 * 3600, help="seconds for a file (default: four hours)"
    )
    parser.add_argument("--since", metavar="COMMIT", help="what passed on it or later stays passed")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    record = tomllib.loads(RECORD.read_text()) if RECORD.exists() else {}
    commit = git("rev-parse", "--short=8", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD}"):
        commit += " and changes"
    since = options.since or commit
    files = options.files or [
        file
        for file in marked()
        if file not in record
        or record[file]["failed"]
        or not (record[file]["commit"] == commit or ancestor(since, record[file]["commit"]))
    ]
    record = {file: result for file, result in record.items() if (ROOT / file).exists()}
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        begun = {pool.submit(run, file, options.limit): file for file in files}
        for done in as_completed(begun):
            file, (result, output) = begun[done], done.result()
            record[file] = {"commit": commit, "date": datetime.date.today(), **result}
            write(record)
            counts = ", ".join(f"{result[word]} {word}" for word in COUNTS if result[word])
            print(f"{file}: {counts or 'no slow tests'} in {result['seconds']} s", flush=True)
            if result["failed"]:
                failed.append(file)
                print(output, flush=True)
    print(f"{len(files)} files, {len(failed)} with failures", *failed, sep="\n  ")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
