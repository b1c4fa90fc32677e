"""A small phrase grammar: `[a|b|c]` is a choice (it may nest), `{slot}` is filled from a mapping.
It knows no words of its own."""

import random
import re
from collections.abc import Mapping, Sequence

INNERMOST = re.compile(r"\[([^\[\]]*)\]")
ARTICLE = re.compile(r"\b([Aa]) (?=(?:[aeiou]|hour\b|honest)(?!ne?\b|nicorn|seful|sed\b|niform))")
SENTENCE = re.compile(r"(^|[.!?] |\.\" |\n|(?:(?<=[.,:!?\"]\s)|(?<=\n)|^)\")(\"?)([a-z])")

GOES_ON = re.compile(
    r'(," (?:\w+ (?:said|thought)|said \w+), ")([A-Z])(?=[a-z])'
)  # "Wait," he said, "and listen."


def choose(template: str, rng: random.Random) -> str:
    """Resolve every choice of the template, the inner ones first."""
    while found := INNERMOST.search(template):
        template = (
            template[: found.start()] + rng.choice(found[1].split("|")) + template[found.end() :]
        )
    return template


def articles(text: str) -> str:
    """Write `an` where the next word begins with a vowel."""
    return ARTICLE.sub(lambda m: m[1] + "n ", text)


def sentences(text: str) -> str:
    """Begin every sentence with a capital letter."""
    return GOES_ON.sub(
        lambda m: m[1] + m[2].lower(), SENTENCE.sub(lambda m: m[1] + m[2] + m[3].upper(), text)
    )


def say(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """One expansion of the template: choices, slots, articles and capitals."""
    return sentences(articles(choose(template, rng).format_map(slots)))


def in_order(stock: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return that many of the stock, in its order: what follows the order never repeats itself."""
    return [stock[i] for i in sorted(rng.sample(range(len(stock)), count))]


def listing(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
