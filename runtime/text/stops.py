"""Stop strings in a text that comes in pieces, each letter of which is looked at once or twice:
Knuth, Morris and Pratt. Pure."""

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


def advance(pattern: str, matched: int, text: str, *, early: bool = False) -> tuple[int, int]:
    """Return how much of the pattern the text so far ends with, `matched` before `text`; and where
    in `text` the first whole one ends, 0: there is none. `early`: whole ones do not count.

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
            if not early:
                return matched, place
            matched = shorter[matched - 1]
    return matched, 0


class StopStrings:
    """Cuts a text before the first stop string, and holds back what may turn out to be the
    beginning of one. Takes time in proportion to the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched = [0] * len(self._stops)
        """Characters of each stop string that the text ends with."""

    def push(self, text: str, *, early: bool = False) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string is complete. `early`:
        one that this text completes does not count, though it may begin one that does."""
        if not self._stops or not text:
            return text, False
        before, self._held = len(self._held), self._held + text
        moved = [
            advance(stop, matched, text, early=early)
            for stop, matched in zip(self._stops, self._matched, strict=True)
        ]
        self._matched = [now for now, _ in moved]
        starts = [end - len(stop) for stop, (_, end) in zip(self._stops, moved, strict=True) if end]
        keep = max(self._matched)
        if starts:
            self._matched, keep = [0] * len(self._stops), 0
        cut = before + min(starts) if starts else len(self._held) - keep
        shown, self._held = self._held[:cut], "" if starts else self._held[cut:]
        return shown, bool(starts)

    def flush(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held
