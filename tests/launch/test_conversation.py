"""What was said, which lines are commands, and which text the draft proposed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.launch.chat import harmless
from dovetail.launch.conversation import COMMANDS, Answer, Command, Conversation, Paint, parse
from dovetail.protocol.errors import UserError
from support.golden import representative

PIECES = st.lists(st.tuples(st.text("ab \nü", max_size=4), st.booleans()), max_size=20)


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
    ],
)
def test_a_line_is_a_question_a_command_or_nothing(line: str, meaning: Command | str | None) -> None:
    assert parse(line) == meaning


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sats", r"there is no command /sats: did you mean /stats\?"),
        ("/x", "there is no command /x: /help tells"),
        ("/draft", r"/draft is not possible: write /draft on\|off"),
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
        argument = wanted.split("|")[0]
        assert parse(f"/{name} {argument}") == Command(name, argument)


def test_turns_alternate_and_what_was_interrupted_before_its_first_word_is_forgotten() -> None:
    conversation = Conversation()
    conversation.add("Hello.", Answer("Hi"))
    conversation.add("And?", Answer("", interrupted=True))
    conversation.add("More.", Answer("Once up", interrupted=True))
    assert conversation.turns_with("Go on.") == ("Hello.", "Hi", "More.", "Once up", "Go on.")
    assert conversation.take_back() == "More."
    assert conversation.turns_with("x") == ("Hello.", "Hi", "x")
    conversation.clear()
    with pytest.raises(UserError, match="nothing was said"):
        conversation.take_back()


def test_a_conversation_is_saved_with_its_figures() -> None:
    conversation = Conversation()
    result = representative()["finished"].result
    conversation.add("Hello.", Answer("Hi", result))
    conversation.add("More.", Answer("Wh", interrupted=True))
    saved = json.loads(conversation.as_json())
    assert saved["turns"] == ["Hello.", "Hi", "More.", "Wh"]
    assert saved["results"] == [json.loads(json.dumps(result.model_dump())), None]


@given(PIECES, st.lists(st.integers(0, 9)), st.text("ab", max_size=3))
def test_every_character_has_the_colour_of_the_token_that_spelt_it(pieces: list[tuple[str, bool]], lengths: list[int], rest: str) -> None:
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
    assert harmless("a\tb\nc\x1b[2J\x07\x9b1m\x7f é👩‍🚀") == "a\tb\nc\ufffd[2J\ufffd\ufffd1m\ufffd é👩‍🚀"
