"""The profile file: measurements of a machine, stored so that each is made once. For each
combination of machine, software, weights, threads and model shapes it holds the chosen product of
each linear layer with the times of all candidates, and the calibration: target passes over M rows,
draft passes over a level, and the hardware limits. JSON, written atomically under a lock, since
several workers may start at once. `launch/files/directory.py` decides where the file is; nothing is
measured here."""

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dovetail.protocol.calibration import (
    Calibration,
    ContextCurve,
    DeviceCosts,
    Positive,
    ReadingCosts,
    Seconds,
)
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal
from dovetail.protocol.settings import Frozen

MAX_BYTES = 64 << 20

MACHINE_FIELDS = (
    *("vendor_id", "model name", "cpu family", "model", "stepping", "flags", "CPU implementer"),
    *("CPU variant", "CPU part", "Features"),
)
"""The fields of /proc/cpuinfo that distinguish processors, on x86-64 and on aarch64."""


class ProfileError(UserError):
    """A profile file that cannot be read or written; names the file and the remedy."""


class ProfileKey(Frozen):
    """The circumstances of a measurement: if any of these changes, it is repeated."""

    machine: str  # `machine_key()`
    software: str
    """The software that computes, with versions: torch, the kernels and their instruction set."""
    weights: str
    threads: Positive
    shapes: str  # `shapes_key()` of the model
    cache: str = "fp32"  # the type of keys and values
    shards: Positive = 1  # the memory nodes that the target is spread over


class LinearChoice(Frozen):
    """One shape [n, k] for passes of at most `rows` rows (a row class): the chosen candidate, and
    the measured seconds of each."""

    n: Positive
    k: Positive
    rows: Positive
    chosen: str
    seconds: Mapping[str, Seconds]
    """Candidate -> seconds of one product of `rows` rows, if it passed the self-test."""
    refused: Mapping[str, str] = {}
    """Candidate -> why it may not be used (self-test, instructions, memory)."""


class Entry(Frozen):
    """Everything known under one key."""

    key: ProfileKey
    linears: tuple[LinearChoice, ...] = ()
    calibrations: tuple[Calibration, ...] = ()  # at most one for each back end
    levels: ContextCurve | None = None  # t_D of a draft, a level of its tree
    readings: tuple[ReadingCosts, ...] = ()
    """Seconds to prefill a prompt with a target on the CPU, at most one entry per device."""
    devices: tuple[DeviceCosts, ...] = ()  # costs of a target's parts, at most one for each device

    def choice(self, n: int, k: int, rows: int) -> LinearChoice | None:
        """Return the choice for a shape in the smallest row class that holds `rows`."""
        fitting = (c for c in self.linears if (c.n, c.k) == (n, k) and c.rows >= rows)
        return min(fitting, key=lambda c: c.rows, default=None)

    def with_linears(self, linears: Sequence[LinearChoice]) -> "Entry":
        """Return the entry with these choices in place of those with the same shape and row
        class."""
        new = {(c.n, c.k, c.rows): c for c in (*self.linears, *linears)}
        return self.model_copy(update={"linears": tuple(new.values())})

    def having(self, costs: Calibration | ReadingCosts | DeviceCosts) -> "Entry":
        """Return the entry with these costs in place of those of the same back end or device."""
        name, by = {
            Calibration: ("calibrations", "backend"),
            ReadingCosts: ("readings", "device"),
            DeviceCosts: ("devices", "device"),
        }[type(costs)]
        others = (one for one in getattr(self, name) if getattr(one, by) != getattr(costs, by))
        return self.model_copy(update={name: (*others, costs)})

    def with_levels(self, levels: ContextCurve) -> "Entry":
        """Return the entry with this t_D."""
        return self.model_copy(update={"levels": levels})


class NodeTimes(Frozen):
    """Seconds of a target's pass on one memory node, and sharded over all nodes."""

    key: tuple[str, ...]
    """Machine, nodes, model and settings: if any of these changes, the measurement is repeated."""
    rows: Positive
    alone_s: Seconds
    sharded_s: Seconds


class TypeTimes(Frozen):
    """Seconds of products on a device with weights in 16-bit and 32-bit types."""

    key: tuple[str, ...]
    """Libraries, card, driver and our functions: if any changes, the measurement is repeated."""
    seconds: Mapping[str, tuple[Seconds, ...]]  # type -> seconds of a product of 1, 4 and 16 rows
    refused: Mapping[str, str] = {}
    """Type -> why it cannot be used."""


class DraftFall(Frozen):
    """A draft with `draft.device = auto` that ran on the CPU last time, despite a GPU."""

    key: tuple[str, ...]  # libraries and card, driver, draft, target, weights
    why: str


class MtpVariant(Frozen):
    """Which of its results the later levels of an MTP layer read."""

    key: str  # the digest of the layer
    raw: bool  # True if that is the one before its norm


class Profile(Frozen):
    """The whole file."""

    format: Literal[1] = 1
    entries: tuple[Entry, ...] = ()
    nodes: tuple[NodeTimes, ...] = ()  # at most one for each key
    types: tuple[TypeTimes, ...] = ()  # at most one for each key
    falls: tuple[DraftFall, ...] = ()  # at most one for each key
    variants: tuple[MtpVariant, ...] = ()  # at most one for each key

    def find(self, key: ProfileKey) -> Entry:
        """Return what is known under a key; an empty entry if nothing is."""
        return next((entry for entry in self.entries if entry.key == key), Entry(key=key))

    def holding(self, found: Entry | NodeTimes | TypeTimes | DraftFall | MtpVariant) -> "Profile":
        """Return the profile with this in place of what it has under the same key; a fallback
        without a reason only removes its predecessor."""
        lists = {Entry: "entries", NodeTimes: "nodes", TypeTimes: "types", DraftFall: "falls"}
        lists |= {MtpVariant: "variants"}
        others = (one for one in getattr(self, lists[type(found)]) if one.key != found.key)
        over = isinstance(found, DraftFall) and not found.why
        return self.model_copy(update={lists[type(found)]: (*others, *(() if over else (found,)))})

    def types_of(self, key: Sequence[str]) -> TypeTimes | None:
        """Return the times of types under a key; None if they were not measured."""
        return next((times for times in self.types if times.key == tuple(key)), None)

    def fall_of(self, key: Sequence[str]) -> str:
        """Return why a draft fell back to the CPU at its last start; empty if it did not."""
        return next((fall.why for fall in self.falls if fall.key == tuple(key)), "")


def load_profile(path: Path) -> Profile:
    """Return the profile in a file, empty if there is none; `ProfileError` if damaged."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ProfileError(
                f"the profile file {path} is larger than {MAX_BYTES >> 20} MiB, which is never "
                "normal: remove it"
            )
        text = path.read_bytes()
    except FileNotFoundError:
        return Profile()
    except OSError as error:
        raise ProfileError(
            f"the profile file {path} cannot be read ({error.strerror}): make it readable, or "
            "remove it"
        ) from None
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        raise ProfileError(
            f"the profile file {path} is damaged or of another version ({problem}): remove it, and "
            "it is measured again"
        ) from None


def update_profile(path: Path, key: ProfileKey, change: Callable[[Entry], Entry]) -> Entry:
    """Replace the entry of `key` by `change(entry)` on disk, and return it; other entries stay,
    including those that another process has just written. `ProfileError` if the file cannot be
    written."""
    found = rewrite_profile(path, lambda known: known.holding(change(known.find(key))))
    return found.find(key)


def rewrite_profile(path: Path, change: Callable[[Profile], Profile]) -> Profile:
    """Replace the profile on disk by `change(profile)` under a lock, and return it; `ProfileError`
    if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            profile = change(load_profile(path))
            _write(path, profile.model_dump_json(indent=1))
    except OSError as error:
        raise ProfileError(
            f"the profile file {path} cannot be written: {refusal(error)} (XDG_CACHE_HOME "
            "names the folder of caches)"
        ) from None
    return profile


def machine_key(cpuinfo: Path = Path("/proc/cpuinfo"), *, cores: int | None = None) -> str:
    """Return a digest of processor, instruction flags and number of cores, 16 hexadecimal digits.
    `cores`: by default the machine's."""
    first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    fields = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*)$", first, re.MULTILINE))
    facts = [" ".join(sorted(fields.get(name, "").split())) for name in MACHINE_FIELDS]
    return _digest([*facts, str(cores or os.cpu_count())])


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first processor, on x86-64 and aarch64."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def shapes_key(shapes: Sequence[tuple[int, int]], *others: object) -> str:
    """Return a digest of the shapes [n, k] of a model's linear layers with their counts, and of
    whatever else its speed depends on; 16 hexadecimal digits."""
    counts = {shape: shapes.count(shape) for shape in set(shapes)}
    return _digest(
        [f"{n}x{k}*{count}" for (n, k), count in sorted(counts.items())]
        + [repr(other) for other in others]
    )


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Admit one process at a time; the lock is released even if its holder is killed."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, text: str) -> None:
    """Write atomically: readers see the old file or the new one."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, suffix=".new", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
