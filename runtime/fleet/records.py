"""What pairs of a draft and a target have learned, in the user's cache: a file for each pair of
models, machines and settings, written atomically. A file that cannot be read is replaced."""

import hashlib
import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dovetail.protocol.files import keep_sealed, read_sealed
from dovetail.protocol.messages import Hello
from dovetail.protocol.profile import machine_key
from dovetail.runtime.control.on_off import Experience
from dovetail.runtime.control.pairs import Pair
from dovetail.runtime.costs.rounds import PairCosts

log = logging.getLogger("dovetail.coordinator")

FORMAT = 1  # raised when records of earlier releases must not be read
KINDS = (Pair, PairCosts, Experience)
"""Classes whose fields a record contains. One of a release with other fields is not read."""
FOLDER = "pairs"
MOST_KEPT = 256


class PairRecords:
    """The records in one folder; if it cannot be written, that is reported once."""

    def __init__(self, cache: Path) -> None:
        self._folder, self._here = cache / FOLDER, (machine_key(), socket.gethostname())
        self._refused = False
        self._saved: dict[str, str] = {}  # the last text saved under each key

    def find(self, draft: Hello, target: Hello) -> Mapping[str, Any] | None:
        """Return the record of a pair; None if there is none that can be read."""
        key = self._key(draft, target)
        try:
            record: Mapping[str, Any] = json.loads(read_sealed(self._file(key), key))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            text = "%s cannot be read (%s): drafting costs are learned again"
            log.warning(text, self._file(key), error)
            return None
        return record

    def keep(self, draft: Hello, target: Hello, record: Mapping[str, Any]) -> None:
        """Save the record of a pair if it has changed; log the first failure."""
        key, text = self._key(draft, target), json.dumps(record)
        if self._saved.get(key) == text:
            return
        try:
            keep_sealed(self._file(key), key, text, MOST_KEPT)
            self._saved[key] = text
        except OSError as error:
            if not self._refused:
                words = "drafting costs cannot be saved in %s (%s): every start learns them again"
                log.warning(words, self._folder, error.strerror or error)
            self._refused = True

    def _file(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def _key(self, draft: Hello, target: Hello) -> str:
        machine, host = self._here
        names = " ".join(field.name for kind in KINDS for field in fields(kind))
        facts = [str(FORMAT), names, machine, str(target.fingerprint), target.placement]
        facts.append(draft.weights)
        for hello in (target, draft):
            away = "" if hello.host == host else hello.host
            facts += [away, hello.model, hello.device, hello.kernels]
            facts += [str(hello.threads), str(len(hello.cores))]
        return "\n".join(facts)
