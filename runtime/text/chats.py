"""Conversations for a chat template: control tokens that users write stay plain text.

Such a token gets the character `BREAK` behind its first character. The template copies it, and the
prompt is tokenized in pieces between the breaks, so that only the template itself writes control
tokens. Pure.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

BREAK = "\ufdd0"  # a noncharacter, which Unicode reserves for internal use
THOUGHTS = frozenset(("<think>", "</think>", "[THINK]", "[/THINK]"))
"""Control tokens that templates search for in the earlier replies of an assistant."""
Message = Mapping[str, Any]


class ControlTokens:
    """The tokens that a chat template writes: special ones, and added ones that it contains."""

    def __init__(self, added: Iterable[tuple[str, bool]], template: str) -> None:
        """`added`: the spellings of added tokens, and whether they are special."""
        spelt = [
            one
            for one, special in added
            if len(one) > 1 and (special or (one in template and not one.isspace()))
        ]
        self._any = _one_of(spelt)
        self._in_replies = _one_of(one for one in spelt if one not in THOUGHTS)

    def break_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages with breaks in all control tokens."""
        return [
            {
                name: value if name == "role" else _broken(value, self._of(str(message["role"])))
                for name, value in message.items()
            }
            for message in messages
        ]

    def break_values(self, values: Any) -> Any:
        """Return a JSON value with breaks in the control tokens of its strings."""
        return _broken(values, self._any)

    def _of(self, role: str) -> re.Pattern[str] | None:
        return self._in_replies if role == "assistant" else self._any


def _one_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _broken(value: Any, tokens: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        return _broken_texts([value], tokens)[0]
    if isinstance(value, list):
        if value and all(isinstance(part, dict) and "text" in part for part in value):
            texts = _broken_texts([part["text"] for part in value], tokens)
            return [{**part, "text": text} for part, text in zip(value, texts, strict=True)]
        return [_broken(one, tokens) for one in value]
    if isinstance(value, dict):
        return {_broken(name, tokens): _broken(one, tokens) for name, one in value.items()}
    return value


def _broken_texts(texts: Sequence[str], tokens: re.Pattern[str] | None) -> list[str]:
    """Return texts, which a template may join, with breaks; given breaks are left out."""
    parts = [text.replace(BREAK, "") for text in texts]
    if tokens is None:
        return parts
    ends = list(accumulate(map(len, parts)))
    for match in reversed(list(tokens.finditer("".join(parts)))):
        number = bisect_right(ends, match.start())
        place = match.start() + 1 - (ends[number - 1] if number else 0)
        parts[number] = f"{parts[number][:place]}{BREAK}{parts[number][place:]}"
    return parts
