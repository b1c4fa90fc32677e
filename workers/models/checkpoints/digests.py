"""Digests of weight files: SHA-256 over names, sizes and contents, the same on every machine. Files
are read once, and checked for NaN and infinity; digests are cached by the files' identity (device,
inode, size, times), unless a file changed so recently that its times may not be unique."""

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, check_home, write_kept
from dovetail.workers.models.checkpoints.files import damaged
from dovetail.workers.progress import loading

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 4 << 20
"""A multiple of every number's size, small enough to stay in the CPU cache until it is hashed."""
BLOCKS = 3  # one is read while another is hashed, and one waits
EXPONENTS = {
    "F64": (8, 0x7FF << 52),
    "F32": (4, 0xFF << 23),
    "F16": (2, 0x1F << 10),
    "BF16": (2, 0xFF << 7),
}
"""Type -> bytes of a number, and its exponent bits: all of them are set in NaN and infinity."""
FOLDER = "digests"
MOST_KEPT = 256  # most digests that are kept; the oldest are removed
CHECKED_BYTES_S = 50e6  # reading rate that limits the wait for another process, with `LEAST_WAIT_S`
LEAST_WAIT_S = 10.0
LOOK_S = 0.05
GRAIN_NS, COARSE_GRAIN_NS = 50_000_000, 2_000_000_000
"""Changes within this time may have equal times: fractional times, and whole seconds (FAT, NFS)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """The identity of a file and its version."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # time of the last change of the file or its metadata

    @classmethod
    def of(cls, file: IO[bytes]) -> "Identity":
        """Return the identity of an open file; `OSError` from the system."""
        state = os.fstat(file.fileno())
        return cls(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)

    def same_content(self, other: "Identity") -> bool:
        """Return whether the content is the same: links and permissions may change."""
        own, others = (
            (self.device, self.inode, self.size, self.modified_ns),
            (other.device, other.inode, other.size, other.modified_ns),
        )
        return own == others

    def settled(self, now_ns: int) -> bool:
        """Return whether a later change would show in the times."""
        last_ns = max(self.modified_ns, self.changed_ns)
        grain_ns = COARSE_GRAIN_NS if self.changed_ns % 1_000_000_000 == 0 else GRAIN_NS
        return last_ns + grain_ns < now_ns


@dataclass(frozen=True)
class FilePart:
    """The numbers of one tensor."""

    name: str
    kind: str
    size_bytes: int


@dataclass(frozen=True)
class DigestSource:
    """A weight file: header, and tensors that fill the rest in order."""

    path: Path
    identity: Identity
    header: bytes
    parts: Sequence[FilePart]


def digest_of(configuration: bytes, sources: Sequence[DigestSource]) -> str:
    """Return the SHA-256 of config.json and weights; `CheckpointError` for NaN, infinity or a
    changing file. Known files are not read again, and only one process reads at a time."""
    began_ns = time.time_ns()
    if not all(source.identity.settled(began_ns) for source in sources):
        return _read(configuration, sources)
    key, kept = _key(configuration, sources), KeptDigests(cache_folder() / FOLDER)
    if found := kept.find(key):
        return found
    size = sum(source.identity.size for source in sources)
    with kept.turn(key, LEAST_WAIT_S + size / CHECKED_BYTES_S):
        if found := kept.find(key):
            return found
        digest = _read(configuration, sources)
        kept.keep(key, digest)
        return digest


def begin_digest(configuration: bytes, sources: Sequence[DigestSource]) -> Future[str]:
    """Begin to compute the digest, as `digest_of` does, in another thread."""
    found = Future[str]()

    def find() -> None:
        try:
            found.set_result(digest_of(configuration, sources))
        except Exception as error:  # the error is raised in the thread that waits for the digest
            found.set_exception(error)

    threading.Thread(target=find, name="digest", daemon=True).start()
    return found


def known_digest(digest: str) -> Future[str]:
    """Return a digest that is already known."""
    found = Future[str]()
    found.set_result(digest)
    return found


class KeptDigests:
    """Digests in a folder, a file each, written atomically; damaged ones are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> str:
        """Return the digest stored under a key, or an empty text."""
        try:
            digest, _, seal = (
                (self._folder / key).read_text(encoding="ascii").strip().partition(" ")
            )
        except (OSError, UnicodeDecodeError):
            return ""
        return digest if seal == _seal(key, digest) else ""

    def keep(self, key: str, digest: str) -> None:
        """Save a digest; log a failure."""
        try:
            content = f"{digest} {_seal(key, digest)}\n".encode()
            write_kept(self._folder / key, content, MOST_KEPT)
        except OSError as error:
            why = error.strerror or error
            log.warning(
                "digests cannot be saved in %s (%s): every start reads the weights again",
                self._folder,
                why,
            )

    @contextmanager
    def turn(self, key: str, patience_s: float) -> Iterator[None]:
        """Hold a key's lock within the block, waiting at most `patience_s` for another process."""
        path = self._folder / f"{key}.lock"
        with ExitStack() as stack:
            with suppress(OSError):  # nothing can be saved then, which `keep` logs
                check_home(self._folder)
                self._folder.mkdir(parents=True, exist_ok=True)
                _lock(stack.enter_context(path.open("w")), patience_s)
                stack.callback(path.unlink, missing_ok=True)
            yield


def _lock(file: IO[str], patience_s: float) -> None:
    """Lock an open file unless another holds it too long; `OSError` if locks are unsupported."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return
            time.sleep(LOOK_S)
        else:
            return


def _seal(key: str, digest: str) -> str:
    """Return a checksum that ties a digest to its key."""
    return hashlib.sha256(f"{key} {digest}".encode()).hexdigest()


def all_finite(block: "bytearray | memoryview | np.ndarray", kind: str) -> bool:
    """Return whether no number in a block is NaN or infinite. Seen as integers these are the
    largest, of each sign, so two maxima suffice."""
    import numpy as np  # late: every command reads cached digests

    if kind not in EXPONENTS:
        return True
    width, exponent = EXPONENTS[kind]
    signed = np.frombuffer(block, dtype=f"<i{width}")
    if not signed.size:
        return True
    return (
        int(signed.max()) < exponent
        and int(signed.view(f"<u{width}").max()) < exponent | 1 << 8 * width - 1
    )


def changed(path: Path) -> CheckpointError:
    """Return the error for a file that another process is writing."""
    text = f"{path} was changed while it was loaded"
    return CheckpointError(f"{text}: wait until it is written, and start again")


def refuse_changed(path: Path, before: Identity, file: IO[bytes]) -> None:
    """`CheckpointError` if an open file, or its content, is not the same as before."""
    if not before.same_content(Identity.of(file)):
        raise changed(path)


def _key(configuration: bytes, sources: Sequence[DigestSource]) -> str:
    """Return the cache key of these files: everything that determines the digest."""
    whole = hashlib.sha256(b"1\0" + configuration)
    for source in sources:
        whole.update(f"\0{source.path.name}\0{source.identity}\0".encode())
        whole.update(source.header)
    return whole.hexdigest()


def _read(configuration: bytes, sources: Sequence[DigestSource]) -> str:
    digest = hashlib.sha256(f"config.json\0{len(configuration)}\0".encode() + configuration)
    blocks = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    size = sum(source.identity.size for source in sources)
    with ThreadPoolExecutor(1, "digest") as hashing, loading("checking", size) as read:
        pending: list[Future[None]] = []

        def hash_later(content: bytes | memoryview) -> None:
            pending.append(hashing.submit(digest.update, content))

        def free_block() -> bytearray:
            """Return the block that was hashed the longest time ago."""
            while len(pending) >= BLOCKS:
                pending.pop(0).result()
            blocks.append(blocks.pop(0))
            return blocks[-1]

        for source in sources:
            hash_later(f"{source.path.name}\0{source.identity.size}\0".encode() + source.header)
            read(len(source.header))
            _read_file(source, free_block, hash_later, read)
    return digest.hexdigest()


def _read_file(
    source: DigestSource,
    free_block: Callable[[], bytearray],
    hash_later: Callable[[memoryview], None],
    read: Callable[[int], None],
) -> None:
    try:
        with source.path.open("rb", buffering=0) as file:
            file.seek(len(source.header))
            for part in source.parts:
                for left in range(part.size_bytes, 0, -BLOCK_BYTES):
                    block = memoryview(free_block())[: min(left, BLOCK_BYTES)]
                    if read_full(file, block) != len(block):
                        raise damaged(f"{source.path} was cut short while it was read")
                    if not all_finite(block, part.kind):
                        name = f"{source.path}: tensor {part.name}"
                        raise CheckpointError(f"{name} holds NaN or infinite values")
                    hash_later(block)
                    read(len(block))
            refuse_changed(source.path, source.identity, file)
    except OSError as error:
        raise damaged(f"{source.path} cannot be read ({error.strerror or error})") from None


def read_full(file: Any, block: memoryview) -> int:
    """Read until the block is full or the file ends; return the number of bytes."""
    done = 0
    while done < len(block) and (count := file.readinto(block[done:])):
        done += count
    return done
