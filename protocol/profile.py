"""The profile file: what was measured on a machine, so that it is measured once.

Holds, for each combination of machine, software, weights, threads and model shapes, which way each
linear is computed and what every candidate took, and the calibration: the target's pass over M
rows, the draft's over those of a level, and the limits of the hardware. JSON, written atomically
under a lock, since several workers may start at once. Knows neither where the file lies
(`launch/files/directory.py` decides) nor how anything is measured.
"""

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from dovetail.protocol.errors import UserError
from dovetail.protocol.experts import DENSE, Mixture
from dovetail.protocol.settings import Frozen

MAX_BYTES = 64 << 20
MAX_POINTS = 256

Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(ge=0.0, le=1e9)]
Rate = Annotated[float, Field(gt=0.0)]
CROSSOVER_STEPS = 64
WEIGHT_BYTES = {"fp32": 4, "half": 2, "fp16": 2, "bf16": 2, "int8": 1, "int8-per-tensor": 1}
"""Bytes that a pass reads of each weight of a type."""
MACHINE_FIELDS = (
    "vendor_id",
    "model name",
    "cpu family",
    "model",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU variant",
    "CPU part",
    "Features",
)
"""The fields of /proc/cpuinfo that tell processors apart, on x86-64 and on aarch64."""


class ProfileError(UserError):
    """A profile file that cannot be read or written: names the file and the remedy."""


class ProfileKey(Frozen):
    """The circumstances of a measurement: change any of these, and it is made anew."""

    machine: str
    """`machine_key()`."""
    software: str
    """The software that computes, with versions: torch, the kernels and their instruction set."""
    weights: str
    threads: Positive
    shapes: str
    """`shapes_key()` of the model."""


class LinearChoice(Frozen):
    """One shape [n, k] for passes of at most `rows` rows (a row class): what was chosen, and the
    measured seconds of one product of every candidate."""

    n: Positive
    k: Positive
    rows: Positive
    chosen: str
    seconds: Mapping[str, Seconds]
    """Candidate -> seconds of one product of `rows` rows; only candidates that passed the self-test
    were timed."""
    refused: Mapping[str, str] = {}
    """Candidate -> why it may not be used here (failed self-test, instruction missing, does not fit
    into memory)."""


class RowsSeconds(Frozen):
    """A measured curve: a pass over rows[i] rows took seconds[i]; rows ascend."""

    rows: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=MAX_POINTS)]
    seconds: Annotated[tuple[Seconds, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @model_validator(mode="after")
    def _is_curve(self) -> "RowsSeconds":
        if len(self.rows) != len(self.seconds) or not all(
            below < above for below, above in pairwise(self.rows)
        ):
            raise ValueError(
                f"{len(self.rows)} numbers of rows and {len(self.seconds)} of seconds are not a "
                "curve: rows ascend, and each has its seconds"
            )
        return self

    @classmethod
    def rising(cls, rows: Sequence[int], seconds: Iterable[float]) -> "RowsSeconds":
        """A curve that never falls with the rows: what was measured noisily is raised to what came
        before it."""
        return cls(rows=tuple(rows), seconds=tuple(accumulate(seconds, max)))

    def at(self, rows: int) -> float:
        """Seconds of a pass over so many rows: linear between the measured ones, and level or along
        the last piece beyond them."""
        points = list(zip(self.rows, self.seconds, strict=True))
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        (below, low), (above, high) = next(
            ((a, b) for a, b in pairwise(points) if rows <= b[0]), (points[-2], points[-1])
        )
        return low + (high - low) * (rows - below) / (above - below)


class ContextCurve(Frozen):
    """Seconds of a pass over rows, at one length of the cache: T_V of a target, t_D of a draft."""

    context: Annotated[int, Field(ge=0, le=1 << 24)]
    t_v: RowsSeconds


@dataclass(frozen=True)
class Roofline:
    """The least time of a pass: the longer of reading its bytes and computing its products
    (Williams et al., 2009)."""

    whole_s: float
    """Seconds of reading all weights."""
    row_s: float
    """Seconds of the arithmetic of one row."""
    mixture: Mixture = DENSE

    @classmethod
    def of(
        cls,
        *,
        size: float,
        operations: float,
        bandwidth_gb_s: float,
        gflop_s: float,
        mixture: Mixture = DENSE,
    ) -> "Roofline":
        """Passes through weights of so many bytes, with so many operations a row if it goes
        through all of them."""
        row_s = mixture.active * operations / (gflop_s * 1e9)
        return cls(size / (bandwidth_gb_s * 1e9), row_s, mixture)

    def reading_s(self, rows: float) -> float:
        """Return the seconds of reading what a pass over so many rows reads."""
        return self.whole_s * self.mixture.read(rows)

    @property
    def crossover(self) -> float:
        """Return the rows at which reading and computing take the same time."""
        rows = self.whole_s / self.row_s
        for _ in range(CROSSOVER_STEPS if self.mixture.share else 0):
            rows = self.reading_s(rows) / self.row_s  # what is read only falls with fewer rows
        return rows

    def at(self, rows: float) -> float:
        """Return the seconds of a pass over so many rows."""
        return max(self.reading_s(rows), rows * self.row_s)


class Limits(Frozen):
    """The limits of this machine on the cores in use, measured without a model."""

    bandwidth_gb_s: Rate
    """Reading memory, 10^9 bytes a second."""
    peak_gflop_s: Mapping[str, Rate]
    """Arithmetic -> 10^9 operations a second (a multiply and an add are two): fp32 (FMA) and, where
    there are instructions, int8 (VNNI) and bf16."""
    probe: str
    """The software that measured them, in words: "kernels avx512-vnni" or "torch"."""

    def peak_of(self, weights: str, *, library: bool) -> float:
        """Return the peak of the arithmetic that multiplies such weights: 16-bit weights are
        multiplied in fp32, but by a library's bf16, where there are instructions for it."""
        own = {"int8": "int8", "int8-per-tensor": "int8", "bf16": "bf16" if library else "fp32"}
        fp32 = self.peak_gflop_s["fp32"]
        return self.peak_gflop_s.get(own.get(weights, "fp32"), fp32)

    def roofline(
        self, parameters: int, weights: str, *, library: bool, mixture: Mixture = DENSE
    ) -> Roofline:
        """Return the least time of passes through so many weights of a type."""
        return Roofline.of(
            size=parameters * WEIGHT_BYTES.get(weights, 4),
            operations=2 * parameters,
            bandwidth_gb_s=self.bandwidth_gb_s,
            gflop_s=self.peak_of(weights, library=library),
            mixture=mixture,
        )


class Calibration(Frozen):
    """Seconds of one pass of a target, as `dovetail calibrate` found them."""

    measured: str
    """When, ISO 8601 in UTC."""
    backend: str
    context: Annotated[int, Field(ge=0, le=1 << 24)]
    """Rows in the cache that `t_v` holds for."""
    t_v: RowsSeconds
    t_v_limit: RowsSeconds
    """At the physical limit: max(packed bytes that are read / bandwidth, 2 rows active parameters /
    peak)."""
    t_v_by_context: tuple[ContextCurve, ...]
    layers: Positive
    layers_measured: Positive
    """Fewer than `layers` where memory did not hold all of them: seconds are scaled up then."""
    limits: Limits


class Reading(Frozen):
    """Seconds of reading a prompt, with a model on the CPU: on the CPU itself, and with its weights
    streaming through a device."""

    device: str
    local: RowsSeconds
    streamed: RowsSeconds

    @property
    def better_from(self) -> int | None:
        """The fewest measured rows from which on the device is always the faster one; None: at the
        most rows that were measured it is not."""
        points = sorted({*self.local.rows, *self.streamed.rows}, reverse=True)
        better = list(takewhile(lambda rows: self.streamed.at(rows) < self.local.at(rows), points))
        return better[-1] if better else None


class DeviceCosts(Frozen):
    """Seconds of the parts of a target in a pass over rows, on a device and on the CPU beside it: a
    planner puts placements together from them."""

    device: str
    link_gb_s: Rate
    """Copying a layer's weights to the device, with nothing computed meanwhile."""
    layer: RowsSeconds
    """One whose weights stay there."""
    streamed: RowsSeconds
    """One of several whose weights stream through it."""
    head: RowsSeconds
    """On the device, and whatever else a pass has but layers."""
    host_layer: RowsSeconds
    host_head: RowsSeconds


class Entry(Frozen):
    """Everything known under one key."""

    key: ProfileKey
    linears: tuple[LinearChoice, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    """At most one for each back end."""
    levels: ContextCurve | None = None
    """t_D of a draft, a level of its tree."""
    readings: tuple[Reading, ...] = ()
    """Seconds of reading a prompt of a target on the CPU, at most one for each device."""
    devices: tuple[DeviceCosts, ...] = ()
    """Costs of a target's parts, at most one for each device."""

    def choice(self, n: int, k: int, rows: int) -> LinearChoice | None:
        """Return what was chosen for a shape: the entry of the smallest row class that holds
        `rows`."""
        fitting = (c for c in self.linears if (c.n, c.k) == (n, k) and c.rows >= rows)
        return min(fitting, key=lambda c: c.rows, default=None)

    def with_linears(self, linears: Sequence[LinearChoice]) -> "Entry":
        """These choices in place of those of the same shape and row class."""
        new = {(c.n, c.k, c.rows): c for c in (*self.linears, *linears)}
        return self.model_copy(update={"linears": tuple(new.values())})

    def with_calibration(self, calibration: Calibration) -> "Entry":
        """This calibration in place of that of the same back end."""
        others = tuple(c for c in self.calibrations if c.backend != calibration.backend)
        return self.model_copy(update={"calibrations": (*others, calibration)})

    def with_reading(self, reading: Reading) -> "Entry":
        """This reading in place of that of the same device."""
        others = tuple(r for r in self.readings if r.device != reading.device)
        return self.model_copy(update={"readings": (*others, reading)})

    def with_device(self, costs: DeviceCosts) -> "Entry":
        """These costs in place of those of the same device."""
        others = tuple(d for d in self.devices if d.device != costs.device)
        return self.model_copy(update={"devices": (*others, costs)})

    def with_levels(self, levels: ContextCurve) -> "Entry":
        """This t_D in place of what was known."""
        return self.model_copy(update={"levels": levels})


class Profile(Frozen):
    """The whole file."""

    format: Literal[1] = 1
    entries: tuple[Entry, ...] = ()

    def find(self, key: ProfileKey) -> Entry:
        """Return what is known under a key; an empty entry if nothing is."""
        return next((entry for entry in self.entries if entry.key == key), Entry(key=key))

    def with_entry(self, entry: Entry) -> "Profile":
        """This entry in place of the one of the same key."""
        return self.model_copy(
            update={"entries": (*(e for e in self.entries if e.key != entry.key), entry)}
        )


def load_profile(path: Path) -> Profile:
    """The profile in a file; an empty one if there is no such file; `ProfileError` if it is
    damaged."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ProfileError(
                f"the profile file {path} is larger than {MAX_BYTES >> 20} MiB, which it never "
                "becomes by itself: remove it"
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
    """Replace what is known under `key` by `change` of it, on disk; whatever else the file holds,
    another process's last words included, stays.

    Returns the new entry. `ProfileError` if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            profile = load_profile(path)
            entry = change(profile.find(key))
            _write(path, profile.with_entry(entry).model_dump_json(indent=1))
    except OSError as error:
        raise ProfileError(
            f"the profile file {path} cannot be written ({error.strerror}): free some space there, "
            "or set XDG_CACHE_HOME to another folder"
        ) from None
    return entry


def machine_key(cpuinfo: Path = Path("/proc/cpuinfo"), *, cores: int | None = None) -> str:
    """A digest of processor, instruction flags and number of cores; 16 hexadecimal digits. `cores`:
    those of the machine unless told."""
    first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    fields = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*)$", first, re.MULTILINE))
    facts = [" ".join(sorted(fields.get(name, "").split())) for name in MACHINE_FIELDS]
    return _digest([*facts, str(cores or os.cpu_count())])


def shapes_key(shapes: Sequence[tuple[int, int]], *others: object) -> str:
    """A digest of the shapes [n, k] of a model's linears, with how often each occurs, and of
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
    """One process at a time; the lock goes with its holder, however that ends."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, text: str) -> None:
    """Whoever reads the file meanwhile sees the old one or the new one, whole."""
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
