"""Finding strings in a text that comes in pieces, each letter of which is looked at once or twice:
Knuth, Morris and Pratt. Pure."""

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
    """How much of the pattern the text so far ends with, `matched` before `text`; and where in
    `text` the first whole one ends, 0: there is none.

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
