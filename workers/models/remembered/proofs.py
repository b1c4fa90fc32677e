"""Cached proofs: a checkpoint that was proved against transformers is loaded without it the next
time. The key has all that a proof depends on: checkpoint, weights, our sources, kernels, versions
of torch, transformers and Python; not the instruction set. A loaded model has to give the proved
model's logits, bit for bit."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.files import cache_folder, tidy
from dovetail.workers import kernels

log = logging.getLogger(__name__)

FOLDER = "proofs"
MOST_KEPT = 64  # most proofs that are kept; the oldest are removed
ROOM = Path(__file__).parent.parent.parent
SOURCES = ("models", "kernels", "devices")  # folders that decide what a model computes


@dataclass(frozen=True)
class Proof:
    """transformers' facts that loading needs, and the digest of the model's logits."""

    config: Mapping[str, Any]  # the configuration with transformers' defaults
    modules: Sequence[Sequence[Any]]  # path, kind and measures of each module, parents first
    base: str  # the path of the part without the head
    embedding: str
    head: str
    stored: Mapping[str, str] | None  # parameter -> tensor of the checkpoint; None: of pieces
    tied: Mapping[str, str]  # tensor -> one that may stand for it, of models in pieces
    transposed: Sequence[str]
    angles: Mapping[str, tuple[Sequence[float], float]]  # table -> its frequencies and factor
    attention: Sequence[Mapping[str, Any]]
    """The arguments with which each layer calls its attention, in the form of `attention.Noted`."""
    logits: str  # the digest of logits, see `recall.sample`
    made: str  # the day of the proof


LIBRARIES = ("torch", "transformers", "safetensors")
"""Distributions whose whole METADATA counts: finding the version in it takes longer."""


@cache
def basis() -> str:
    """Return the digest of everything but the model that a proof depends on."""
    state = kernels.LIBRARY.stat()
    whole = hashlib.sha256()
    facts = (
        *(importlib.metadata.distribution(name).read_text("METADATA") for name in LIBRARIES),
        platform.python_version(),
        platform.machine(),
        (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns),
    )
    whole.update(repr(facts).encode())
    for folder in SOURCES:
        for file in sorted((ROOM / folder).rglob("*.py")):
            whole.update(f"\0{file.relative_to(ROOM)}\0".encode() + file.read_bytes())
    return whole.hexdigest()


class Proofs:
    """The proofs of one configuration, in the user's cache."""

    def __init__(self, configuration: bytes) -> None:
        """`configuration`: the content of config.json."""
        self.folder, self._configuration = cache_folder() / FOLDER, configuration

    @cached_property
    def group(self) -> str:
        """Return the key of the configuration's proofs; requires the kernels."""
        return hashlib.sha256(f"{basis()}\0".encode() + self._configuration).hexdigest()[:32]

    @property
    def known(self) -> bool:
        """Return whether this configuration has proofs; needs the kernels."""
        return kernels.available() and any(self.folder.glob(f"{self.group}-*.json"))

    def find(self, key: str) -> Proof | None:
        """Return the proof stored under a key; None if it is missing or damaged."""
        try:
            seal, _, text = self._file(key).read_text(encoding="utf-8").partition("\n")
            if seal != _seal(key, text):
                raise ValueError("it is not what was written")
            return Proof(**json.loads(text))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning(
                "the proof %s cannot be read (%s): it is made again", self._file(key), error
            )
            return None

    def keep(self, key: str, proof: Proof) -> None:
        """Save a proof; log a failure."""
        text = json.dumps(dataclasses.asdict(proof))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.folder, suffix=".new", delete=False, encoding="utf-8"
            ) as file:
                file.write(f"{_seal(key, text)}\n{text}")
            Path(file.name).replace(self._file(key))
            tidy(self.folder, MOST_KEPT)
        except OSError as error:
            why = error.strerror or error
            log.warning("proofs cannot be saved in %s (%s)", self.folder, why)

    def drop(self, key: str) -> None:
        """Forget a proof."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{self.group}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def tell_proof(day: str, name: str) -> None:
    """Report on stderr if a worker's model was loaded by a proof, with its date."""
    if day:
        print(
            f"{name}: loaded by its proof of {day}, in {cache_folder() / FOLDER}", file=sys.stderr
        )


def today() -> str:
    """Return the date in the format of proofs."""
    return time.strftime("%Y-%m-%d")


def digest_of_logits(logits: torch.Tensor) -> str:
    """Return the SHA-256 of logits [R, V], bit for bit."""
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()


def _seal(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\0{text}".encode()).hexdigest()
