"""Services in control groups of memory, of the first or the second kind, and what they take."""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
LOOK_S = 0.02
ENDS_S = 10.0


class Group:
    """A control group and the most that its processes have taken."""

    def __init__(self, folder: Path, *, first_kind: bool) -> None:
        self._folder, self._first_kind = folder, first_kind
        self.peak = 0
        """Bytes of memory that belong to no file, at their most."""
        self.peaks: dict[str, int] = {}
        """The same of each process, by its name."""

    def prefix(self) -> list[str]:
        """Return the beginning of a command that runs in the group."""
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs; exec "$@"', "sh"]

    def limit(self, size: int) -> None:
        """Set the bytes that the group may take."""
        name = "memory.limit_in_bytes" if self._first_kind else "memory.max"
        (self._folder / name).write_text(str(size), encoding="ascii")

    def look(self) -> None:
        """Note what its processes take now."""
        names = ("total_rss",) if self._first_kind else ("anon", "shmem")
        text = (self._folder / "memory.stat").read_text(encoding="ascii")
        found = dict(re.findall(r"^(\S+) (\d+)$", text, re.MULTILINE))
        self.peak = max(self.peak, sum(int(found[name]) for name in names))
        for process in (self._folder / "cgroup.procs").read_text(encoding="ascii").split():
            try:
                status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
            except OSError:  # it has ended
                continue
            fields = dict(re.findall(r"^(Name|RssAnon):\s+(\S+)", status, re.MULTILINE))
            name, size = fields["Name"], int(fields.get("RssAnon", 0)) * 1024
            self.peaks[name] = max(self.peaks.get(name, 0), size)

    @property
    def kills(self) -> int:
        """Return how many processes the kernel has ended for want of memory."""
        name = "memory.oom_control" if self._first_kind else "memory.events"
        text = (self._folder / name).read_text(encoding="ascii")
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextmanager
def group(size: int) -> Iterator[Group]:
    """Make a control group limited to `size` bytes, and watch it until the block ends."""
    first_kind = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if first_kind else ROOT) / f"dovetail-real-{os.getpid()}"
    folder.mkdir()
    found, over = Group(folder, first_kind=first_kind), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            found.look()

    watching = threading.Thread(target=watch)
    try:
        found.limit(size)
        watching.start()
        yield found
    finally:
        over.set()
        watching.join()
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a group once its processes have ended."""
    ends = time.monotonic() + ENDS_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(LOOK_S)


def words(peaks: dict[str, int]) -> str:
    """Return sizes by process in MB."""
    return ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sorted(peaks.items()))


def table_row(name: str, stated: int, found: Group) -> Sequence[str]:
    """Return a row of the table of what was stated and what was taken."""
    share = f"{found.peak / stated:.2f}"
    return [name, f"{stated / 1e6:.0f}", f"{found.peak / 1e6:.0f}", share, words(found.peaks)]
