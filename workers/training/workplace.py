"""The working folder of a training: OUT.unfinished next to the folder OUT that it will write. Other
files in either are never deleted.

One process at a time holds it, and releases it when it exits. The checkpoint is one file, replaced
by renaming. A finished OUT is written here and moved there as a whole; the folder that it replaces
is kept here until then."""

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

OS_ERROR = re.compile(r"os error (\d+)")  # matches the error number in a message of safetensors
OURS = {"checkpoint.safetensors", "checkpoint.safetensors.new", "result", "replaced"}
TORN = ".tmp"  # prefix of the files that safetensors leaves behind when it is killed


@dataclass(frozen=True)
class Workplace:
    """The working folder of the training that writes the folder `out`."""

    out: Path
    what: str = "model"  # what it writes, such as `eagle head`
    files: frozenset[str] = frozenset()
    """All file names allowed in a finished `out`; one of them is config.json."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """The keys of its config.json by which it is recognised."""

    @property
    def folder(self) -> Path:
        """The folder for unfinished work."""
        return self.out.with_name(self.out.name + ".unfinished")

    @property
    def checkpoint(self) -> Path:
        """The file from which an interrupted run resumes."""
        return self.folder / "checkpoint.safetensors"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Work here exclusively. Raises `UserError` if another process does, or if `out` or this
        folder contains anything that this command did not write."""
        self.refuse_foreign()
        with held(self.folder):
            if strange := [
                name
                for name in _names(self.folder)
                if name not in OURS and not name.startswith(TORN)
            ]:
                raise UserError(
                    f"{self.folder} holds {strange[0]}, which is not from a training: move it "
                    "away, or give another --out"
                )
            if not self.out.exists() and self._replaced.exists():  # killed between two renames
                self._replaced.rename(self.out)
            yield

    @contextmanager
    def result(self) -> Iterator[Path]:
        """Yield a new folder to be filled; afterwards it replaces `out`, and the unfinished work is
        removed."""
        new = self.folder / "result"
        shutil.rmtree(new, ignore_errors=True)
        with writing(new, f"the trained {self.what}"), as_os_errors(new):
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
        """Raise `UserError` if `out` contains anything but an earlier training of this kind: it
        would be replaced."""
        names = _names(self.out) if self.out.exists() else []
        strange = [name for name in names if name not in self.files]
        if names and (strange or not self._is_marked()):
            raise UserError(
                f"{self.out} exists, and is not just a trained {self.what} (it "
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
    """Lock a folder against other writing processes, creating it if necessary; it is removed
    afterwards if empty."""
    with writing(folder, "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not folder.exists() or not os.path.samestat(
            os.fstat(descriptor), folder.stat()
        ):  # its holder has just finished and removed it
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
    """Write a safetensors file and replace the older one only once it is complete."""
    new = file.with_name(file.name + ".new")
    with writing(new, "the state of the training"), as_os_errors(new):
        save_file(dict(tensors), new, metadata=dict(metadata))
    new.replace(file)


@contextmanager
def as_os_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' own exceptions, as for a full disk, into `OSError`."""
    try:
        yield
    except SafetensorError as error:
        code = int(found[1]) if (found := OS_ERROR.search(str(error))) else errno.EIO
        raise OSError(code, os.strerror(code) if found else str(error), str(path)) from None
