"""Finds stop strings in a text that arrives in pieces. Pure."""

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=256)
def borders(pattern: str) -> tuple[int, ...]:
    """Return for every prefix of a pattern the length of its longest proper border."""
    found, length = [0], 0
    for letter in pattern[1:]:
        while length and pattern[length] != letter:
            length = found[length - 1]
        length += pattern[length] == letter
        found.append(length)
    return tuple(found)


def advance(pattern: str, matched: int, text: str, *, early: bool = False) -> tuple[int, int]:
    """Return how much of the pattern ends the text (`matched`: before `text`), and where its first
    complete match ends in the text, 0: nowhere. `early`: ignore complete matches."""
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
    """Cuts a text before the first stop string, in linear time; holds back possible beginnings."""

    def __init__(self, stops: Sequence[str], marks: str = "") -> None:
        """`marks`: characters for hidden tokens; stop strings without marks ignore them."""
        self._stops, self._marks = tuple(stops), frozenset(marks)
        self._unmarked = dict.fromkeys(map(ord, marks)) if marks else None
        self._held = ""
        self._matched = [0] * len(self._stops)
        """Characters of each stop string that are at the end of the text."""

    def push(self, text: str, *, early: bool = False) -> tuple[str, bool]:
        """Return the text to show, and whether a stop string is complete. `early`: ignore it."""
        if not self._stops or not text:
            return text, False
        self._held += text
        plain = text if self._unmarked is None else text.translate(self._unmarked)
        starts, holds = list[int](), list[int]()
        for number, stop in enumerate(self._stops):
            blind = bool(self._marks) and self._marks.isdisjoint(stop)
            read = plain if blind else text
            self._matched[number], end = advance(stop, self._matched[number], read, early=early)
            behind = len(read) - end if end else 0
            last = self._back(len(self._held), behind, blind)
            (starts if end else holds).append(
                self._back(last, len(stop) if end else self._matched[number], blind)
            )
        if starts:
            self._matched = [0] * len(self._stops)
        cut = min(starts or holds)
        shown, self._held = self._held[:cut], "" if starts else self._held[cut:]
        return shown, bool(starts)

    def _back(self, place: int, letters: int, blind: bool) -> int:
        """Return the index `letters` before `place`; `blind`: not counting marks."""
        while blind and letters:
            place -= 1
            letters -= self._held[place] not in self._marks
        return place - letters

    def flush(self) -> str:
        """Return the text held back."""
        held, self._held = self._held, ""
        return held
