"""Stop strings in a text that comes in pieces, each letter of which is looked at once or twice:
Knuth, Morris and Pratt. Pure."""

import copy
from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=256)
def borders(pattern: str) -> tuple[int, ...]:
    """For every beginning of a pattern, the length of the longest end of it that the pattern begins
    with, other than itself."""
    found, length = [0], 0
    for letter in pattern[1:]:
        while length and pattern[length] != letter:
            length = found[length - 1]
        length += pattern[length] == letter
        found.append(length)
    return tuple(found)


def advance(pattern: str, matched: int, text: str) -> tuple[int, int]:
    """Return how much of the pattern the text so far ends with, `matched` before `text`; and where
    in `text` the first whole one ends, 0: there is none.

    What lies behind a whole one is not looked at.
    """
    shorter, place, whole = borders(pattern), 0, len(pattern)
    while place < len(text):
        if not matched:
            place = text.find(pattern[0], place)
            if place < 0:
                return 0, 0
        letter = text[place]
        while matched and pattern[matched] != letter:
            matched = shorter[matched - 1]
        matched += pattern[matched] == letter
        place += 1
        if matched == whole:
            return matched, place
    return matched, 0


class StopStrings:
    """Cuts a text before the first stop string, and holds back what may turn out to be the
    beginning of one. Takes time in proportion to the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched = self._ahead = [0] * len(self._stops)
        """Characters of each stop string that the text ends with; `_ahead`: the text with what is
        foreseen."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string is complete."""
        if not self._stops or not text:
            return text, False
        before, self._held = len(self._held), self._held + text
        self._matched, starts = self._advance(self._matched, text)
        keep = max(self._matched)
        if starts:
            self._matched, keep = [0] * len(self._stops), 0
        self._ahead = self._matched
        cut = before + min(starts) if starts else len(self._held) - keep
        shown, self._held = self._held[:cut], "" if starts else self._held[cut:]
        return shown, bool(starts)

    def foresees(self, text: str) -> bool:
        """Return whether a stop string will be complete if this text follows what was pushed and
        foreseen since."""
        if not self._stops or not text:
            return False
        self._ahead, starts = self._advance(self._ahead, text)
        return bool(starts)

    def peek(self, text: str) -> tuple[str, bool]:
        """Return what `push` would."""
        return copy.copy(self).push(text)

    def flush(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, matched: Sequence[int], text: str) -> tuple[list[int], list[int]]:
        """Return how much of each the text ends with now, and where those that are whole begin,
        counted from where `text` does."""
        moved = [
            advance(stop, before, text) for stop, before in zip(self._stops, matched, strict=True)
        ]
        starts = [end - len(stop) for stop, (_, end) in zip(self._stops, moved, strict=True) if end]
        return [now for now, _ in moved], starts
