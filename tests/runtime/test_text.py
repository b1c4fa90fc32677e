"""Tokenizer, template, detokenizer and stop strings, on the scripted word-level tokenizer and a
byte-level one trained here."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.runtime.http.replies import Tokens
from dovetail.runtime.text.tokenizer import ReplyText, StopStrings, TextCodec, why_no_chats
from support.scripted import tokenizer_bytes
from support.spelt import detokenizer_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor "
    "%}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox", "世界 hello"], trainer)
    return tokenizer


def codec(template: str = "") -> TextCodec:
    facts = VocabularyFacts(digest="", size=400, begin=0, template=template)
    return TextCodec(byte_level().to_str().encode(), facts)


def test_turns_are_rendered_with_the_template_and_special_tokens_read_as_such() -> None:
    ids = codec(TEMPLATE).encode_turns(["hello", "hi", "bye"])
    text = byte_level().decode(ids, skip_special_tokens=False)
    assert text == "<s><user>hello<assistant>hi<user>bye<assistant>"
    assert ids.count(1) == 2


def test_a_template_reads_the_values_of_a_request() -> None:
    thinks = codec(
        "{{ messages[0].content }}{% if enable_thinking is not false %} think{% endif %}"
    )
    asked = [{"role": "user", "content": "hello"}]
    assert thinks.encode_messages(asked) == codec().encode("hello think")
    told = thinks.encode_messages(asked, values={"enable_thinking": False})
    assert told == codec().encode("hello")
    with pytest.raises(RequestError, match="surrogate"):
        codec("{{ messages[0].content ~ style }}").encode_messages(
            asked, values={"style": "\ud800"}
        )


def test_half_a_character_is_never_shown_and_the_pieces_add_up_to_the_text() -> None:
    text = "a \N{GRINNING FACE} b"
    detokenizer = detokenizer_of(byte_level())
    ids = byte_level().encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.push(token) for token in ids]
    assert pieces.count("") == 3
    assert "".join(pieces) + detokenizer.flush() == text


def test_without_a_template_turns_are_plain_text() -> None:
    assert codec().encode_turns(["hello"]) == codec().encode("hello")


def test_a_template_that_refuses_is_the_users_mistake() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        codec("{{ raise_exception('roles must alternate') }}").encode_turns(["a"])


@pytest.mark.parametrize(
    "wrong",
    [
        "messages[0]['content'] + 1",
        "1 / 0",
        "'a' * 1000000000",
        "10 ** (10 ** 10)",
        "strftime_now(1)",
    ],
)
def test_whatever_a_template_raises_concerns_the_request_alone(wrong: str) -> None:
    with pytest.raises(RequestError, match="template"):
        codec("{{ " + wrong + " }}").encode_turns(["a"])


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages | evil }}", ""])
def test_without_a_usable_template_only_chats_are_refused(template: str) -> None:
    text = codec(template)
    assert text.encode("hello") == codec().encode("hello")
    with pytest.raises(RequestError, match=r"template.*: use /v1/completions[^\n]*$"):
        text.encode_messages([{"role": "user", "content": "hello"}])
    assert "template" in why_no_chats(template)
    assert not why_no_chats(TEMPLATE + "{{ bos_token + eos_token }}{{ tools is none }}")


@given(st.text(max_size=200))
def test_a_text_never_has_fewer_tokens_than_the_least(text: str) -> None:
    assert codec().least_tokens(text) <= len(codec().encode(text))


class ObviousStopStrings:
    """Looks through all that it holds, again and again."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        self.held += text
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            shown, self.held = self.held[: min(found)], ""
            return shown, True
        ends = [n for stop in self.stops for n in range(len(stop)) if self.held.endswith(stop[:n])]
        cut = len(self.held) - max(ends, default=0)
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown, False

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
@settings(max_examples=400)
def test_stop_strings_do_what_the_obvious_ones_do_piece_by_piece(
    stops: list[str], pieces: list[str]
) -> None:
    cutter, obvious = StopStrings(stops), ObviousStopStrings(stops)
    for piece in pieces:
        assert cutter.push(piece) == obvious.push(piece)
    assert cutter.flush() == obvious.flush()


def abc() -> Tokenizer:
    """Tokens of one or two letters, and a special one."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "ba": 3}, [("a", "b"), ("b", "a")]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken("<turn>", special=True)])
    return made


ABC = abc()
TURN = 4


@given(
    st.lists(st.integers(0, TURN), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4) | st.just("<turn>"), min_size=1, max_size=2),
    st.integers(0, 8),
    st.integers(1, 4),
)
@example([0, 1, 4, 1], ["bb", "<turn>"], 3, 1)
@settings(max_examples=400, deadline=None)
def test_a_stop_string_completed_by_an_early_token_is_ignored(
    tokens: list[int], stops: list[str], least: int, step: int
) -> None:
    words, text, cut, count = ("a", "b", "ab", "ba", ""), "", None, len(tokens)
    for place, token in enumerate(tokens, 1):
        before, text = len(text), text + words[token]
        ends = [
            end - len(stop)
            for stop in stops
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        ends += [len(text)] if token == TURN and "<turn>" in stops else []
        if ends and place > least:
            cut, count = min(ends), place
            break
    reply, shown, read, reason = ReplyText(detokenizer_of(ABC), (), stops, least), "", 0, None
    while read < len(tokens) and reason is None:
        taken, more, reason = reply.read(tokens[read : read + step], len(tokens) + 1)
        shown, read = shown + more(), read + taken
    shown += reply.left() if reason is None else ""
    assert (shown, read, reason) == (text[:cut], count, None if cut is None else "stop")


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("<turn>", "ab"),
        ("b<turn>", "a"),
        ("<turn>a", "ab"),
        ("<turn", None),
        ("<", None),
        ("a<turn>", None),
        ("<turn><turn>", None),
    ],
)
def test_a_special_token_in_a_stop_string_is_found_where_the_reply_has_it(
    stop: str, shown: str | None
) -> None:
    reply = ReplyText(detokenizer_of(ABC), (), [stop])
    _, text, reason = reply.read([2, TURN, 0], 9)
    assert (text() + ("" if reason else reply.left()), reason) == (
        ("aba", None) if shown is None else (shown, "stop")
    )


def test_the_text_of_a_special_token_is_found_where_it_is_spelt_out_too() -> None:
    made = codec()
    reply = ReplyText(made.detokenizer(), (), ["<assistant>"])
    spelt = [made.encode(letter)[0] for letter in "a <assistant> b"]
    _, text, reason = reply.read(spelt, 99)
    assert (text(), reason) == ("a ", "stop")


CRAFTED = [letter * 1023 + "!" for letter in "abcdefghijklmno"] + ["ab" * 511 + "!"]
"""Whatever comes is the beginning of one of them, and almost its end."""


def test_stop_strings_take_time_in_proportion_to_the_text_whatever_they_are() -> None:
    def cpu_s(text: str) -> float:
        cutter = StopStrings(CRAFTED)
        began = time.process_time()
        for letter in text:
            cutter.push(letter)
        return time.process_time() - began

    cpu_s("a")  # what is made once
    plain = min(cpu_s("xyz" * 1000) for _ in range(3))
    for text in ("a" * 3000, ("a" * 500 + "b") * 6, "ab" * 1500, ("ab" * 500 + "a") * 3):
        assert min(cpu_s(text) for _ in range(3)) < 12 * plain, text[
            :8
        ]  # looking through 1,023 letters each time: hundreds of times


def test_the_scripted_tokenizer_is_a_tokenizer() -> None:
    assert Tokenizer.from_buffer(tokenizer_bytes()).decode([5, 6]) == "w5 w6"
    assert json.loads(tokenizer_bytes())["version"] == "1.0"


# -- messages and single tokens --------------------------------------------------------------------


def fallback() -> Tokenizer:
    """A vocabulary as Llama 2 has it: words begin with U+2581, and what is not in it is spelt in
    bytes."""
    words = {
        token: index
        for index, token in enumerate(
            [
                "<unk>",
                *(f"<0x{byte:02X}>" for byte in range(256)),
                "\u2581",
                "a",
                "b",
                "\u2581a",
                "\u2581b",
            ]
        )
    }
    tokenizer = Tokenizer(
        models.BPE(words, [("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_messages_are_rendered_with_their_roles_and_without_a_reply_where_none_is_wanted() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    text = byte_level().decode(codec(TEMPLATE).encode_messages(messages), skip_special_tokens=False)
    assert text == "<s><system>be brief<user>hello<assistant>"
    assert (
        byte_level().decode(
            codec(TEMPLATE).encode_messages(messages, reply=False), skip_special_tokens=False
        )
        == "<s><system>be brief<user>hello"
    )


@given(st.text(max_size=40))
def test_the_pieces_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    byte = codec()
    assert b"".join(byte.piece(token) for token in byte.encode(text)) == text.encode()


@given(st.text("ab \u4e16\U0001f600", min_size=1, max_size=20))
def test_the_pieces_of_words_and_single_bytes_are_too(text: str) -> None:
    spelt = TextCodec(fallback().to_str().encode(), VocabularyFacts(digest="", size=400))
    assert (
        b"".join(spelt.piece(token) for token in spelt.encode(text))
        == (text if text.startswith(" ") else f" {text}").encode()
    )


def test_a_special_token_is_written_out_by_itself_and_where_it_is_asked_for() -> None:
    assert codec().piece(1) == b"<assistant>"
    assert codec().decode([1]) == ""
    assert codec().decode([1], special=True) == "<assistant>"
    assert codec().token(1) == "<assistant>"
    assert codec().token(399) == ""


@pytest.mark.parametrize("cut", [False, True])
def test_tokens_that_spell_a_character_together_are_shown_with_it(cut: bool) -> None:
    made = fallback()
    spelt = [made.token_to_id(piece) for piece in ("a", "<0xE4>", "<0xB8>", "<0x96>", "b")]
    tokens = Tokens(detokenizer_of(made))
    tokens.push(spelt[:3], (False,) * 3, ())
    assert [shown.token for shown in tokens.shown(1)] == spelt[:1]
    tokens.push(spelt[3:], (False,) * 2, ())
    assert tokens.shown(1) == []
    if cut:
        assert tokens.rest(1, cut=True) == []
    else:
        assert [shown.token for shown in tokens.shown(3)] == spelt[1:]
