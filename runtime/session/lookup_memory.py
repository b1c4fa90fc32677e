"""The tokens of earlier prompts and replies, in which look-ups also search. They are never written
to disk, and those of one API key are never found for another.

The tokens are in a ring of fixed size, with separators between texts. As in the hash chains of
LZ77, a table maps a hash of owner and n-gram to the place after its newest occurrence, and each
place links to the previous one. So a token is added, and the newest occurrences of an n-gram are
found, in constant time. Texts are indexed a few tokens at a time (`step`). Pure."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from dovetail.protocol.lookup import LONGEST, OCCURRENCES, matching

SIZES = (8, 3)
"""Lengths of the n-grams that are indexed; shorter matches in other texts mean little."""
TOKEN_BYTES = 4 + 4 + 2 * 8 * len(SIZES)  # token, owner; a link and a table entry per size
LINKS = 64  # the most places looked at for one n-gram: others may share its hash
NOWHERE, SEPARATOR = -1, -1
LENGTHS = 64  # the most tokens of a continuation
MOST_OWNERS = 256  # beyond it, the least recently active one is forgotten
STEP = 256  # tokens indexed at a time: some 0.5 ms

Recalled = tuple[tuple[int, ...], ...]
"""Occurrences of a log's last tokens: each how many tokens match, then the tokens that followed."""


class LookupMemory:
    """The texts of all owners."""

    def __init__(self, size: int) -> None:
        """`size`: the bytes of the ring and its index."""
        self._room = room = max(size // TOKEN_BYTES, 1)
        self._tokens = array("i", [SEPARATOR]) * room
        self._owners = array("i", [NOWHERE]) * room
        self._links = {size: array("q", [NOWHERE]) * room for size in SIZES}
        self._table = {size: array("q", [NOWHERE]) * room for size in SIZES}
        self._stop = self._count = 0  # tokens, and owner numbers, so far
        self._numbers: dict[tuple[str, str], int] = {}
        """The number of each pair of owner and vocabulary, the most recently active last."""
        self._last: dict[int, array[int]] = {}  # the last text of each
        self._waiting: deque[tuple[int, Iterator[int]]] = deque()
        """Owners and the tokens that have not been indexed yet."""
        self._recent: list[int] = []  # the last tokens of the text that is being indexed

    def add(self, owner: str, vocabulary: str, log: Sequence[int]) -> None:
        """Add a text; `step` indexes it. The beginning that it shares with the owner's last text,
        such as the earlier turns of a conversation, is left out."""
        if (number := self._numbers.pop((owner, vocabulary), None)) is None:
            number, self._count = self._count, self._count + 1
        self._numbers[owner, vocabulary] = number
        if len(self._numbers) > MOST_OWNERS:
            self.forget(next(iter(self._numbers))[0])
        pairs = zip(self._last.get(number, ()), log, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._last[number] = array("i", log)
        new = log[max(0, shared - LONGEST, len(log) - self._room + 2) :]
        self._waiting.append((number, iter((*new, SEPARATOR))))

    def forget(self, owner: str) -> bool:
        """Remove an owner's texts; return whether there were any."""
        gone = {number for key, number in self._numbers.items() if key[0] == owner}
        self._numbers = {key: one for key, one in self._numbers.items() if one not in gone}
        self._last = {number: last for number, last in self._last.items() if number not in gone}
        self._waiting = deque(one for one in self._waiting if one[0] not in gone)
        self._recent.clear()
        for place, number in enumerate(self._owners if gone else ()):
            if number in gone:
                self._tokens[place], self._owners[place] = SEPARATOR, NOWHERE
        return bool(gone)

    def step(self, tokens: int = STEP) -> None:
        """Index at most `tokens` tokens of the waiting texts."""
        while self._waiting and tokens > 0:
            number, left = self._waiting[0]
            new = [*islice(left, tokens)]
            for token in new:
                self._append(number, token)
            tokens -= len(new)
            if not new or new[-1] == SEPARATOR:
                self._waiting.popleft()

    def _append(self, number: int, token: int) -> None:
        room, place = self._room, self._stop % self._room
        self._tokens[place], self._owners[place] = token, number
        recent = self._recent
        if token == SEPARATOR:
            recent.clear()
        else:
            recent.append(token)
        for size in SIZES:
            if len(recent) >= size:
                slot = hash((number, *recent[-size:])) % room
                self._links[size][place] = self._table[size][slot]
                self._table[size][slot] = self._stop
        del recent[: -SIZES[0]]
        self._stop += 1

    def find(self, owner: str, vocabulary: str, log: Sequence[int], most: int) -> Recalled:
        """Return the occurrences of the last tokens of `log` (its last `LONGEST` suffice) in the
        owner's texts that were followed by anything, at most `most` tokens of each: those of the
        longest n-gram first, and among these the newest."""
        if (number := self._numbers.get((owner, vocabulary))) is None:
            return ()
        found: dict[int, tuple[int, ...]] = {}
        oldest = self._stop - self._room
        for size in SIZES:
            slot = hash((number, *log[-size:])) % self._room
            place, looked = self._table[size][slot], 0
            while place >= max(oldest, 0) and looked < LINKS and len(found) < OCCURRENCES:
                at, looked = place % self._room, looked + 1
                if self._owners[at] == number and place not in found:
                    match = min(matching(self._tokens, at + 1, log), place + 1 - oldest)
                    left = min(most, LENGTHS, self._stop - place - 1)
                    after = self._after(at + 1, left) if match >= size else ()
                    if after:
                        found[place] = match, *after
                place = self._links[size][at]
        return (*found.values(),)

    def _after(self, at: int, most: int) -> tuple[int, ...]:
        """Return the tokens from a place of the ring up to the end of their text."""
        return (*takewhile(lambda token: token != SEPARATOR, self._tokens[at : at + most]),)
