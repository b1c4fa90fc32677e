"""The conversation of a chat: the turns that were said, the lines that are commands, and the text
that the draft proposed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.launch.chat.conversation import (
    COMMANDS,
    Answer,
    Command,
    Conversation,
    Exchange,
    Manner,
    Paint,
    parse,
)
from dovetail.launch.commands.chat import harmless
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Sampling, TreeSettings
from support.golden import representative

GREEDY = Manner(Sampling(temperature=0.0), 16, TreeSettings())
PIECES = st.lists(st.tuples(st.text("ab \nü", max_size=4), st.booleans()), max_size=20)


def warm(temperature: float = 0.5, *, acceptance: Any = "coupled", **more: Any) -> Manner:
    return replace(
        GREEDY, sampling=Sampling(temperature=temperature, acceptance=acceptance), **more
    )


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("Hello there\n", "Hello there"),
        ("   \n", None),
        ("//etc is a folder", "/etc is a folder"),
        ("/stats\n", Command("stats")),
        ("/draft off", Command("draft", "off")),
        (" /temperature  0.7 ", Command("temperature", "0.7")),
        ("/save my talk.json", Command("save", "my talk.json")),
        ("/temperature", Command("temperature")),
        ("/exit", Command("quit")),
    ],
)
def test_a_line_is_a_question_a_command_or_nothing(
    line: str, meaning: Command | str | None
) -> None:
    assert parse(line) == meaning


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sats", r"there is no command /sats: did you mean /stats\?"),
        ("/x", "there is no command /x: /help lists"),
        ("/save", "/save is not possible: write /save FILE"),
        ("/exot", r"did you mean /exit\?"),
        ("/draft maybe", r"/draft maybe is not possible: write /draft on\|off"),
        ("/clear all", "/clear all is not possible: write /clear$"),
        ("/", "there is no command /:"),
    ],
)
def test_a_command_that_is_none_is_answered_with_what_is(line: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(line)


def test_every_command_is_read_with_its_argument() -> None:
    for name, (wanted, _) in COMMANDS.items():
        argument = wanted.strip("[]").split("|")[0]
        assert parse(f"/{name} {argument}") == Command(name, argument)


def test_turns_alternate_and_the_last_can_be_taken_back() -> None:
    first = Conversation().with_answer("Hello.", GREEDY, Answer("Hi"))
    both = first.with_answer("More.", GREEDY, Answer("Once up", interrupted=True))
    assert both.turns_with("Go on.") == ("Hello.", "Hi", "More.", "Once up", "Go on.")
    before, last = both.taken_back()
    assert (before, last.question) == (first, "More.")
    with pytest.raises(UserError, match="there is no question"):
        Conversation().taken_back()


@pytest.mark.parametrize(
    ("asked", "again", "same"),
    [
        (GREEDY, GREEDY, True),
        (GREEDY, replace(GREEDY, seed=3, speculate=False), True),
        (GREEDY, warm(seed=7), False),
        (warm(), warm(), False),
        (warm(), warm(seed=7), True),  # which is the seed that the reply tells
        (warm(seed=7), warm(seed=7, speculate=False), True),
        (warm(seed=7), warm(seed=8), False),
        (warm(seed=7), warm(0.9, seed=7), False),
        (warm(seed=7), GREEDY, False),
        (warm(acceptance="rejection", seed=7), warm(acceptance="rejection", seed=7), False),
    ],
)
def test_a_question_gets_the_same_answer_where_chance_has_no_part(
    asked: Manner, again: Manner, same: bool
) -> None:
    result = representative()["finished"].result.model_copy(update={"seed": 7})
    assert Exchange("Hello.", asked, Answer("Hi", result)).is_repeated_in(again) is same
    assert not Exchange("Hello.", asked, Answer("H", result, interrupted=True)).is_repeated_in(
        again
    )


def test_without_figures_a_seed_that_was_not_asked_for_is_unknown() -> None:
    assert not Exchange("Hello.", warm(), Answer("Hi")).is_repeated_in(warm())
    assert Exchange("Hello.", warm(seed=3), Answer("Hi")).is_repeated_in(warm(seed=3))


def test_a_conversation_is_saved_with_its_figures() -> None:
    result = representative()["finished"].result
    conversation = (
        Conversation()
        .with_answer("Hello.", GREEDY, Answer("Hi", result))
        .with_answer("More.", GREEDY, Answer("Wh", interrupted=True))
    )
    saved = json.loads(conversation.as_json())
    assert saved["turns"] == ["Hello.", "Hi", "More.", "Wh"]
    assert saved["results"] == [json.loads(json.dumps(result.model_dump())), None]


@given(PIECES, st.lists(st.integers(0, 9)), st.text("ab", max_size=3))
def test_every_character_has_the_colour_of_the_token_that_spelt_it(
    pieces: list[tuple[str, bool]], lengths: list[int], rest: str
) -> None:
    """However the text is cut into messages, and whatever comes behind the tokens."""
    whole = "".join(text for text, _ in pieces) + rest
    expected = [flag for text, flag in pieces for _ in text] + [False] * len(rest)
    paint, shown = Paint(), []
    paint.push(pieces)
    left = whole
    for length in (*lengths, len(whole)):
        shown += paint.take(left[:length])
        left = left[length:]
    assert "".join(text for text, _ in shown) == whole
    assert [flag for text, flag in shown for _ in text] == expected


def test_text_that_is_held_back_is_coloured_when_it_comes() -> None:
    paint = Paint()
    paint.push([("one ", True), ("two", False)])
    assert paint.take("one") == [("one", True)]
    paint.push([(" three", True)])
    assert paint.take(" tw") == [(" ", True), ("tw", False)]
    assert paint.take("o th") == [("o", False), (" th", True)]


def test_no_reply_commands_the_terminal() -> None:
    assert (
        harmless("a\tb\nc\x1b[2J\x07\x9b1m\x7f é👩‍🚀")
        == "a\tb\nc\ufffd[2J\ufffd\ufffd1m\ufffd é👩‍🚀"
    )
