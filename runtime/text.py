"""Text to token ids and back: the target's tokenizer, its chat template, and a detokenizer that never shows half a character.

The only door to the `tokenizers` library. Everything comes from the bytes that the target sent with its Hello: the coordinator's machine needs no model
files. Knows nothing of sessions. Special tokens written out in a prompt are read as special tokens, as transformers does.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.runtime.templates import ChatTemplate

MAX_GROWTH = 64
"""Letters that tokenizing and its inverse may make of one; those of today's models make one or two."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextCodec:
    """The tokenizer and the chat template of one target."""

    def __init__(self, tokenizer: bytes, facts: VocabularyFacts) -> None:
        self.facts = facts
        self._tokenizer = _tokenizer(tokenizer)
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._template = _template(facts.template) if facts.template else None
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer).get("decoder"))
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of plain text, with what the tokenizer itself puts around it; `special`: whether it is to do that."""
        return self._ids(_valid(text), special=special)

    def encode_turns(self, turns: Sequence[str]) -> tuple[int, ...]:
        """Token ids of a conversation (user first, then alternating) up to where the next reply begins; plain text where there is no template."""
        if self._template is None:
            return self.encode("\n".join(turns))
        return self.encode_messages([(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)])

    def encode_messages(self, messages: Sequence[tuple[str, str]], *, reply: bool = True) -> tuple[int, ...]:
        """Token ids of a conversation of (role, content), `reply`: up to where the next reply begins; plain text where there is no template."""
        if self._template is None:
            return self.encode("\n".join(content for _, content in messages))
        told = [{"role": role, "content": _valid(content)} for role, content in messages]
        begin, end = (self._tokenizer.id_to_token(i) if i is not None else "" for i in (self.facts.begin, next(iter(self.facts.end), None)))
        try:
            text = self._template.render(messages=told, add_generation_prompt=reply, bos_token=begin or "", eos_token=end or "", tools=None)
        except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
            raise RequestError("settings", f"the chat template of the target fails on these turns: {type(error).__name__}: {str(error)[:300]}") from None
        return self._ids(text, special=False)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of token ids; `special`: with the special tokens written out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def token(self, index: int) -> str:
        """A token as the vocabulary spells it; empty if there is none of this id."""
        return self._tokenizer.id_to_token(index) or ""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text, in its middle; they need not be a whole character. Special tokens are written out."""
        if token not in self._pieces:
            self._pieces[token] = self._piece(token)
        return self._pieces[token]

    def _piece(self, token: int) -> bytes:
        spelt = self.token(token)
        if token in self._added:
            return spelt.encode()
        if self._byte_level and all(letter in BYTE_OF_LETTER for letter in spelt):
            return bytes(BYTE_OF_LETTER[letter] for letter in spelt)
        if (byte := _BYTE_TOKEN.fullmatch(spelt)) is not None:
            return bytes([int(byte[1], 16)])
        before = self.decode(self._anchor, special=True)
        return self.decode([*self._anchor, token], special=True)[len(before) :].encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _anchor(self) -> tuple[int, ...]:
        """Something to stand before a token: decoders treat the first one of a text in a way of its own."""
        return self.encode("a", special=False)[-1:]

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without tokenizing it: no token is longer than the longest of the vocabulary.

        Half of what that gives, since a normalizer may drop characters.
        """
        return len(text) // (2 * self._longest)

    def _ids(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self._tokenizer)


class Writer(Protocol):
    """What makes text of tokens as they come: a Detokenizer, or what stands before one."""

    def push(self, token: int, /) -> str:
        """The text that a token completes."""

    def flush(self) -> str:
        """What is left when no token will follow."""


class Detokenizer:
    """Turns a growing list of token ids into text, a whole character at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, often a word, sometimes nothing yet."""
        piece = self._stream.step(self._tokenizer, token)
        self._pending = [] if piece else [*self._pending, token]
        return piece or ""

    def flush(self) -> str:
        """What is left when no token will follow: the incomplete character, as replacement characters."""
        rest, self._pending = self._pending, []
        return self._tokenizer.decode(rest, skip_special_tokens=True) if rest else ""


def open_detokenizer(tokenizer: bytes) -> Detokenizer:
    """One for the bytes of a tokenizer.json."""
    return Detokenizer(_tokenizer(tokenizer))


class StopStrings:
    """Cuts a text before the first stop string, and holds back what may turn out to be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string is complete)."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _byte_letters() -> Mapping[str, int]:
    """The letters by which byte-level vocabularies spell bytes (GPT-2's): printable ones stand for themselves, the rest follow from U+0100 on."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {**{chr(byte): byte for byte in themselves}, **{chr(256 + place): byte for place, byte in enumerate(others)}}


BYTE_OF_LETTER = _byte_letters()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("settings", "the prompt has lone surrogates: it is no valid Unicode text") from None
    return text


def _tokenizer(content: bytes) -> Tokenizer:
    try:
        parts = json.loads(content)
        growing = [name for name in ("normalizer", "decoder") if _growth(parts.get(name)) > MAX_GROWTH]
        if growing:
            raise ValueError(f"its {growing[0]} may make more than {MAX_GROWTH} letters of one")
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise RequestError("vocabulary", f"tokenizer.json cannot be read: {str(error)[:300]}") from None


def _growth(part: Any) -> float:
    """How many times longer a normalizer or a decoder may make a text, by what it replaces; a chain of them multiplies."""
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()))
    if part.get("type") != "Replace":
        return 1.0
    replaced = len(str(part["pattern"].get("String", "")))  # an expression may fit between any two letters
    return max(1.0, len(part["content"]) / replaced if replaced else 1 + len(part["content"]))


def _template(text: str) -> ChatTemplate:
    try:
        return ChatTemplate(text)
    except ValueError as error:
        raise RequestError("settings", f"the chat template cannot be read: {error}") from None
