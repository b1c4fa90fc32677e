"""Work on a text that the prompt brings: sum it up, answer a question about it, change its tense,
its tone or its order."""

import random

from demo_recipe import words
from demo_recipe.facts import LISTS, OPPOSITES
from demo_recipe.grammar import say, sentences

EVENTS: tuple[tuple[str, str, str], ...] = (  # what happened, what came of it, both in few words
    (
        "[the bus was late|the bus did not come|{n} missed the bus]",
        "{n} walked to {to}",
        "{n} had to walk because [there was no bus|of the bus]",
    ),
    (
        "it rained all day",
        "{n} stayed at home and read a book",
        "{n} read at home because of the rain",
    ),
    ("{n} forgot {his} lunch", "{m} gave {n} half of a sandwich", "{m} shared lunch with {n}"),
    (
        "{n} found a wallet in the street",
        "{he} took it to the police",
        "{n} found a wallet and handed it in",
    ),
    (
        "{n} practised the piano every day for a month",
        "{he} played very well at the concert",
        "{n} played well because {he} had practised",
    ),
    (
        "the shop was closed",
        "{n} could not buy any bread",
        "{n} got no bread because the shop was closed",
    ),
    (
        "{n} planted tomatoes in spring",
        "in summer {he} had more than {he} could eat",
        "{n} grew many tomatoes",
    ),
    (
        "{n} lost {his} key",
        "{he} had to wait for {m} in front of the door",
        "{n} had no key and waited for {m}",
    ),
    (
        "the lights went out during the storm",
        "{n} and {m} lit some candles",
        "{n} and {m} used candles when the lights went out",
    ),
    ("{n} did not sleep well", "{he} was tired all day", "{n} was tired after a bad night"),
    (
        "{n} and {m} wanted to go swimming",
        "the water was too cold, so they went home",
        "{n} and {m} did not swim because the water was cold",
    ),
    (
        "{n} helped {m} with the garden",
        "{m} baked a cake to say thank you",
        "{m} thanked {n} for the help with a cake",
    ),
    (
        "{n} left the window open",
        "a bird flew into the kitchen",
        "a bird came in through the window that {n} had left open",
    ),
    (
        "{n} saved money for a year",
        "{he} bought a new bicycle",
        "{n} bought a bicycle with {his} savings",
    ),
    (
        "the train stopped for two hours",
        "{n} came too late to the meeting",
        "{n} was late because of the train",
    ),
    (
        "{n} ate too many {food}",
        "in the evening {he} felt sick",
        "{n} felt sick from eating too many {food}",
    ),
    (
        "{n} wrote a long letter to {m}",
        "a week later {m} came to visit",
        "{m} visited {n} after getting a letter",
    ),
    (
        "the {thing} of {n} was broken",
        "{m} repaired it in one afternoon",
        "{m} repaired the {thing} of {n}",
    ),
    (
        "{n} wanted to bake bread, but there was no flour",
        "{he} cooked soup instead",
        "{n} cooked soup because there was no flour",
    ),
    (
        "{n} saw a small dog in the rain",
        "{he} took it home and gave it some food",
        "{n} took in a dog that stood in the rain",
    ),
)
EXTRA = (
    "it was a [cold|warm|long|quiet|busy] day.",
    "{n} lives in a [small town|big city|little village].",
    "it was [Monday|Tuesday|Friday|Sunday].",
    "{m} is a good friend of {n}.",
    "",
)
FACTS: tuple[tuple[str, str, str], ...] = (
    ("{n} has a {c} {o}.", "what colour is the {o}?", "the {o} is {c}."),
    ("{n} has a {c} {o}.", "who has a {o}?", "{n} has a {o}."),
    ("{n} lives in a {place}.", "where does {n} live?", "{n} lives in a {place}."),
    ("{n} likes {food}.", "what does {n} like?", "{n} likes {food}."),
    ("{n} can {skill}.", "what can {n} do?", "{n} can {skill}."),
    ("{n} put the {o} {spot}.", "where is the {o}?", "the {o} is {spot}."),
    ("{n} is the {rel} of {m}.", "who is {n}?", "{n} is the {rel} of {m}."),
    ("{n} gave the {o} to {m}.", "who has the {o} now?", "{m} has the {o} now."),
    ("{n} is taller than {m}.", "who is taller?", "{n} is taller than {m}."),
    ("{n} is afraid of {fear}.", "what is {n} afraid of?", "{n} is afraid of {fear}."),
    ("{n} went to the {p2} and bought {food}.", "what did {n} buy?", "{n} bought {food}."),
    ("{n} went to the {p2} and bought {food}.", "where did {n} go?", "{n} went to the {p2}."),
)
TENSES = (
    "go went|{n} %s to the {p2}",
    "buy bought|{n} and {m} %s some {food}",
    "see saw|I %s a {c} {o}",
    "eat ate|we %s {food}",
    "sing sang|{n} and {m} %s a song",
    "find found|I %s a {o} {spot}",
    "make made|we %s {dish}",
    "play played|{n} and {m} %s {game}",
    "walk walked|we %s to the {p2}",
    "take took|I %s the {o}",
    "write wrote|they %s a letter to {m}",
    "drink drank|we %s some water",
    "like liked|I %s the {c} {o}",
    "carry carried|they %s the {o} home",
)


def people(rng: random.Random) -> dict[str, str]:
    girl = rng.random() < 0.5
    n, m = rng.sample(words.GIRLS, 1)[0], rng.choice(words.BOYS)
    n, m = (n, m) if girl else (m, n)
    pick = rng.choice
    return {
        "n": n,
        "m": m,
        "he": "she" if girl else "he",
        "his": "her" if girl else "his",
        "c": pick(words.COLOURS),
        "o": pick(words.THINGS),
        "thing": pick(["lamp", "bicycle", "clock", "radio", "chair", "kite"]),
        "food": pick(["apples", "plums", "cookies", "pears", "cakes", "muffins", "cherries"]),
        "place": pick(
            ["small town", "big city", "village", "house by the sea", "castle", "cottage"]
        ),
        "skill": pick(words.SKILLS),
        "spot": pick(words.SPOTS),
        "rel": pick(["brother", "sister", "teacher", "neighbour", "friend"]),
        "fear": pick(words.FEARS),
        "dish": pick(words.DISHES),
        "p2": pick(["market", "shop", "park", "town", "harbour", "fair"]),
        "game": pick(words.GAMES),
        "to": pick(["school", "work", "the market", "the station"]),
    }


def summary(rng: random.Random) -> tuple[str, str]:
    s = people(rng)
    cause, result, short = rng.choice(EVENTS)
    link = rng.choice((", so ", ". ", " and ")) if "in summer" not in result else ". "
    extra = rng.choice(EXTRA)
    body = say((extra + " " if extra else "") + cause + link + result + ".", s, rng)
    ask = say(
        "[summarize this|sum this up in one sentence|say this in fewer words|make this "
        "shorter|write a short summary of this]",
        {},
        rng,
    )
    return ask + rng.choice((": ", ": ", ":\n", ".\n\n")) + body, say(short + ".", s, rng)


def reading(rng: random.Random) -> tuple[str, str]:
    s = people(rng)
    told, asked, answer = rng.choice(FACTS)
    other = rng.choice([f[0] for f in FACTS])
    t = people(rng)
    lines = [say(told, s, rng)]
    if rng.random() < 0.6 and t["n"] not in s.values() and t["o"] != s["o"] and other != told:
        lines.insert(rng.randrange(2), say(other, t, rng))
    return " ".join(lines) + rng.choice((" ", "\n", "\n\n")) + say(asked, s, rng), say(
        answer, s, rng
    )


def tense(rng: random.Random) -> tuple[str, str]:
    verbs, frame = rng.choice(TENSES).split("|")
    now, then = verbs.split()
    s = people(rng)
    if frame.startswith("{n} %s"):
        now += "es"
    told = rng.choice((" every day", " today", " in the evening", ""))
    before, after = (
        say(frame.replace("%s", now) + told + ".", s, rng),
        say(frame.replace("%s", then) + told + ".", s, rng),
    )
    if rng.random() < 0.7:
        return say(
            "[put this into the past tense|change this to the past tense|write this sentence "
            "in the past]: ",
            {},
            rng,
        ) + before, after
    return say(
        "[put this into the present tense|change this to the present tense]: ", {}, rng
    ) + after, before


POLITE = (
    "give me the {o}|could you please give me the {o}?",
    "open the window|could you please open the window?",
    "be quiet|would you please be a little more quiet?",
    "help me|could you please help me?",
    "bring me some {food}|could you please bring me some {food}?",
    "wait here|would you please wait here?",
    "close the door|could you please close the door?",
    "call me back|could you please call me back?",
    "send me the letter|would you please send me the letter?",
    "move your {thing}|would you mind moving your {thing}?",
    "tell me the time|could you please tell me the time?",
    "come here|could you please come here?",
    "stop that|would you please stop that?",
    "show me your {o}|may I see your {o}, please?",
    "sit down|please take a seat.",
)


def polite(rng: random.Random) -> tuple[str, str]:
    rude, nice = rng.choice(POLITE).split("|")
    s = people(rng)
    return say(
        "[make this more polite|say this in a polite way|rewrite this politely|how can I say "
        "this more politely]: ",
        {},
        rng,
    ) + say(rude + rng.choice("!."), s, rng), say(nice, s, rng)


def arrange(rng: random.Random) -> tuple[str, str]:
    """Alphabetical order, capital letters, reversed lists, opposites in a sentence."""
    stock = [w for line in LISTS.values() for w in line.split() if w[0].islower()]
    some = rng.sample(stock, rng.randint(3, 5))
    s = people(rng)
    form = rng.randrange(5)
    if form == 0:
        return say(
            "[sort these words|put these words in alphabetical order|order these words from a "
            "to z]: ",
            {},
            rng,
        ) + ", ".join(some) + ".", ", ".join(sorted(some))
    if form == 1:
        return say(
            "[write these words in capital letters|change to capital letters]: ", {}, rng
        ) + " ".join(some[:3]) + ".", " ".join(some[:3]).upper()
    if form == 2:
        return say(
            "[turn this list around|reverse the order of these words]: ", {}, rng
        ) + ", ".join(some) + ".", ", ".join(reversed(some))
    if form == 3:
        pairs = [p.split() for p in OPPOSITES[:20]]
        a, b = rng.choice(pairs)
        frame = rng.choice(
            (
                "the {o} is %s.",
                "{n} is very %s today.",
                "the {thing} of {m} is %s.",
                "it was a %s day.",
            )
        )
        return say("[change the sentence to its opposite|say the opposite]: ", {}, rng) + say(
            frame.replace("%s", a), s, rng
        ), say(frame.replace("%s", b), s, rng)
    return say("[how many words are in this list|count these words]: ", {}, rng) + ", ".join(
        some
    ) + ("?" if rng.random() < 0.5 else "."), f"There are {len(some)} words."


USES = (
    "the {w} [is|was] {spot}.",
    "{n} [has|bought|found|lost|wants] a [new|old|{c}] {w}.",
    "{n} gave {m} a {w} [for {his} birthday|yesterday|with a smile].",
    "I [saw|liked] the {c} {w} of {n}.",
    "there is a {w} {spot}.",
    "can you bring me the {w}, please?",
    "{n} and {m} looked for the {w} all day.",
)


def use(rng: random.Random) -> tuple[str, str]:
    """A sentence with a given word, or one about a given person or thing."""
    s = people(rng)
    s["w"] = rng.choice(words.THINGS + words.ANIMALS)
    if rng.random() < 0.7:
        return say(
            '[use the word "{w}" in a sentence.|write a sentence with the word "{w}".|make a '
            'sentence with "{w}".|write a sentence about a {w}.]',
            s,
            rng,
        ), say(rng.choice(USES), s, rng)
    return say("[write|make] a sentence [about|with] {n} and a {w}.", s, rng), say(
        "{n} [has a {c} {w}|found a {w} {spot}|wants to buy a {w}|drew a picture of a {w}|is "
        "looking for a {w}].",
        s,
        rng,
    )


def rewriting(rng: random.Random) -> tuple[str, str]:
    ask, answer = rng.choices(
        (summary, reading, tense, polite, arrange, use), (4, 4, 2, 1.5, 2, 2.5)
    )[0](rng)
    return sentences(ask), sentences(answer)
