"""The examples that a draft learns from: sequences of tokens, and which of them the target would
have written.

They come from files of chats (rendered by `chats.py`) or from token files: a row of little-endian
uint16 ids in which every sequence begins with the begin id, and, if not everything is learned, a
file of the same name ending in `.mask`, one byte an id."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.protocol.errors import UserError


@dataclass(frozen=True)
class Example:
    """One sequence."""

    tokens: NDArray[np.int64]  # [n]
    learn: NDArray[np.bool_]
    """[n]: the token is the target's own output, and is learned where it is predicted."""


def prompt_of(tokens: NDArray[Any], learn: NDArray[Any]) -> bytes:
    """Return the ids before the first one that is learned; all of them if that is the first or
    second id, as in a plain text."""
    learned = np.flatnonzero(learn)
    return tokens[: learned[0] if len(learned) and learned[0] > 1 else None].astype("<i8").tobytes()


@dataclass(frozen=True)
class Examples:
    """The sequences of some files in their order, and what happened to the rest."""

    rows: tuple[Example, ...]
    cut: int = 0  # the number of sequences that were too long and cut
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Why sequences or chats were left out, and how many."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def learned(self) -> int:
        """The number of tokens that are learned."""
        return sum(int(row.learn.sum()) for row in self.rows)

    def digest(self) -> str:
        """Return the SHA-256 of all sequences."""
        return digest_of(self.rows)


def digest_of(rows: Iterable[Example]) -> str:
    """Return the SHA-256 of sequences."""
    content = hashlib.sha256()
    for row in rows:
        content.update(
            len(row.tokens).to_bytes(8, "little")
            + row.tokens.astype("<i8").tobytes()
            + row.learn.tobytes()
        )
    return content.hexdigest()


def arrange(
    rows: Iterable[Example],
    *,
    context: int,
    vocabulary_size: int,
    drop_long: bool = False,
    left_out: Mapping[str, int] | None = None,
) -> Examples:
    """Cut sequences longer than `context`, or leave them out (`drop_long`), along with those that
    have nothing to learn, and order the rest by a hash of the prompt: then the end of the list is
    as good a sample as any, and all answers to a prompt are adjacent, so that a split can keep them
    together. `left_out`: what the reader of the files has left out already."""
    kept, cut, out = list[Example](), 0, Counter(left_out or {})
    for row in rows:
        if len(row.tokens) and int(row.tokens.max()) >= vocabulary_size:
            raise UserError(
                f"the data have token {row.tokens.max()}, beyond the target's vocabulary of "
                f"{vocabulary_size}: they were made for another target"
            )
        long, short = len(row.tokens) > context, Example(row.tokens[:context], row.learn[:context])
        if long and drop_long:
            out[f"longer than {context} tokens"] += 1
        elif not short.learn[1:].any():
            out[f"without anything to learn within {context} tokens"] += 1
        else:
            cut += long
            kept.append(short)
    if not kept:
        reasons = "; ".join(f"{count} {reason}" for reason, count in out.items())
        raise UserError(
            f"the data have no sequence to learn from ({reasons or 'they are empty'}); with "
            "`dovetail features --regenerate` the target writes the answers"
        )
    kept.sort(key=lambda row: hashlib.sha256(prompt_of(row.tokens, row.learn)).digest())
    return Examples(tuple(kept), cut, out)


def read_token_file(file: Path, begin: int | None) -> list[Example]:
    """Return the sequences of a token file. Raises `UserError` if it is not one, or does not begin
    with the begin id."""
    ids = np.fromfile(file, dtype="<u2").astype(np.int64)
    learn = _mask_of(file, len(ids))
    if begin is None:
        raise UserError(
            f"{file}: the target has no begin id, which separates the sequences of a token file; "
            "give chats as JSON lines"
        )
    starts = np.flatnonzero(ids == begin)
    if not len(starts) or starts[0] != 0:
        raise UserError(
            f"{file} is not a token file of this target: it does not begin with id {begin}"
        )
    return [
        Example(t, m)
        for t, m in zip(np.split(ids, starts[1:]), np.split(learn, starts[1:]), strict=True)
    ]


def _mask_of(file: Path, size: int) -> NDArray[np.bool_]:
    mask = file.with_suffix(".mask")
    if not mask.is_file():
        return np.ones(size, dtype=np.bool_)
    learn = np.fromfile(mask, dtype=np.uint8).astype(np.bool_)
    if len(learn) != size:
        raise UserError(
            f"{mask} has {len(learn)} bytes for the {size} ids of {file.name}: they do not "
            "belong together"
        )
    return learn
