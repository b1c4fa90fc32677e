"""The working folder of a training: the folder OUT.unfinished next to the folder OUT that it will
write. Other files in either are never deleted.

It is held by one process at a time, and set free when that one dies. The checkpoint is one file and
is replaced by renaming; a finished OUT is filled in here and moved there whole, and what it
replaces is kept here until then. Knows files and their names, not what is in them.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import writing

OS_ERROR = re.compile(r"os error (\d+)")
"""Matches the error number in a message of safetensors."""
OURS = {"checkpoint.safetensors", "checkpoint.safetensors.new", "result", "replaced"}
TORN = ".tmp"
"""Prefix of the files that safetensors leaves behind when it is killed."""


@dataclass(frozen=True)
class Workplace:
    """The working folder of the training that writes the folder `out`."""

    out: Path
    what: str = "model"
    """The thing that it writes, such as `eagle head`."""
    files: frozenset[str] = frozenset()
    """Every name that there may be in a finished `out`; one of them is config.json."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """The keys of its config.json by which it is known."""

    @property
    def folder(self) -> Path:
        """The folder of everything that is not finished."""
        return self.out.with_name(self.out.name + ".unfinished")

    @property
    def checkpoint(self) -> Path:
        """The file that an interrupted run goes on from."""
        return self.folder / "checkpoint.safetensors"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Work here alone. `UserError` if another process does, or if in the way of `out` or of
        this folder is what no such training wrote."""
        self.refuse_foreign()
        with held(self.folder):
            if strange := [
                name
                for name in _names(self.folder)
                if name not in OURS and not name.startswith(TORN)
            ]:
                raise UserError(
                    f"{self.folder} holds {strange[0]}, which no training wrote there: move it "
                    "away, or give another --out"
                )
            if not self.out.exists() and self._replaced.exists():  # killed between two renames
                self._replaced.rename(self.out)
            yield

    @contextmanager
    def result(self) -> Iterator[Path]:
        """A new folder to be filled in; then it takes the place of `out`, and nothing is unfinished
        any more."""
        new = self.folder / "result"
        shutil.rmtree(new, ignore_errors=True)
        with writing(new, f"the trained {self.what}"), telling_the_system(new):
            new.mkdir()
            yield new
        for file in new.iterdir():
            file.chmod(0o644)
        self.refuse_foreign()
        if self.out.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.out.rename(self._replaced)
        new.rename(self.out)
        shutil.rmtree(self.folder)

    def refuse_foreign(self) -> None:
        """`UserError` if `out` has any content but that of an earlier training of this kind: it
        would be replaced."""
        names = _names(self.out) if self.out.exists() else []
        strange = [name for name in names if name not in self.files]
        if names and (strange or not self._is_marked()):
            raise UserError(
                f"{self.out} is there, and is more or other than a trained {self.what} (it "
                f"holds {(strange or names)[0]}): give another --out"
            )

    @property
    def _replaced(self) -> Path:
        return self.folder / "replaced"

    def _is_marked(self) -> bool:
        try:
            config = json.loads((self.out / "config.json").read_bytes())
            return all(config[name] == value for name, value in self.marks.items())
        except (OSError, ValueError, KeyError, TypeError):
            return False


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes that write it, making it if need be; it is left only if
    there is something in it."""
    with writing(folder, "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(
            os.fstat(descriptor), folder.stat()
        ):  # its holder finished just now, and removed it
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another process is writing {folder}: wait for it, or give another --out"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, or finished and gone
            folder.rmdir()
        os.close(descriptor)


def replace_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file in place of an older one, which is there until the new one is
    whole."""
    beside = file.with_name(file.name + ".new")
    with writing(beside, "the state of the training"), telling_the_system(beside):
        save_file(dict(tensors), beside, metadata=dict(metadata))
    beside.replace(file)


@contextmanager
def telling_the_system(path: Path) -> Iterator[None]:
    """A full disk is an `OSError` even where safetensors writes, which has its own exception for
    it."""
    try:
        yield
    except SafetensorError as error:
        code = int(found[1]) if (found := OS_ERROR.search(str(error))) else errno.EIO
        raise OSError(code, os.strerror(code) if found else str(error), str(path)) from None
