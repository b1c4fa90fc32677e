"""How models write thoughts and tool calls: the table `formats.toml`."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from re import escape
from typing import Any

KEYS = ("arguments", "parameters")
BLANK = r"\s{0,8}"
"""White space around markers, which is no text of the reply. Bounded, since it is searched for."""


@dataclass(frozen=True)
class Thoughts:
    """What opens and closes a model's thoughts."""

    open: str
    close: str


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    name: str
    markers: Sequence[str]
    parallel: bool
    write: Sequence[str]
    calls: Mapping[str, Any]
    between: str = ""
    around: Sequence[str] = ("", "")
    arguments: str = "json"
    argument: Sequence[str] = ()
    reply: Sequence[str] = ()
    turn: str = ""
    close_after: bool = False
    """True if what follows the calls is no part of the last one."""


@dataclass(frozen=True)
class Format:
    """What is read from a model's replies."""

    thoughts: Thoughts | None = None
    family: Family | None = None

    @property
    def calls(self) -> Mapping[str, Any]:
        return self.family.calls if self.family is not None else {}

    @property
    def plain_json(self) -> bool:
        """Whether calls are written in JSON, and not in a dialect of it."""
        return self.calls.get("content") == "json" and "content_args" not in self.calls

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of a call's name and arguments, where it is an object with both."""
        transform = str(self.calls.get("transform"))
        return "name", next((key for key in KEYS[1:] if f".{key}}}" in transform), KEYS[0])

    @cached_property
    def markers(self) -> frozenset[str]:
        """All texts that may be or contain special tokens of the format."""
        found = [self.thoughts.open, self.thoughts.close] if self.thoughts is not None else []
        if (one := self.family) is not None:
            found += [*one.markers, *one.write, *one.around, *one.argument, *one.reply, one.turn]
            found += ["<|python_tag|>"] if one.name == "llama" else []
        return frozenset(found)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of transformers' template of responses."""
        fields: dict[str, Any] = {"content": {"content": "text"}}
        turn = f"(?:{escape(self.family.turn)})?" if self.family and self.family.turn else ""
        for name, pair in (
            ("reasoning", self.thoughts and (self.thoughts.open, self.thoughts.close)),
            ("reply", self.family and self.family.reply),
        ):
            if pair:
                fields[name] = {
                    "open_pattern": f"{BLANK}{turn}{escape(pair[0])}{BLANK}",
                    "close_pattern": f"{BLANK}{escape(pair[1])}{BLANK}",
                }
        if self.family is not None:
            if self.family.close_after:
                fields["after"] = {"open": self.family.around[1]}
            fields["tool_calls"] = dict(self.family.calls)
        return fields


@lru_cache(1)
def table() -> tuple[Sequence[Thoughts], Sequence[Family]]:
    """Return the rows of `formats.toml`."""
    text = Path(__file__).with_name("formats.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    return [Thoughts(**one) for one in rows["thoughts"]], [
        Family(**one) for one in rows["families"]
    ]
