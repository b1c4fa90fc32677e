"""A cache of compiled functions that its user alone may read and write: it is code that a GPU
runs."""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from dovetail.protocol.files import cache_folder, tidy
from dovetail.workers.devices.nvidia.nvrtc import OPTIONS, Compiler

log = logging.getLogger(__name__)

FOLDER = "cuda"
MOST_KEPT = 32  # files that are kept; the oldest go
OTHERS = 0o077  # the rights of everybody but a file's owner
SEAL_BYTES = 32


def compiled_for(compiler: Compiler, source: str, architecture: int) -> bytes | str:
    """Return machine code for a compute capability, such as 86, cached or compiled; or why there is
    none."""
    what = repr((source, architecture, compiler.version, OPTIONS)).encode()
    name = f"{hashlib.sha256(what).hexdigest()[:32]}.cubin"
    if (kept := find(name)) is not None:
        return kept
    code = compiler.compile(source, architecture)
    if isinstance(code, bytes):
        keep(name, code)
    return code


def find(name: str) -> bytes | None:
    """Return a cache entry; None if there is none, or it is damaged or writable by others."""
    path = cache_folder() / FOLDER / name
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            whole = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s): it is made again", path, error.strerror or error)
        return None
    if stat.st_uid != os.getuid() or stat.st_mode & OTHERS:
        log.warning("%s is not yours alone: it is made again", path)
        return None
    content = whole[SEAL_BYTES:]
    if whole[:SEAL_BYTES] != _seal(name, content):
        log.warning("%s is not what was written: it is made again", path)
        return None
    return content


def keep(name: str, content: bytes) -> None:
    """Store content under a name; log a failure."""
    folder = cache_folder() / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".new", delete=False) as file:
            file.write(_seal(name, content) + content)
        Path(file.name).replace(folder / name)
        tidy(folder, MOST_KEPT)
    except OSError as error:
        why = error.strerror or error
        log.warning("compiled functions cannot be saved in %s (%s)", folder, why)


def _seal(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()
