"""The detokenizer beside the library's own decoding of all ids at once: every decoder of the
library, alone and in chains, and any ids in any order, behind any prompt; byte tokens spell whole
characters. Invalid bytes are compared with a simple oracle."""

import codecs
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from dovetail.protocol.vocabulary import TokenTable
from dovetail.runtime.text.tokenizer import Spelling
from support.spelt import detokenizer_of

PIECES = [
    *(
        "a",
        "b",
        " ",
        "  ",
        "",
        "\u2581",
        "\u2581a",
        "a\u2581",
        "\u2581\u2581b",
        "##c",
        "##",
        "d##",
        "e</w>",
        "</w>",
        "</w></w>",
        "f</w>g",
        "|",
        "|h",
        "h|",
    ),
    *(
        ".",
        " .",
        "n't",
        " n't",
        "'s",
        " do not",
        ",",
        "?",
        " ' ",
        "\u4e16",
        "\u00e9",
        "\U0001f600",
        "\u0120w",
        "\u010a",
        "\u00f0\u0141",
        "\u0141",
        "aa",
        "ab",
        "ba",
    ),
    *(
        "<0x",
        "<0xZZ>",
        "<0x+A>",
        "<0x\u00e9>",
        "<pad>",
        "<unk>",
        "\ufffd",
        "\x00",
        "'",
        "do",
        "\u0130",
    ),
    *(
        f"<0x{byte:02X}>"
        for byte in (
            0x0A,
            0x20,
            0x41,
            0xE4,
            0xB8,
            0x96,
            0xF0,
            0x9F,
            0x98,
            0x80,
            0xC0,
            0xED,
            0xA0,
            0xFF,
        )
    ),
]
BYTES = [index for index, piece in enumerate(PIECES) if piece.startswith("<0x") and len(piece) == 6]
BYTES.remove(PIECES.index("<0xZZ>"))
SPECIAL, ADDED = len(PIECES), len(PIECES) + 1
BEYOND = (len(PIECES) + 2, 1 << 20, (1 << 32) - 1)

ALONE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "ByteLevel": decoders.ByteLevel,
    "ByteFallback": decoders.ByteFallback,
    "Fuse": decoders.Fuse,
    "Metaspace always": lambda: decoders.Metaspace(prepend_scheme="always"),
    "Metaspace first": lambda: decoders.Metaspace(prepend_scheme="first"),
    "Metaspace never": lambda: decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": lambda: decoders.WordPiece(cleanup=False),
    "WordPiece, cleaned up": lambda: decoders.WordPiece(cleanup=True),
    "BPE": decoders.BPEDecoder,
    "BPE, other suffix": lambda: decoders.BPEDecoder(suffix="a"),
    "CTC": decoders.CTC,
    "CTC as it is": lambda: decoders.CTC(cleanup=False),
    "Replace": lambda: decoders.Replace("\u2581", " "),
    "Replace two": lambda: decoders.Replace("aa", "b"),
    "Replace overlapping": lambda: decoders.Replace("aba", ""),
    "Replace by expression": lambda: decoders.Replace(Regex("[ab]+"), "x"),
    "Strip left": lambda: decoders.Strip(" ", 1, 0),
    "Strip two": lambda: decoders.Strip("a", 2, 0),
    "Strip right": lambda: decoders.Strip(" ", 0, 1),
    "Strip both": lambda: decoders.Strip("\u2581", 1, 2),
}
LLAMA = ("Replace", "ByteFallback", "Fuse", "Strip left")
GEMMA = ("Replace", "ByteFallback", "Fuse")


def tokenizer(decoder: Any) -> Tokenizer:
    made = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, "<unk>")
    )
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.add_tokens([AddedToken("<added>", special=False)])
    if decoder is not None:
        made.decoder = decoder
    return made


def chain(names: Sequence[str]) -> Tokenizer:
    return tokenizer(decoders.Sequence([ALONE[name]() for name in names]))


WORDS = [index for index in range(len(PIECES)) if index not in BYTES]
SPELT = ("\n", " ", "A", "\u4e16", "\U0001f600")


def byte(value: int) -> int:
    return PIECES.index(f"<0x{value:02X}>")


characters = st.sampled_from([tuple(map(byte, one.encode())) for one in SPELT])
ids = st.lists(
    st.sampled_from([(index,) for index in (*WORDS, SPECIAL, ADDED, *BEYOND)]) | characters,
    max_size=24,
).map(lambda parts: [index for part in parts for index in part])
chains = st.lists(
    st.sampled_from([name for name in ALONE if name != "none"]), min_size=1, max_size=5
)
TOKENIZERS = {name: tokenizer(make()) for name, make in ALONE.items()}


def streamed(made: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = detokenizer_of(made, prompt=prompt)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def whole(made: Tokenizer, tokens: Sequence[int]) -> str | None:
    """Return what the library decodes; None if it panics."""
    try:
        return str(made.decode(tokens, skip_special_tokens=True))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return None


@pytest.mark.parametrize("name", ALONE)
@given(tokens=ids)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_pushed_and_flushed_every_decoder_of_the_library_brings_what_decoding_at_once_does(
    name: str, tokens: list[int]
) -> None:
    made = TOKENIZERS[name]
    text, expected = streamed(made, tokens), whole(made, tokens)
    assert expected is None or text == expected


@given(names=chains | st.sampled_from([LLAMA, GEMMA]), tokens=ids)
@settings(max_examples=600, deadline=None, derandomize=True, database=None)
def test_so_does_every_chain_of_them(names: Sequence[str], tokens: list[int]) -> None:
    made = chain(names)
    text, expected = streamed(made, tokens), whole(made, tokens)
    assert expected is None or text == expected


BEHIND = [[name] for name in ALONE if name not in ("none", "BPE, other suffix")]


@pytest.mark.parametrize("names", [*BEHIND, LLAMA, GEMMA, ("Fuse", "WordPiece")], ids="+".join)
@given(prompt=ids, tokens=ids, times=st.sampled_from([1, 1, 9]))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_a_reply_is_decoded_as_behind_its_prompt(
    names: Sequence[str], prompt: list[int], tokens: list[int], times: int
) -> None:
    made = chain(names)
    prompt = prompt * times
    expected, before = whole(made, [*prompt, *tokens]), detokenizer_of(made).read_prompt(prompt)
    if expected is not None and whole(made, prompt) is not None and expected.startswith(before):
        # else the reply changes what the prompt's last token is decoded to, which has been shown
        assert before + streamed(made, tokens, prompt) == expected


def test_a_reply_keeps_its_first_space_and_completes_a_character_of_the_prompt() -> None:
    a, half = PIECES.index("\u2581a"), [byte(0xE4), byte(0xB8)]
    for names in (LLAMA, ["Metaspace first"], ["Metaspace always"]):
        made = chain(names)
        assert (streamed(made, [a], [a]), streamed(made, [a])) == (" a", "a")
        assert streamed(made, [a], [SPECIAL]) == "a"  # which begins a text
    made = chain(LLAMA)
    assert detokenizer_of(made).read_prompt([a, *half]) == "a"
    assert streamed(made, [byte(0x96), a], [a, *half]) == "\u4e16 a"
    assert streamed(chain(["WordPiece"]), [PIECES.index("##c")], [a]) == "c"


def test_every_character_spelt_in_bytes_is_shown_with_its_last_byte() -> None:
    text, made = "\U0001f600\u4e16A" * 16, chain(LLAMA)
    detokenizer, shown = detokenizer_of(made), ""
    for count, value in enumerate(text.encode(), 1):
        shown += detokenizer.push(byte(value))
        assert shown == text.encode()[:count].decode(errors="ignore")
    assert detokenizer.push(byte(0xF0), byte(0x9F)) == ""
    assert detokenizer.flush() == "\ufffd"


def obvious(run: bytes, *, last: bool) -> str:
    """Decode bytes one by one; `last`: they may end with an incomplete character."""
    if not run:
        return ""
    with contextlib.suppress(UnicodeDecodeError):
        if last and not codecs.getincrementaldecoder("utf-8")().decode(run):
            return "\ufffd"
    for size in (1, 2, 3, 4):
        with contextlib.suppress(UnicodeDecodeError):
            return run[:size].decode() + obvious(run[size:], last=last)
    return "\ufffd" + obvious(run[1:], last=last)


@given(
    st.lists(st.lists(st.sampled_from(BYTES[:-1]), min_size=1, max_size=9), min_size=1, max_size=4)
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_invalid_bytes_are_replaced_one_by_one_and_characters_among_them_are_kept(
    runs: list[list[int]],
) -> None:
    a = PIECES.index("a")
    tokens = [token for run in runs for token in (*run, a)][:-1]
    spelt = [bytes(int(PIECES[token][3:5], 16) for token in run) for run in runs]
    expected = "a".join(obvious(run, last=place == len(runs)) for place, run in enumerate(spelt, 1))
    assert streamed(chain(GEMMA), tokens) == expected


def test_a_run_of_bytes_that_turns_out_to_be_no_text_raises_nothing_and_the_stream_goes_on() -> (
    None
):
    made = chain(LLAMA)
    detokenizer = detokenizer_of(made)
    tokens = [
        byte(0x0A),
        byte(0xF0),
        PIECES.index("\u2581a"),
        PIECES.index("\u2581a"),
        PIECES.index("b"),
    ]
    assert [detokenizer.push(token) for token in tokens] == ["\n", "", "\ufffd a", " a", "b"]


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", *"abcxyz"]), st.booleans())),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_added_tokens_have_the_ids_that_the_library_gives_them_whatever_the_file_says(
    words: list[str], hole: int, added: list[tuple[int, str, bool]]
) -> None:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    named = [{"id": i, "content": one, "special": special, **plain} for i, one, special in added]
    vocabulary = {word: place + hole * (place > 1) for place, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
    content = json.dumps({"version": "1.0", "added_tokens": named, "model": model}).encode()
    made, spelling = Tokenizer.from_buffer(content), Spelling(TokenTable.read(content))
    for token in range(20):
        assert spelling.table.spelling(token) == made.id_to_token(token)
        assert spelling.detokenizer().push(token) == made.decode([token])


def test_whatever_the_id_is_nothing_is_raised() -> None:
    detokenizer = detokenizer_of(chain(LLAMA))
    assert [detokenizer.push(token) for token in (-1, 1 << 32, 1 << 70, 0)] == ["", "", "", "a"]


def test_a_decoder_that_panics_leaves_tokens_as_they_are() -> None:
    assert whole(TOKENIZERS["Strip right"], [PIECES.index("")]) is None  # the library's own
    assert streamed(TOKENIZERS["Strip right"], [PIECES.index(""), PIECES.index("a")]) == "a"


def test_what_is_certain_is_shown_at_once() -> None:
    words = [PIECES.index("\u2581a"), PIECES.index("b"), PIECES.index("\u2581a")]
    for names in (LLAMA, GEMMA, ["Metaspace always"]):
        detokenizer = detokenizer_of(chain(names))
        assert all(detokenizer.push(token) for token in words), names


@pytest.mark.parametrize(
    ("names", "tokens"),
    [
        (LLAMA, [0x41]),
        (LLAMA, [0xF0]),
        (LLAMA, [0xE4, 0xB8, 0x96]),
        (("ByteFallback", "Replace two", "Fuse", "Strip both"), [0xF0, 0x9F]),
        (["ByteLevel"], [0xF0]),
    ],
    ids=["valid bytes", "invalid bytes", "characters", "chain", "byte level"],
)
def test_the_cost_is_linear_in_the_reply_whatever_the_bytes(
    names: Sequence[str], tokens: list[int]
) -> None:
    made = chain(names)
    run = [byte(value) for value in tokens] if names != ["ByteLevel"] else [PIECES.index("\u0141")]

    def cpu_s(length: int) -> float:
        detokenizer, reply = detokenizer_of(made), run * (length // len(run))
        began = time.process_time()
        for token in reply:
            detokenizer.push(token)
        detokenizer.flush()
        return time.process_time() - began

    short, long = min(cpu_s(1_000) for _ in range(5)), min(cpu_s(8_000) for _ in range(2))
    assert long < 3 * 8 * short  # quadratic: 64 times
