"""The words into which a GGUF file's vocabulary splits a text, for every pre-tokenizer of
llama.cpp: compared with llama.cpp's words or, where the family's differ, with the family's.

Digests of llama.cpp's words were made with `src/unicode.cpp` of b11434: its `unicode_regex_split`
was given the `regex_exprs` that `src/llama-vocab.cpp` has for a name, without encoding bytes."""

import hashlib
import json
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.digests import Identity
from dovetail.workers.models.checkpoints.gguf.files import FileHead, Model
from dovetail.workers.models.checkpoints.gguf.splittings import ENCODERS, LETTERS, SPLITTINGS
from dovetail.workers.models.checkpoints.gguf.vocabulary import Vocabulary, read_vocabulary

PLAIN = (
    *("a", "b", "xyz", "ж", "न", "中", "文", "の", "한", "ㄱ", "ㄅ", "ส", "ວ"),
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "'", "'s", "'re", "'x"),
    *("!", "?!", "...", "，", "。", "(", ")", "/", "//", "_", "-", "$", "+", "<=>", "`", "~"),
    *("|", "€", "🙂", "[", "]", "\\", "^", "{", "}", "、", "۔", "،", "।", "…", "\x0b"),
)
"""Parts of texts that llama.cpp splits like every family."""
ODD = (
    *PLAIN,
    *("Z", "Camel", "CASE", "é", "É", "ß", "Ж", "'LL", "'Re", "Aʰ", "ǅ", "ﬀ", "ʼ"),
    *("1", "22", "333", "4444", "1234567", "٣", "½", "Ⅻ", "ा", "ก็", "\u0301", "\u200d"),
    *("\u00a0", "\u3000", "\x7f", "\x01", "IMGIMGABZ", "<sentinel:3>"),
)


def texts(parts: tuple[str, ...], count: int = 500) -> list[str]:
    draw = random.Random(0)
    return [
        "".join(parts[draw.randrange(len(parts))] for _ in range(draw.randint(1, 14)))
        for _ in range(count)
    ]


LLAMA_CPP = {
    "ODD": {
        "c3cb4db4b74ebe2c": "default",
        "af6a7c68f99ace00": "minicpm5",
        "f4102819bf252acb": "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 "
        "jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 glm5",
        "ddbb0e037b5e9c5c": "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
        "ba43320a7f23b870": "spark2_5",
        "f58591e4b04eb223": "falcon",
        "640d1b97bcb36805": "mpt gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum modern-bert "
        "jina-v1-en roberta-bpe olmo jais exaone4 trillion granite-docling",
        "9150a325039b56f6": "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        "817be59d4b288dbb": "jais-2",
        "a52013c02e84a5b7": "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez bailingmoe "
        "bailingmoe2 llada-moe hunyuan grok-2 solar-open",
        "ffa44ffa75ad274e": "qwen35",
        "497e5383f4be5072": "poro-chat bloom gpt3-finnish",
        "97c7d53d6d7addd8": "viking",
        "8eb493b5968c2963": "exaone-moe",
        "de559039e61f8c05": "chameleon",
        "d4139c2cf3fc831f": "seed-coder",
        "7d36c4c3c0264e13": "ufakzeka",
        "4dd5cd92c64d75ef": "laguna",
    },
    "PLAIN": {
        "e60ae5d2b1af0da3": "deepseek-llm",
        "16662cc87a87c685": "deepseek-coder",
        "9743f7286c95eb74": "youtu",
        "8ff109a239a5bcf1": "tekken",
        "c0bf183d255d2f85": "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m "
        "tiny_aya cohere2moe",
        "e8558cf96f40b8d0": "superbpe",
        "335f72ff5d41642a": "kimi-k2",
        "1f5202b3fb42e1a7": "afmoe",
    },
}
"""Digests of the lengths of llama.cpp's words in these texts -> the names with this digest."""
BEFORE = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"{BEFORE}{UPPER}*{LOWER}+{ENDINGS}|{BEFORE}{UPPER}+{LOWER}*{ENDINGS}|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (GPT4O,),
    "tiny_aya cohere2moe": (
        r"\d{1,3}(?=(?:\d{3})*(?![\p{L}\p{M}\p{N}_]))",  # \b, and Oniguruma takes ½ for a letter
        GPT4O,
    ),
    "tekken": (GPT4O.replace(ENDINGS, "").replace(r"\p{N}{1,3}", r"\p{N}"),),
    "kimi-k2": (
        r"(?V1)[\p{Han}]+|"
        + GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]"),
    ),
    "youtu": (
        r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
        r"\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "deepseek-coder": (
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
        *(r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    ),
    "afmoe": (
        r"\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{3}|\p{N}{1,2}",
        r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-"
        r"\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Names -> expressions of the family's tokenizer.json, where llama.cpp has an approximation."""
COMPOSED = {"command-r", "cohere2moe", "f2llmv2", "mpt", "olmo", "qwen2", "qwen35", "tiny_aya"}
"""Families whose tokenizer.json composes a text (NFC)."""


def vocabulary(name: str | None, text: str = "AB", **more: Any) -> Vocabulary:
    """A byte-level vocabulary of all parts of a text's bytes, which merge in every way."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x180))]
    spelt = "".join(BYTES[byte] for byte in text.encode())
    ends = range(2, len(spelt) + 1)
    parts = {spelt[end - size : end]: 0 for size in ends for end in range(size, len(spelt) + 1)}
    merges = [f"{part[:cut]} {part[cut:]}" for part in parts for cut in range(1, len(part))]
    tokens = [*dict.fromkeys((*letters, *parts))]
    facts = {"model": "gpt2", "tokens": tokens, "merges": merges, "bos_token_id": 0, **more}
    facts |= {} if name is None else {"pre": name}
    keys = {f"tokenizer.ggml.{key}": one for key, one in facts.items() if one is not None}
    return read_vocabulary(
        Model([FileHead(Path("m.gguf"), Identity(0, 0, 0, 0, 0), keys, (), 0, {})])
    )


def plain_bytes() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + n) for n, b in enumerate(rest)}


BYTES = plain_bytes()


def tokenizer_of(name: str | None, text: str = "AB", **more: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(vocabulary(name, text, **more).content))


def words_of(tokenizer: Tokenizer, text: str) -> list[str]:
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[first:last] for _, (first, last) in found]


def split(text: str, expressions: tuple[str, ...]) -> list[str]:
    """The words of a text by expressions, each of which splits what the previous ones left."""
    words = [text]
    for expression in expressions:
        parts = []
        for word in words:
            done = 0
            for match in regex.finditer(expression, word):
                parts += [word[done : match.start()], match[0]]
                done = match.end()
            parts.append(word[done:])
        words = [part for part in parts if part]
    return words


def test_every_name_of_llama_cpp_is_read_or_refused_by_name() -> None:
    read = [
        name
        for names in LLAMA_CPP.values()
        for several in names.values()
        for name in several.split()
    ]
    assert sorted(read) == sorted(SPLITTINGS)
    assert len({*read, *LETTERS, *ENCODERS}) == 92
    for name in (*ENCODERS, "unheard-of"):
        with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.pre.*'{name}'"):
            vocabulary(name)


@pytest.mark.parametrize(("parts", "kind"), [(ODD, "ODD"), (PLAIN, "PLAIN")], ids=["odd", "plain"])
def test_words_are_those_of_llama_cpp(parts: tuple[str, ...], kind: str) -> None:
    drawn, found = texts(parts), dict[str, str]()
    for names in LLAMA_CPP[kind].values():
        for name in names.split():
            tokenizer = tokenizer_of(name)
            lengths = [[len(word) for word in words_of(tokenizer, text)] for text in drawn]
            found[name] = hashlib.sha256(repr(lengths).encode()).hexdigest()[:16]
    assert found == {n: mark for mark, names in LLAMA_CPP[kind].items() for n in names.split()}


@pytest.mark.parametrize("names", FAMILIES)
def test_words_are_those_of_the_family_where_llama_cpp_has_others(names: str) -> None:
    for name in names.split():
        tokenizer = tokenizer_of(name)
        for text in texts(ODD):
            assert words_of(tokenizer, text) == split(text, FAMILIES[names]), name


def test_no_token_crosses_a_boundary_though_every_part_of_a_text_is_a_token() -> None:
    text = "I'LL aB  12é\n\n y"
    for name in {splitting: name for name, splitting in SPLITTINGS.items()}.values():
        tokenizer = tokenizer_of(name, text)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        assert [text[a:b] for a, b in encoded.offsets] == words_of(tokenizer, text), name


def test_a_family_that_composes_a_text_does_so() -> None:
    text = "e\u0301 ก็ A\u030a ﬁ"
    for name in SPLITTINGS:
        normalizer = tokenizer_of(name).normalizer
        assert (normalizer is not None) is (name in COMPOSED)
        if normalizer is not None:
            assert normalizer.normalize_str(text) == unicodedata.normalize("NFC", text)


def test_a_file_that_names_no_way_is_read_as_the_default() -> None:
    assert vocabulary(None).content == vocabulary("default").content


@pytest.mark.parametrize("stated", [{}, {"bos_token_id": 999, "eos_token_id": 999}])
def test_ids_that_a_file_of_pieces_does_not_state_are_sentencepieces(
    stated: dict[str, int],
) -> None:
    """As in llama.cpp."""
    found = vocabulary("default", model="llama", **{"bos_token_id": None, **stated})
    assert (found.begin, found.ends) == (1, [2])
    assert found.content["model"]["unk_token"] == "!"


@pytest.mark.parametrize(("name", "begins"), [(None, True), *LETTERS.items()])
def test_a_vocabulary_of_letters_begins_as_in_llama_cpp(name: str | None, begins: bool) -> None:
    """Gemma 4's always does, whatever it states."""
    model = {} if name else {"model": "gemma4"}
    content = vocabulary(name, add_bos_token=False, **model).content
    assert content["normalizer"]["content"] == "▁"
    assert content["pre_tokenizer"]["pattern"] == {"Regex": r"[^\n]+|[\n]+"}
    assert (len(content["post_processor"]["single"]) == 2) is begins
    assert (
        len(vocabulary(name, add_bos_token=True, **model).content["post_processor"]["single"]) == 2
    )


@pytest.mark.parametrize("model", ["gpt2", "llama", "gemma4"])
@pytest.mark.parametrize(
    "name",
    [
        *("add_eos_token", "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap"),
        *("normalizer.lowercase", "normalizer.strip_accents"),
    ],
)
def test_a_key_that_changes_a_text_is_refused(name: str, model: str) -> None:
    charsmap = name == "precompiled_charsmap"
    neutral, other = (np.zeros(0, np.uint8), np.ones(2, np.uint8)) if charsmap else (False, True)
    vocabulary("default", model=model, **{name: neutral})
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*tokenizer\.ggml\.{re.escape(name)}"):
        vocabulary("default", model=model, **{name: other})
