"""The rows of a reduced output head: those of frequent tokens. All other tokens get logits of -inf,
so a draft never proposes them.

How frequent a token is comes from the counts in the head's folder or its target's, and from those
of this server's replies, kept in the user's cache. Where there are none, the order of the ids
decides: tokenizers number their merges by frequency. (Frequent rows: FastMTP, 2025.)"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, keep_sealed, read_sealed
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.hub import find_folder

if TYPE_CHECKING:
    from dovetail.workers.heads.parts import HeadCheckpoint

Ids = NDArray[np.int64]
HeadRows = int | Literal["all", "auto"]  # the values of `draft.head_rows`
AUTO_ROWS = 32_768
"""Rows that `auto` leaves, as in FastMTP and in most published EAGLE-3 heads."""
LEAST_BYTES = 16 << 20
"""`auto` leaves a smaller output head whole: it is read in 2 ms, and may stay in a CPU's cache."""
COUNTS = "token_counts.json"
"""The file with the counts of all tokens in a head's or a target's training data: {"counts": [V]}.
"""
PRIOR = 1_000.0
"""The weight of prior counts, in tokens of replies. With 5,254 tokens of replies to 36 shipped
prompts, 1,024 of 4,096 rows and the tokens of a session cover 98.5 % of other replies with weights
of 100 to 10,000, and 96 % without it."""
FIRST_SAVED, SAVED_AGAIN = 256, 16
"""Counts are saved after this many new tokens, or after this fraction of all counted ones."""
FOLDER, MOST_KEPT = "token_counts", 64

log = logging.getLogger(__name__)


def reduced_rows(setting: HeadRows, vocabulary: int, row_bytes: int, *, on_cpu: bool) -> int | None:
    """Return how many rows of an output head of this size are kept; None: all."""
    if setting == "all":
        return None
    if setting == "auto":
        pays = on_cpu and vocabulary * row_bytes > LEAST_BYTES
        setting = AUTO_ROWS if pays else vocabulary
    return setting if setting < vocabulary else None


class TokenCounts:
    """The counts of tokens in the replies that a head has drafted for, without their order."""

    def __init__(self, size: int, key: str) -> None:
        """`size`: V; `key`: the digest of the head."""
        self.counts: Ids = np.zeros(size, np.int64)
        self._key, self._unsaved = f"{key} {size}", 0
        name = hashlib.sha256(self._key.encode()).hexdigest()[:32]
        self._path: Path | None = cache_folder() / FOLDER / f"{name}.json"
        try:
            ids, counts = json.loads(read_sealed(self._path, self._key))
            self.counts[ids] = counts
        except FileNotFoundError:
            pass
        except (OSError, ValueError, IndexError) as error:
            log.warning("%s cannot be read (%s): counting restarts at zero", self._path, error)

    def add(self, tokens: Sequence[int]) -> None:
        np.add.at(self.counts, np.asarray(tokens), 1)
        self._unsaved += len(tokens)

    def save(self) -> bool:
        """Save the counts if there are enough new ones; log the first failure."""
        least = max(FIRST_SAVED, int(self.counts.sum()) // SAVED_AGAIN)
        if self._path is None or self._unsaved < least:
            return False
        ids = np.flatnonzero(self.counts)
        text = json.dumps([ids.tolist(), self.counts[ids].tolist()])
        self._unsaved = 0
        try:
            keep_sealed(self._path, self._key, text, MOST_KEPT)
        except OSError as error:
            log.warning("counts of tokens cannot be saved in %s: %s", self._path, error)
            self._path = None
        return True


class FrequentRows:
    """Chooses the rows of an output head by `draft.head_rows`."""

    def __init__(self, setting: HeadRows, target: str) -> None:
        """`target`: the head's target (folder or hub id)."""
        self._setting, self._target = setting, target
        self.counts: TokenCounts | None = None  # of replies, once the output head has been reduced

    def choose(self, head: "HeadCheckpoint", *, on_cpu: bool) -> Ids | None:
        """Return the ids of the rows, ascending; None: all. Raises `CheckpointError` if a head with
        a vocabulary of its own should have fewer."""
        vocabulary, output = head.spec.vocabulary_size, head.output
        if head.tokens is not None and isinstance(self._setting, int):
            own = f"{head.source} has an output head over {len(head.tokens)} tokens of its own"
            raise CheckpointError(f"{own}: leave draft.head_rows = {self._setting} out")
        row_bytes = output.shape[1] * output.element_size()
        rows = reduced_rows(self._setting, vocabulary, row_bytes, on_cpu=on_cpu)
        if rows is None or head.tokens is not None:
            return None
        self.counts = TokenCounts(vocabulary, head.digest)
        known = counts_in((head.source, self._target), vocabulary)
        return most_frequent(self.counts.counts, known, rows)


def counts_in(sources: Iterable[str], vocabulary: int) -> Ids:
    """Return the counts [V] in the first of these folders (or hub ids) that has some, else zeros.
    Raises `CheckpointError` if they are those of another vocabulary."""
    for file in (find_folder(source) / COUNTS for source in sources):
        if file.is_file():
            return _read_counts(file, vocabulary)
    return np.zeros(vocabulary, np.int64)


def _read_counts(file: Path, vocabulary: int) -> Ids:
    counts = read_json(file).get("counts")
    if (
        not isinstance(counts, list)
        or len(counts) != vocabulary
        or not all(type(count) is int and 0 <= count < 1 << 53 for count in counts)
    ):
        remedy = "remove it, and the order of the ids is used"
        raise CheckpointError(f"{file} is not a list of {vocabulary} counts of tokens: {remedy}")
    return np.array(counts, np.int64)


def most_frequent(counted: Ids, known: Ids, rows: int) -> Ids:
    """Return the ids of the `rows` tokens that are expected most often, ascending. `counted`: their
    counts [V] in replies; `known`: in training data, zeros if there are none."""
    prior = known + 1.0 / np.arange(1, len(known) + 1)  # falls with the id where nothing is known
    expected = counted + PRIOR * prior / prior.sum()
    return np.sort(np.argsort(-expected, kind="stable")[:rows])
