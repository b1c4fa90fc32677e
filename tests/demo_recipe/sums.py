# ruff: noqa: SIM905
"""Word problems with small numbers, worked step by step. Every answer is computed, none is written
by hand."""

import random

from demo_recipe import words
from demo_recipe.grammar import say

COUNTED = """apples oranges pencils books marbles stickers cookies coins shells eggs balloons flowers cards stamps candles buttons toys
nuts carrots
stones keys cups plums berries cakes""".split()
CONTAINERS = "boxes bags baskets rows jars shelves tables plates trays".split()


def setting(rng: random.Random) -> dict[str, str]:
    """A person, another person, the things that are counted."""
    girl = rng.random() < 0.5
    name = rng.choice(words.GIRLS if girl else words.BOYS)
    other = rng.choice([n for n in words.GIRLS + words.BOYS if n != name])
    if rng.random() < 0.3:
        name, other = words.invented(rng), words.invented(rng)
    he, his = ("she", "her") if girl else ("he", "his")
    t, u = rng.sample(COUNTED, 2)
    return {
        "n": name,
        "m": other,
        "he": he,
        "his": his,
        "t": t,
        "u": u,
        "c": rng.choice(CONTAINERS),
        "rel": rng.choice(["brother", "sister", "friend", "mother", "father"]),
    }


def solved(ask: str, steps: str, s: dict[str, str], rng: random.Random) -> tuple[str, str]:
    """The problem and its solution in words."""
    return say(ask, s, rng), say(steps, s, rng)


def adding(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a + b)}
    return solved(
        "{n} has {a} {t}. [{he} buys {b} more|{he} finds {b} more|{his} {rel} gives {n} {b} more|"
        "{he} gets {b} more from {m}]. how many {t} does {n} have [now|in all|then]?",
        "[{n} has {a} {t} and gets {b} more|at first {n} has {a} {t}, and then {b} more]. {a} "
        "+ {b} = {r}. [{n} has {r} {t}|so {n} has {r} {t} now].",
        s,
        rng,
    )


def taking(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(5, 20)
    b = rng.randint(1, a - 2)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a - b)}
    return solved(
        "[{n} has|there are|{n} has got] {a} {t}[| on the table]. [{n} gives {b} to {m}|"
        "{n} loses {b} of them|{n} gives away {b}|{m} takes {b} of them]. how many {t} are left?",
        "[at first there are {a} {t}|there were {a} {t}|we start with {a} {t}]. {b} [are taken "
        "away|"
        "are gone]. {a} - {b} = {r}. [there are {r} {t} left|so {r} {t} are left].",
        s,
        rng,
    )


def times(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 6), rng.randint(2, 6)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a * b)}
    return solved(
        "[there are {a} {c} with {b} {t} [each|in each one]|{n} has {a} {c}. there are {b} {t} "
        "in each|"
        "{n} puts {b} {t} in each of {a} {c}]. how many {t} are there [in all|altogether]?",
        "[there are {a} {c} with {b} {t} each|each of the {a} {c} holds {b} {t}]. {a} x {b} = "
        "{r}. [there are {r} {t} in all|so there are {r} {t}].",
        s,
        rng,
    )


def sharing(rng: random.Random) -> tuple[str, str]:
    b, r = rng.randint(2, 6), rng.randint(2, 6)
    s = setting(rng) | {"a": str(b * r), "b": str(b), "r": str(r)}
    return solved(
        "{n} [wants to share|shares] {a} {t} [equally|fairly] among {b} children. how many {t} "
        "does each child get?",
        "{n} shares {a} {t} among {b} children. {a} / {b} = {r}. [each child gets {r} {t}|so "
        "each child gets {r} {t}].",
        s,
        rng,
    )


def two_steps(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(3, 10), rng.randint(2, 8)
    c = rng.randint(1, a + b - 2)
    s = setting(rng) | {"a": str(a), "b": str(b), "d": str(c), "x": str(a + b), "r": str(a + b - c)}
    return solved(
        "{n} has {a} {t}. {he} [buys|finds|gets] {b} more and [gives {d} to {his} {rel}|loses "
        "{d}|gives {d} to {m}]. how many {t} does {n} have [now|left]?",
        "first we add: {a} + {b} = {x}. then we take away: {x} - {d} = {r}. [{n} has {r} "
        "{t}|so {n} has {r} {t} now].",
        s,
        rng,
    )


def price(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 6), rng.randint(2, 6)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a * b)}
    if rng.random() < 0.5:
        return solved(
            "one [box|bag] of {t} costs {a} dollars. {n} buys {b} of them. how much does {he} pay?",
            "each costs {a} dollars, and {n} buys {b}. {a} x {b} = {r}. {n} pays {r} dollars.",
            s,
            rng,
        )
    paid = a * b + rng.randint(1, 8)
    s |= {"p": str(paid), "z": str(paid - a * b)}
    return solved(
        "{n} buys {b} [bags|boxes] of {t} for {a} dollars each. {he} pays with {p} dollars. "
        "how much does {he} get back?",
        "the {t} cost {b} x {a} = {r} dollars. {p} - {r} = {z}. {n} gets {z} dollars back.",
        s,
        rng,
    )


def compare(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(2, 16), 2)
    a, b = max(a, b), min(a, b)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a - b), "x": str(a + b)}
    if rng.random() < 0.5:
        return solved(
            "{n} has {a} {t} and {m} has {b} {t}. how many more {t} does {n} have?",
            "{n} has {a} and {m} has {b}. {a} - {b} = {r}. {n} has {r} more {t} than {m}.",
            s,
            rng,
        )
    return solved(
        "{n} has {a} {t} and {m} has {b} {t}. how many {t} do they have together?",
        "{n} has {a} and {m} has {b}. {a} + {b} = {x}. together they have {x} {t}.",
        s,
        rng,
    )


def multiple(rng: random.Random) -> tuple[str, str]:
    a, k = rng.randint(2, 6), rng.randint(2, 5)
    s = setting(rng) | {
        "a": str(a),
        "k": {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k],
        "kk": str(k),
        "r": str(a * k),
        "x": str(a * k + a),
    }
    if rng.random() < 0.6:
        return solved(
            "{n} has {a} {t}. {m} has {k} as many. how many {t} does {m} have?",
            "{m} has {k} as many as {n}. {kk} x {a} = {r}. {m} has {r} {t}.",
            s,
            rng,
        )
    return solved(
        "{n} has {a} {t}. {m} has {k} as many. how many {t} do they have together?",
        "{m} has {kk} x {a} = {r} {t}. together they have {a} + {r} = {x} {t}.",
        s,
        rng,
    )


def rates(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 6), rng.randint(2, 6)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a * b)}
    return solved(
        "{n} [reads {a} pages|walks {a} kilometres|bakes {a} cakes|saves {a} dollars] "
        "[every|each] day. how many is that in {b} days?",
        "{n} does {a} every day. in {b} days that is {a} x {b} = {r}. the answer is {r}.",
        s,
        rng,
    )


def age(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(4, 12), rng.randint(2, 9)
    s = setting(rng) | {"a": str(a), "b": str(b), "r": str(a + b), "q": str(a + b + b)}
    return solved(
        "{n} is {a} years old. [{his} [brother|sister] is {b} years older. how old is {his} "
        "sibling?|how old will {he} be in {b} years?]",
        "{n} is {a} years old. {a} + {b} = {r}. the answer is {r} years.",
        s,
        rng,
    )


def bare(rng: random.Random) -> tuple[str, str]:
    """A sum without a story."""
    sign, a, b = rng.choice("+-x"), rng.randint(1, 12), rng.randint(1, 12)
    if sign == "x":
        a, b = rng.randint(1, 6), rng.randint(1, 6)
    if sign == "-" and b > a:
        a, b = b, a
    r = a + b if sign == "+" else a - b if sign == "-" else a * b
    spoken = {"+": "plus", "-": "minus", "x": "times"}[sign]
    s = {"a": str(a), "b": str(b), "g": sign, "w": spoken, "r": str(r)}
    return solved(
        "[what is {a} {w} {b}?|what is {a} {g} {b}?|how much is {a} {w} {b}?|calculate {a} {g} "
        "{b}.|{a} {g} {b} = ?]",
        "[{a} {g} {b} = {r}.|{a} {w} {b} is {r}.]",
        s,
        rng,
    )


def order(rng: random.Random) -> tuple[str, str]:
    """Largest, smallest, sorting, even or odd, counting on."""
    numbers = rng.sample(range(1, 60), rng.randint(3, 5))
    shown, up = ", ".join(map(str, numbers)), sorted(numbers)
    n, k = rng.randint(1, 60), rng.choice([2, 3, 5, 10])
    return rng.choice(
        (
            (f"Which number is the largest: {shown}?", f"The largest number is {up[-1]}."),
            (f"Which number is the smallest: {shown}?", f"The smallest number is {up[0]}."),
            (f"Sort these numbers from small to large: {shown}.", ", ".join(map(str, up))),
            (f"Is {n} even or odd?", f"{n} is {'odd' if n % 2 else 'even'}."),
            (f"Put these numbers in order: {shown}.", ", ".join(map(str, up))),
            (f"Count from {n} to {n + 5}.", ", ".join(str(n + i) for i in range(6))),
            (
                f"What comes next: {n}, {n + k}, {n + 2 * k}, {n + 3 * k}?",
                f"The numbers grow by {k} each time. {n + 3 * k} + {k} = {n + 4 * k}. The next "
                f"number is {n + 4 * k}.",
            ),
            (f"What is half of {2 * n}?", f"Half of {2 * n} is {n}."),
            (f"What is double {n}?", f"Double {n} is {2 * n}."),
        )
    )


KINDS = (
    adding,
    taking,
    times,
    sharing,
    two_steps,
    price,
    compare,
    multiple,
    rates,
    age,
    bare,
    order,
)


def problem(rng: random.Random) -> tuple[str, str]:
    """A word problem and its solution."""
    return rng.choices(KINDS, (3, 3, 3, 2, 3, 2, 2, 2, 1, 1, 3, 2))[0](rng)
