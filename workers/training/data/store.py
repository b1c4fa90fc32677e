"""Hidden states of a target in a folder, for memory maps: an index, the sequences, and shards of
16-bit numbers, token-major.

index.json has the origin of the states and the beginnings of the shards; tokens.bin (uint32),
learn.bin (one byte) and lengths.bin (uint32) hold the sequences, states-NNNNNN.bin a row of numbers
a token; all little-endian, without headers. A shard is added to the index once it is complete, so a
killed run continues after the last complete shard."""

import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import append, writing
from dovetail.workers.training.data.examples import Examples
from dovetail.workers.training.data.states import DTYPES, Origin, TargetStates
from dovetail.workers.training.run import Callback, Progress, silent

FORMAT = 1
SHARD_BYTES = 256 << 20
SEQUENCE_BYTES = 4 + 1  # bytes of a token in tokens.bin and learn.bin
SPARE_BYTES = 64 << 20  # left free on the disk


@dataclass(frozen=True)
class Index:
    """The content of a folder."""

    origin: Origin
    examples: str  # SHA-256 of the sequences
    count: int
    tokens: int
    learned: int
    shards: tuple[int, ...]  # the sequence with which each shard begins
    written: int  # the number of complete shards

    @property
    def bytes(self) -> int:
        """Bytes of the whole folder when it is finished."""
        return self.tokens * (self.origin.row * 2 + SEQUENCE_BYTES) + 4 * self.count


def plan(examples: Examples, origin: Origin, shard_bytes: int = SHARD_BYTES) -> Index:
    """Return the index of a folder before anything is written."""
    shards, size = list[int](), 0
    for number, row in enumerate(examples.rows):
        if not shards or size + len(row.tokens) > shard_bytes // (2 * origin.row):
            shards.append(number)
            size = 0
        size += len(row.tokens)
    return Index(
        origin,
        examples.digest(),
        len(examples.rows),
        examples.tokens,
        examples.learned,
        tuple(shards),
        0,
    )


def begin(folder: Path, planned: Index, examples: Examples) -> Index:
    """Begin a folder, or resume one; return its index. Raises `UserError` if it is another
    target's, has other sequences, or does not fit on the disk."""
    if (folder / "index.json").is_file():
        found = read_index(folder)
        _refuse_another(folder, found, planned)
        _check_disk(folder, found)
        return found
    with writing(folder, "features"):
        folder.mkdir(parents=True, exist_ok=True)
    if strange := sorted(file.name for file in folder.iterdir()):
        raise UserError(
            f"{folder} is not empty ({strange[0]}) but holds no features: give another folder, "
            "or empty it"
        )
    _check_disk(folder, planned)
    numbers = {
        "tokens.bin": np.concatenate([row.tokens for row in examples.rows]).astype("<u4"),
        "learn.bin": np.concatenate([row.learn for row in examples.rows]).astype(np.uint8),
        "lengths.bin": np.array([len(row.tokens) for row in examples.rows], dtype="<u4"),
    }
    for name, content in numbers.items():
        with writing(folder / name, "features"):
            content.tofile(folder / name)
    _write_index(folder, planned)
    return planned


def write(
    folder: Path,
    index: Index,
    examples: Examples,
    reader: TargetStates,
    progress: Callback = silent,
) -> Index:
    """Write the missing shards, and return the final index."""
    begin, written = time.monotonic(), 0
    done = sum(
        len(row.tokens) for row in examples.rows[: (*index.shards, index.count)[index.written]]
    )
    for shard in range(index.written, len(index.shards)):
        first, last = index.shards[shard], (*index.shards, index.count)[shard + 1]
        file = _shard_file(folder, shard)
        new = file.with_suffix(".new")
        with writing(new, "features"):
            out = new.open("wb")
        with out:
            for states in reader.read(
                [torch.from_numpy(row.tokens) for row in examples.rows[first:last]]
            ):
                append(
                    out,
                    new,
                    "features",
                    states.contiguous()
                    .view(torch.int16)
                    .numpy()
                    .astype("<i2", copy=False)
                    .tobytes(),
                )
                written += len(states)
                share = (done + written) / index.tokens
                note = f"{share * index.bytes / 1e9:.3g} of {index.bytes / 1e9:.3g} GB"
                progress(
                    Progress(
                        "features",
                        share,
                        shard,
                        written,
                        spent_s=time.monotonic() - begin,
                        note=note,
                    )
                )
            with writing(new, "features"):
                os.fsync(out.fileno())
        new.replace(file)
        index = dataclasses.replace(index, written=shard + 1)
        _write_index(folder, index)
    return index


class Store:
    """The files of a finished folder, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.index = folder, read_index(folder)
        if self.index.written < len(self.index.shards):
            raise UserError(
                f"{folder} holds {self.index.written} of {len(self.index.shards)} shards: run "
                "dovetail features again with the same options"
            )
        self.digest = self.index.examples
        self.tokens = self._map("tokens.bin", "<u4", self.index.tokens)
        self.learn = self._map("learn.bin", "u1", self.index.tokens)
        lengths = self._map("lengths.bin", "<u4", self.index.count)
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if self.offsets[-1] != self.index.tokens:
            raise UserError(
                f"{folder} is damaged: the lengths of its sequences do not add up to "
                f"{self.index.tokens} tokens"
            )
        self._bounds = self.offsets[[*self.index.shards, self.index.count]]
        self._shards = [self._map_shard(shard) for shard in range(len(self.index.shards))]

    def read(self, start: int, stop: int) -> Tensor:
        states = np.empty((stop - start, self.index.origin.row), dtype=np.int16)
        shard = int(np.searchsorted(self._bounds, start, "right")) - 1
        done = start
        while done < stop:
            low, high = int(self._bounds[shard]), min(stop, int(self._bounds[shard + 1]))
            states[done - start : high - start] = self._shards[shard][done - low : high - low]
            done, shard = high, shard + 1
        return torch.from_numpy(states).view(DTYPES[self.index.origin.dtype])

    def _map_shard(self, shard: int) -> NDArray[np.int16]:
        rows, row = int(self._bounds[shard + 1] - self._bounds[shard]), self.index.origin.row
        numbers: NDArray[np.int16] = self._map(
            _shard_file(self._folder, shard).name, "<i2", rows * row
        ).reshape(rows, row)
        return numbers

    def _map(self, name: str, kind: str, size: int) -> NDArray[Any]:
        file = self._folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size * np.dtype(kind).itemsize:
            raise UserError(
                f"{file} has {found} bytes instead of {size * np.dtype(kind).itemsize}: the "
                "features are damaged, write them again"
            )
        return np.memmap(file, dtype=kind, mode="r")


def read_index(folder: Path) -> Index:
    """Return the index of a folder. Raises `UserError` if it has none or an invalid one."""
    file = folder / "index.json"
    if not file.is_file():
        raise UserError(f"{folder} holds no features: it has no index.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another version wrote it")
        origin = content.pop("origin")
        return Index(
            origin=Origin(**{**origin, "taps": tuple(origin["taps"])}),
            **{**content, "shards": tuple(content["shards"])},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not an index of features ({error}); write them again") from None


def _write_index(folder: Path, index: Index) -> None:
    new = folder / "index.json.new"
    with writing(new, "features"), new.open("w", encoding="utf-8") as out:
        out.write(json.dumps({"format": FORMAT, **dataclasses.asdict(index)}, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())
    new.replace(folder / "index.json")


def _refuse_another(folder: Path, found: Index, wanted: Index) -> None:
    if found.origin.digest != wanted.origin.digest:
        raise UserError(
            f"{folder} holds features of {found.origin.target} (checkpoint "
            f"{found.origin.digest[:12]}), not of {wanted.origin.target} "
            f"({wanted.origin.digest[:12]}): give another folder, or remove this one"
        )
    for name in ("taps", "dtype", "context", "weights"):
        before, now = getattr(found.origin, name), getattr(wanted.origin, name)
        if before != now:
            raise UserError(
                f"{folder} was begun with {name} {before}, not {now}: give the same, or "
                "another folder"
            )
    if found.examples != wanted.examples:
        raise UserError(
            f"{folder} holds features of other sequences than these files have: give another "
            "folder, or remove this one"
        )


def _check_disk(folder: Path, index: Index) -> None:
    done = sum(file.stat().st_size for file in folder.iterdir())
    needed, free = index.bytes - done, shutil.disk_usage(folder).free
    if needed > max(0, free - SPARE_BYTES):
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, but needs {needed / 1e9:.1f} GB more: "
            "use less data or --taps none, or train online"
        )


def _shard_file(folder: Path, shard: int) -> Path:
    return folder / f"states-{shard:06d}.bin"
