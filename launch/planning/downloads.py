"""Drafts that may be downloaded for a target, from a dated table. No network is used."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

from dovetail.protocol.settings import DRAFT_KINDS, Frozen

TABLE = Path(__file__).with_name("drafts.toml")
CONVERTED = (
    r"(?=$|[/@]|\.gguf|[-_.](i?q\d|tq\d|ud|fp?\d|bf16|mxfp4|nvfp4|gguf|awq|gptq|int\d|w\da\d))"
)
"""What may follow a model's name in a path: nothing, a separator or a conversion suffix."""


class Download(Frozen):
    """A draft that may be downloaded."""

    target: str = Field(min_length=1)  # name without its owner
    id: str  # empty: it is in the target's checkpoint
    kind: str
    gb: float | None = None
    tokens: float | None = None  # published accepted length, the target's own token included
    source: str = Field(min_length=1)


@dataclass(frozen=True)
class Downloads:
    """The table of drafts."""

    read: str  # the day on which its sources were read
    drafts: tuple[Download, ...]

    def of(self, target: str) -> list[Download]:
        """Return the drafts for a target, given as hub id or path, whose kinds this version loads,
        the longest published accepted length first."""
        name = re.sub(r"models--.*?--", "/", target)  # a folder of the hub's cache
        found = [
            one
            for one in self.drafts
            if one.kind in DRAFT_KINDS
            and re.search(rf"(^|[/_-]){re.escape(one.target)}{CONVERTED}", name, re.IGNORECASE)
        ]
        return sorted(found, key=lambda one: -(one.tokens or 0.0))


@cache
def downloads() -> Downloads:
    """Return the table."""
    content = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return Downloads(content["read"], tuple(Download(**one) for one in content["draft"]))
