"""What differs from one recording to the next, replaced: paths, ids, dates, and this machine."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HOME = "/home/user"
MODULES = "/usr/lib/node_modules"
DAY = datetime(2026, 1, 2, tzinfo=UTC)
DATES = ("%Y-%m-%d", "%a %b %d %Y", "%A, %B %d, %Y")
UUID = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
HEX = re.compile(r"\b[0-9a-f]{64}\b")
CHUNK = re.compile(r"Chunk ID: [0-9a-f]{6}")
MILLISECONDS = re.compile(r"\b1[78]\d{11}\b")
"""A time of day since 2023, in milliseconds."""


def normalised(
    requests: Sequence[Mapping[str, Any]], home: Path, modules: Path
) -> list[dict[str, Any]]:
    """The requests of a session as they would be on any machine and any day."""
    for request in requests:
        metadata = request.get("body", {}).get("client_metadata", {})
        for name, value in metadata.items():  # codex writes the same in a random order
            if value.startswith("{"):
                metadata[name] = json.dumps(json.loads(value), sort_keys=True)
        if metadata:
            request["body"]["client_metadata"] = dict(sorted(metadata.items()))
    text = json.dumps(requests, ensure_ascii=False)
    for path, name in ((modules, MODULES), (home, HOME)):
        for form in (str(path), re.sub(r"[^A-Za-z0-9]", "-", str(path))):
            text = text.replace(form, name if form == str(path) else name.replace("/", "-"))
    text = text.replace(os.uname().release, "6.1.0")
    for form in DATES:
        text = text.replace(datetime.now(UTC).strftime(form), DAY.strftime(form))
    ids: dict[str, str] = {}
    text = UUID.sub(
        lambda found: ids.setdefault(found[0], f"00000000-0000-4000-8000-{len(ids) + 1:012}"), text
    )
    text = HEX.sub("0" * 64, text)
    text = CHUNK.sub("Chunk ID: 000000", text)
    text = MILLISECONDS.sub("1767312000000", text)
    found: list[dict[str, Any]] = json.loads(text)
    return found
