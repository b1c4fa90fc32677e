"""Writing files and reading text for a user: errors name the file and a remedy. Also the user's
cache folder and its limits."""

import codecs
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dovetail.protocol.errors import OutputError, UserError

ELSEWHERE = "choose another place"
REMEDIES = {
    errno.ENOSPC: f"free some space there, or {ELSEWHERE}",
    errno.EDQUOT: f"free some of your quota there, or {ELSEWHERE}",
    errno.EFBIG: f"raise the limit of a file's size (ulimit -f), or {ELSEWHERE}",
    errno.EACCES: f"let your user write there, or {ELSEWHERE}",
    errno.EPERM: f"let your user write there, or {ELSEWHERE}",
    errno.EROFS: f"that disk is read-only: {ELSEWHERE}",
    errno.EISDIR: "that is a folder: name a file",
    errno.ENOTDIR: "a part of that path is a file: name a folder before the last /",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "make its folder first",
    errno.EIO: f"the disk fails: {ELSEWHERE}",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOSYS: "this kernel lacks that call, or a container's filter hides it",
}
OF_WRITING = (errno.EACCES, errno.EPERM, errno.ENOENT)
NO_TEMPORARY, USUAL = "No usable temporary directory", ("/tmp", "/var/tmp")
"""Part of the error of `tempfile` if it finds no folder, and two folders that it tries."""
MOST_READ = 16 << 20  # largest size in bytes of a hand-written file
MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""Byte order marks; that of UTF-32 begins with one of UTF-16."""


def refusal(error: OSError, *, writes: bool = True) -> str:
    """Return the system's text for an error, with a remedy if one is known."""
    said, path = error.strerror or str(error), Path(str(error.filename or ""))
    remedy = REMEDIES.get(error.errno or 0)
    absent = error.errno == errno.ENOENT and path.parent.exists()
    if absent or (error.errno in OF_WRITING and not (writes and error.filename)):
        remedy = None
    if path.is_relative_to("/proc") and not Path("/proc/self").exists():
        remedy = "mount /proc"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or os.devnull, "dovetail")
    places = {"XDG_CACHE_HOME": cache_folder(), "XDG_RUNTIME_DIR": runtime}
    wrong = [name for name, place in places.items() if path.is_relative_to(place)]
    if said.startswith(NO_TEMPORARY) and not any(os.access(p, os.W_OK) for p in USUAL):
        remedy = "set TMPDIR to a folder that your user can write to"
    elif wrong and error.errno in (errno.EACCES, errno.EROFS):
        remedy = f"set {wrong[0]} to a folder that your user can write to"
    return f"{said}; {remedy}" if remedy else said


def unread(error: OSError, absent: str) -> str:
    """Return why a file cannot be read, with a remedy; `absent`: the remedy if it is missing."""
    remedy = {errno.ENOENT: absent, errno.EACCES: "let your user read it"}.get(error.errno or 0)
    return f"{error.strerror}; {remedy}" if remedy else refusal(error, writes=False)


def cache_folder() -> Path:
    """Return the cache folder: dovetail in $XDG_CACHE_HOME, else in ~/.cache; it may not exist yet.
    For a user without a home it begins with "~" and cannot be created."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - it keeps "~" without a home
    return base / "dovetail"


ABOUT_PROMPTS = "model.txt"  # names the model of a folder of cached prompts


def prompts_folder() -> Path:
    """Return the folder of the prompts cached on disk, which may not exist yet."""
    return cache_folder() / "prompts"


def check_home(folder: Path) -> None:
    """Raise `OSError` for the cache folder of a user without a home."""
    if not folder.is_absolute():
        text = "this user has no home, and XDG_CACHE_HOME names no folder"
        raise FileNotFoundError(errno.ENOENT, text)


def write_kept(path: Path, content: bytes, most: int) -> None:
    """Write a cache file atomically and keep the `most` newest of its folder. Raises `OSError`."""
    check_home(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        made.write_bytes(content)
        made.replace(path)
    tidy(path.parent, most)


def keep_sealed(path: Path, key: str, text: str, most: int) -> None:
    """Write a text to a cache file as `write_kept` does, sealed with its key."""
    write_kept(path, f"{_seal(key, text)}\n{text}".encode(), most)


def read_sealed(path: Path, key: str) -> str:
    """Return the text that was saved under a key. Raises `OSError`, and `ValueError` if the file is
    damaged or belongs to another key."""
    seal, _, text = path.read_text(encoding="utf-8").partition("\n")
    if seal != _seal(key, text):
        raise ValueError("it is damaged or belongs to another key")
    return text


def _seal(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\0{text}".encode()).hexdigest()


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Raise `OutputError` if the system refuses to write `what` to the file or folder `path`; do
    nothing else in this block."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {what} to {path}: {refusal(error)}") from None


def append(file: IO[bytes], path: Path, what: str, content: bytes) -> None:
    """Append to an open file, bypassing its buffer, so that an error is raised here and only
    once."""
    with writing(path, what):
        left = memoryview(content)
        while left:
            left = left[os.write(file.fileno(), left) :]


def read_text(path: Path, what: str) -> str:
    """Return the text of a hand-written file; `UserError` if it is too large or not text."""
    with path.open("rb") as file:
        if len(content := file.read(MOST_READ + 1)) > MOST_READ:
            raise UserError(f"{what} is larger than {MOST_READ >> 20} MiB: check the path")
    return decode(content, what)


def decode(content: bytes, what: str, *, zeros: bool = False) -> str:
    """Return the text without a byte order mark; `UserError` names the line and byte of `what` that
    is not UTF-8. `zeros`: zero bytes are allowed."""
    for name, marks in MARKS.items():
        if content.startswith(marks):
            raise UserError(
                f"{what} is {name} text, by its first bytes; save it as UTF-8, such as "
                f"with `iconv -f {name} -t UTF-8`"
            )
    zero = -1 if zeros else content.find(b"\0")
    if zero >= 0:
        raise UserError(
            f"{what} is not UTF-8 text: byte {zero} ({_line(content, zero)}) is zero, as in "
            "UTF-16 or a binary file; save it as UTF-8 text"
        )
    start = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    try:
        return content[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = start + error.start
        where = f"byte {wrong} ({_line(content, wrong)}) is 0x{content[wrong]:02x}"
    raise UserError(
        f"{what} is not UTF-8 text: {where}; save it as UTF-8, such as with `iconv -f LATIN1 "
        "-t UTF-8`"
    )


def _line(content: bytes, place: int) -> str:
    return f"line {content.count(10, 0, place) + 1}"


def tidy(folder: Path, most: int) -> None:
    """Remove all entries of a folder except the `most` newest. Entries that another process removes
    meanwhile are ignored."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found, reverse=True)[most:]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
