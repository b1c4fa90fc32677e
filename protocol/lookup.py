"""A look-up in a log of tokens: the earlier occurrences of its last tokens, and how likely their
continuations are to follow again. A look-up draft proposes from it, and the coordinator uses it to
predict, without a message, whether such a draft would propose anything. Pure.

Prompt lookup (Saxena, "Prompt lookup decoding", 2023) proposes one continuation; here all earlier
occurrences vote. One that matches in m tokens gives the next token a vote of ODDS[m]; all unseen
tokens together weigh 1. So a token's probability is the sum of its votes over 1 + all votes. At the
next level, the occurrences that agree have matched one more token, and the others do not vote. An
occurrence that reaches the end of the log continues with its own proposal. Occurrences in earlier
texts (`runtime/session/lookup_memory.py`) also vote, with separate odds."""

import math
from collections import defaultdict
from collections.abc import Sequence

SIZES = (4, 3, 2, 1)
"""Lengths of the n-grams to search for; longer matches are found by comparing backwards."""
OCCURRENCES = 24
"""At most this many earlier occurrences vote: those of the longest n-grams first, and among these
the newest."""
CLASSES = (*range(9), *(9,) * 8, *(10,) * 16, *(11,) * 32)
"""The class of a match by the number of its tokens; those beyond the last are not compared."""
LONGEST = len(CLASSES) - 1
ODDS = (0.0, 0.13, 0.72, 1.0, 1.5, 2.5, 3.0, 4.0, 8.0, 12.0, 30.0, 80.0)
"""Initial odds by the class of the match. Fitted by maximum likelihood, and rounded, to replies of
the embedded target to the shipped prompts and of SmolLM2 to 136 others (alpaca, CNN, GSM8K,
HumanEval, MT-bench, NQ, edited code, quotations), at temperatures 0 and 1. The mean loss of these
nine sets is 0.77 nats per token whose predecessor had occurred before, 0.76 with learned odds."""
PACE = 0.1  # the step of learning, in logarithms of odds
LEAST_ODDS, MOST_ODDS = 0.01, 1000.0
CHARACTERS = 0x110000  # tokens that differ by this share a character: at worst a wrong vote

Match = tuple[Sequence[int], int, int]
"""An occurrence: the text, the position after it, and how many tokens match before that."""
Matches = Sequence[Match]


def in_texts(recalled: Sequence[Sequence[int]]) -> Matches:
    """Return occurrences in other texts, each sent as the number of tokens that match, then the
    tokens that followed."""
    return [(text, 1, min(text[0], LONGEST)) for text in recalled if len(text) > 1 and text[0] > 0]


class SearchedLog:
    """A log and the same tokens as characters of a string, which Python searches fast."""

    def __init__(self, log: list[int]) -> None:
        """`log` may grow at its end."""
        self.log, self._text = log, ""
        self.odds = {True: [*ODDS], False: [*ODDS]}  # by whether the log itself has the occurrence
        self.recalled: Matches = ()
        """Occurrences of the log's last tokens in earlier texts."""
        self._found: Matches = ()
        self._length = 0  # of the log when these occurrences were found

    @property
    def recurs(self) -> bool:
        """Whether the last two tokens have occurred before; a single one means little."""
        text = self._caught_up()
        return bool(self.recalled) or text.rfind(text[-2:], 0, len(text) - 1) >= 0

    def _caught_up(self) -> str:
        if new := self.log[len(self._text) :]:
            self._text += "".join([chr(token % CHARACTERS) for token in new])
        return self._text

    def occurrences(self) -> Matches:
        """Return the earlier occurrences of the log's last tokens. First, the odds learn from the
        tokens that followed those of the last call."""
        text = self._caught_up()
        if len(text) == self._length:
            return self._found
        self._learn(self._found, self.log[self._length :])
        places: dict[int, None] = {}
        for size in SIZES:
            last, end = text[-size:], len(text) - 1
            while len(places) < OCCURRENCES and (start := text.rfind(last, 0, end)) >= 0:
                end = start + len(last) - 1
                places[end + 1] = None
        log = self.log
        own = [(log, place, match) for place in places if (match := matching(log, place, log))]
        self._found, self._length = [*own, *self.recalled], len(text)
        return self._found

    def followers(
        self, matches: Matches, path: Sequence[int] = ()
    ) -> tuple[dict[int, float], dict[int, list[Match]]]:
        """Return the votes for each token that followed these occurrences, and the occurrences that
        agree on it, whose matches are one longer. `path`: tokens assumed after the log."""
        votes: dict[int, float] = {}
        agreeing: dict[int, list[Match]] = {}
        log, length = self.log, len(self.log)
        for text, position, match in matches:
            if position < len(text):
                token = text[position]
            elif text is log:
                token = path[position - length]
            else:
                continue
            odds = self.odds[text is log][CLASSES[match]]
            votes[token] = votes.get(token, 0.0) + odds
            agreeing.setdefault(token, []).append((text, position + 1, min(match + 1, LONGEST)))
        return votes, agreeing

    def _learn(self, matches: Matches, tokens: Sequence[int]) -> None:
        """Learn that `tokens` followed these occurrences: for each token, the odds take a gradient
        step on the log-probability that they gave it."""
        path: list[int] = []
        for token in tokens:
            votes, agreeing = self.followers(matches, path)
            if not votes:
                return
            total, steps = 1.0 + sum(votes.values()), defaultdict[tuple[bool, int], float](float)
            for follower, those in agreeing.items():
                slope = (1.0 / votes[token] if follower == token else 0.0) - 1.0 / total
                for text, _, match in those:
                    place = text is self.log, CLASSES[match - 1]
                    steps[place] += slope * self.odds[place[0]][place[1]]
            for (own, kind), step in steps.items():
                learned = self.odds[own][kind] * math.exp(PACE * step)
                self.odds[own][kind] = min(max(learned, LEAST_ODDS), MOST_ODDS)
            path.append(token)
            matches = agreeing.get(token, ())

    def chances(self, most: int, least: float) -> list[float]:
        """Return the probabilities of the first 1, 2, ... tokens of the likeliest continuation: at
        most `most`, none below `least`. Empty: a look-up proposes nothing."""
        path, found, chance, matches = list[int](), list[float](), 1.0, self.occurrences()
        while matches and len(path) < most:
            votes, agreeing = self.followers(matches, path)
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)
            chance *= votes[token] / (1.0 + sum(votes.values()))
            if chance < least:
                break
            path.append(token)
            found.append(chance)
            matches = agreeing[token]
        return found


def matching(text: Sequence[int], position: int, log: Sequence[int]) -> int:
    """Return how many tokens of `text` before `position` match the last ones of `log`, at most
    `LONGEST`."""
    length = len(log)
    most = min(position, length, LONGEST)
    return next((n for n in range(most) if text[position - 1 - n] != log[length - 1 - n]), most)
