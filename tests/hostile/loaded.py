"""Bad model folders, each given to the worker that is to load it, and what it got."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from dovetail.launch.processes.supervise import Supervisor
from hostile.checkpoints import MARKER, Bad, damaged, good_folders
from hostile.started import Ended, Starter, starting

USER_ERROR = 2
MOST_S = 5.0
MOST_MIB = 512
"""The memory beyond what an empty worker has; a tokenizer of the largest size is read several times
over."""


@dataclass(frozen=True)
class Tried:
    """The outcome of a bad input."""

    kind: str
    name: str
    got: str
    """The answer in one line."""
    seconds: float
    """Processor time, which a busy machine hardly lengthens, without the imports."""
    grown_mib: float
    passed: bool


class Loader:
    """Gives folders to workers of a coordinator that runs."""

    def __init__(self, folder: Path, starter: Starter, address: str) -> None:
        self._folder, self._starter, self._address = folder, starter, address
        self._good = good_folders(folder / "good")

    def refused(self, kind: str, bad: Bad) -> Tried:
        """Passed: refused in one line that names what is wrong, soon, in little memory, and nothing
        was executed."""
        ended = self._load(bad)
        named = bool(ended.complaint) and all(word in ended.complaint for word in bad.words)
        return self._tried(
            kind,
            bad,
            ended,
            ended.complaint or ended.said[-500:],
            ended.code == USER_ERROR and named,
        )

    def ignored(self, kind: str, bad: Bad) -> Tried:
        """Passed: the model is served as if what is bad were not there, and nothing was
        executed."""
        ended = self._load(bad)
        return self._tried(
            kind, bad, ended, "is served" if ended.serves else ended.said[-500:], ended.serves
        )

    def _load(self, bad: Bad) -> Ended:
        rmtree(self._case, ignore_errors=True)
        self._case.mkdir()
        model = damaged(bad, self._good, self._case)
        target = [f"--target.model={self._good['target']}"] if bad.role == "draft" else []
        where = [
            f"--connect={self._address}",
            f"--{bad.role}.device=cpu",
            f"--{bad.role}.model={model}",
        ]
        return self._starter.run("worker", f"--role={bad.role}", *where, *target, *bad.flags)

    @property
    def _case(self) -> Path:
        return self._folder / "case"

    def _tried(self, kind: str, bad: Bad, ended: Ended, got: str, so_far: bool) -> Tried:
        executed = any(self._folder.rglob(MARKER))
        got = " ".join(got.replace(f"{self._case}/", "").removeprefix("dovetail: ").split())
        if executed:
            got = f"EXECUTED; {got}"
            rmtree(self._case)
        passed = so_far and not executed and ended.cpu_s < MOST_S and ended.grown_mib < MOST_MIB
        return Tried(kind, bad.name, got, ended.cpu_s, ended.grown_mib, passed)


@contextmanager
def loading() -> Iterator[Loader]:
    """A loader, its coordinator and its folder, until the end of the block."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-hostile-")))
        supervisor = opened.enter_context(Supervisor())
        child = supervisor.start("coordinator", ["coordinator", "--listen=ipc"], reads=True)
        address = supervisor.await_address(child)
        yield Loader(folder, opened.enter_context(starting()), address)
