"""Text to token ids and back: the target's tokenizer, its chat template, and a detokenizer that
never shows half a character and never raises. The only door to the `tokenizers` library. Everything
comes from the bytes that the target sent with its Hello: the coordinator's machine needs no model
files. Special tokens spelled out in a prompt are read as special tokens, as in transformers; those
in messages are plain text, unless allowed.
"""

import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.memory import release_memory
from dovetail.protocol.messages import Described, FinishReason, VocabularyFacts
from dovetail.protocol.vocabulary import BYTE_OF_LETTER, BYTE_TOKEN, TokenTable
from dovetail.runtime.text.chats import BREAK, ControlTokens, Message
from dovetail.runtime.text.decoders import REPLACEMENT, flushed, open_stages, through
from dovetail.runtime.text.stop_strings import StopStrings
from dovetail.runtime.text.templates import INSTEAD, RENDERER

MAX_GROWTH = 64
"""The most characters that tokenizing or detokenizing may make of one; usually one or two."""
OWN_VALUES = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token", "tools"))
"""Names of the values that every chat template gets."""
LARGE = 1 << 20  # size in bytes of a tokenizer.json from which on parsing leaves much freed memory
NO_VALUES: Mapping[str, Any] = MappingProxyType({})
PROMPT_TAIL = 32
"""Number of last prompt tokens that are detokenized with a reply: they decide whether its first
token begins the text, completes a character of up to four tokens, or continues a pattern."""
MARKS = "".join(map(chr, range(0xD800, 0xE000)))
"""Lone surrogates, which represent special tokens in the search for stop strings."""
_STOP: FinishReason = "stop"
_LENGTH: FinishReason = "length"
ESCAPED_BREAK = json.dumps(BREAK)[1:-1]
NO_TEMPLATE = "the model has no chat template"


def against_values(values: Mapping[str, Any], template: str) -> str:
    """Return why a template cannot be given these values, and the remedy; empty if it can."""
    if values and not template:
        return "they are for a chat template, but the target has none: leave them out"
    if ours := sorted(OWN_VALUES.intersection(values)):
        return f"{', '.join(ours)} may not be among them: these are derived from the request"
    return ""


def why_no_chats(template: str) -> str:
    """Return why a model does not support chats, by a trial of its template; else ""."""
    try:
        if template:
            RENDERER.render(template, _given([{"role": "user", "content": "hello"}]))
        return "" if template else NO_TEMPLATE
    except RequestError as error:
        return str(error)
    finally:
        RENDERER.close()


def _given(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    reply: bool = True,
    begin: str = "",
    end: str = "",
) -> dict[str, Any]:
    """Return the values that every chat template gets, as in transformers."""
    own = {"messages": messages, "add_generation_prompt": reply, "tools": tools, "documents": None}
    return {**own, "bos_token": begin, "eos_token": end}


class Spelling:
    """Detokenizes without a tokenizer. No method raises, for any ids."""

    def __init__(self, table: TokenTable) -> None:
        """Raises `RequestError` for a decoder that is unreadable or expands text too much."""
        self.table = table
        try:
            if _growth(table.decoder) > MAX_GROWTH:
                raise ValueError(f"its decoder may turn one character into more than {MAX_GROWTH}")
            self.decoder = None if table.decoder is None else json.loads(_read(table.decoder))
        except Exception as error:  # the library raises bare Exception for unreadable input
            raise _unreadable(error) from None

    def token(self, index: int) -> str:
        """Return the spelling of a token; empty for an unknown id."""
        return self.table.spelling(index) or ""

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text: its length over twice that of the longest
        token, since a normalizer may drop characters."""
        return len(text) // (2 * self.table.longest)

    def detokenizer(
        self, prompt: Sequence[int] = (), *, special: bool | Collection[str] = False
    ) -> "Detokenizer":
        """Return a detokenizer for the reply to this prompt. `special`: include special tokens, or
        those within these texts."""
        hidden = {} if special is True else self.table.special
        if not isinstance(special, bool):
            hidden = {
                one: index
                for one, index in hidden.items()
                if not any(one in text for text in special)
            }
        return Detokenizer(self, hidden, prompt)

    def prompt_text(self, prompt: Sequence[int]) -> str:
        """Return a prompt's text, without an incomplete last character."""
        return self.detokenizer().read_prompt(prompt)


class TextCodec(Spelling):
    """The tokenizer and the chat template of one target."""

    def __init__(
        self, tokenizer: bytes, facts: VocabularyFacts, table: TokenTable | None = None
    ) -> None:
        """`table`: the tokenizer's table, if already read."""
        try:
            super().__init__(TokenTable.read(tokenizer) if table is None else table)
        except CheckpointError as error:
            raise _unreadable(error) from None
        self.facts, self.content = facts, tokenizer
        self._tokenizer = _tokenizer(tokenizer)
        self._byte_level = '"ByteLevel"' in json.dumps(self.decoder)
        self._pieces: dict[int, bytes] = {}

    def has_token(self, text: str) -> bool:
        """Return whether a text is one token."""
        return self._tokenizer.token_to_id(text) is not None

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of text; `special`: with the tokenizer's special tokens around
        it."""
        return self._ids(_valid(text), special=special)

    def encode_turns(self, turns: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of turns up to the next reply; plain text without a template."""
        if not self.facts.template:
            return self.encode("\n".join(turns))
        roles = ("user", "assistant")
        return self.encode_messages(
            [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        )

    def encode_messages(
        self,
        messages: Sequence[Message],
        *,
        reply: bool = True,
        values: Mapping[str, Any] = NO_VALUES,
    ) -> tuple[int, ...]:
        """Return the token ids of a text from `render_messages`."""
        return self.encode_rendered(self.render_messages(messages, reply=reply, values=values))

    def render_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reply: bool = True,
        values: Mapping[str, Any] = NO_VALUES,
        special: bool = False,
    ) -> str:
        """Render messages with the chat template, for `encode_rendered`; may raise `RequestError`.
        `tools`: OpenAI's. `reply`: up to the next reply. `values`: more values, none in
        `OWN_VALUES`. `special`: control tokens in them are control tokens of the prompt, too."""
        if not self.facts.template:
            raise RequestError("settings", f"{NO_TEMPLATE}: {INSTEAD}")
        begin, end = (
            self._tokenizer.id_to_token(i) if i is not None else ""
            for i in (self.facts.begin, next(iter(self.facts.end), None))
        )
        if not special:
            control = self._control
            messages = control.break_messages(messages)
            tools, values = control.break_values(tools), control.break_values(values)
        given = _given(messages, tools=tools, reply=reply, begin=begin or "", end=end or "")
        text = _valid(RENDERER.render(self.facts.template, {**given, **values}))
        return text.replace(ESCAPED_BREAK, BREAK) if "ensure_ascii" in self.facts.template else text

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text whose breaks separate pieces."""
        first, *others = text.split(BREAK)
        ids = self._ids(first, special=False)
        if others:  # after a newline, since some tokenizers put a space before a text
            newline = self._ids("\n", special=False)
            lines = [f"\n{one}" for one in others]
            behind = self._tokenizer.encode_batch(lines, add_special_tokens=False)
            for one, encoded in zip(others, behind, strict=True):
                found = tuple(encoded.ids)
                joined = found[: len(newline)] == newline
                ids += found[len(newline) :] if joined else self._ids(one, special=False)
        return ids

    @cached_property
    def _control(self) -> ControlTokens:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return ControlTokens(((one.content, one.special) for one in added), self.facts.template)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids; `special`: with special tokens spelled out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token within a text, which may be an incomplete character."""
        if token not in self._pieces:
            self._pieces[token] = self._piece(token)
        return self._pieces[token]

    def _piece(self, token: int) -> bytes:
        spelt = self.token(token)
        if token in self._added:
            return spelt.encode()
        if self._byte_level and all(letter in BYTE_OF_LETTER for letter in spelt):
            return bytes(BYTE_OF_LETTER[letter] for letter in spelt)
        if (byte := BYTE_TOKEN.fullmatch(spelt)) is not None:
            return bytes([int(byte[1], 16)])
        before = self.decode(self._anchor, special=True)
        return self.decode([*self._anchor, token], special=True)[len(before) :].encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _anchor(self) -> tuple[int, ...]:
        """A token to put before others: decoders treat the first token of a text differently."""
        return self.encode("a", special=False)[-1:]

    def _ids(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)


def codec_of(described: Described, earlier: TextCodec | None = None) -> TextCodec:
    """Return a target's codec; `earlier`: a codec to reuse if its tokenizer is equal."""
    if earlier is not None and earlier.content == described.tokenizer.data:
        codec = copy.copy(earlier)
        codec.facts, codec.content = described.vocabulary, described.tokenizer.data  # held once
        return codec
    table = None if described.table is None else TokenTable.unpacked(described.table.data)
    return TextCodec(described.tokenizer.data, described.vocabulary, table)


class Stopwatch(Protocol):
    """Records the times of the coordinator's parts while observed."""

    fine: bool  # False while nothing observes them

    def now_ns(self) -> int: ...

    def finely(self, name: str, start_ns: int, about: object) -> None:
        """Record a part of the session `about` that ends now."""


class Detokenizer:
    """Turns a growing list of token ids into text as soon as it is certain: the joined pieces equal
    the tokenizer's text of prompt and reply, without the prompt's. Unknown ids and special tokens
    are left out, as by the tokenizer. Nothing raises, for any ids."""

    def __init__(
        self, spelling: Spelling, special: Mapping[str, int], prompt: Sequence[int] = ()
    ) -> None:
        """`special`: spellings and ids of tokens to leave out. `prompt`: the tokens before the
        reply; the last `PROMPT_TAIL` with a text are used."""
        self._spelling, self._special = spelling.table.spelling, special
        self._stages = open_stages(spelling.decoder, _library, BYTE_OF_LETTER)
        self._had = ""  # held-back text of the prompt, which is not part of the reply
        if prompt:
            shown = (token for token in reversed(prompt) if self._spelt(token) is not None)
            self.read_prompt([*islice(shown, PROMPT_TAIL)][::-1])

    def read_prompt(self, prompt: Sequence[int]) -> str:
        """Read the tokens of the prompt, and return the text that no reply can change."""
        text = self.push(*prompt)
        self._had = flushed(copy.deepcopy(self._stages)).rstrip(REPLACEMENT)
        return text + self._had

    def push(self, *tokens: int) -> str:
        """Return the text that these tokens complete: often a word, sometimes ""."""
        spelt = self._spelt
        return self._new(
            through(
                self._stages, [(one, True) for token in tokens if (one := spelt(token)) is not None]
            )
        )

    def flush(self) -> str:
        """Return the rest after the last token; an incomplete character becomes U+FFFD."""
        return self._new(flushed(self._stages))

    def marks(self, texts: Iterable[str]) -> Mapping[int, str]:
        """Return the special tokens that occur in these texts, by id, the longest first."""
        parts = [one for one in self._special if one and any(one in text for text in texts)]
        return {self._special[one]: one for one in sorted(parts, key=len)[::-1]}

    def _spelt(self, token: int) -> str | None:
        """Return the spelling of a token; None if it is special or unknown."""
        one = self._spelling(token)
        return None if one in self._special else one

    def _new(self, text: str) -> str:
        """Return a text without the part of it that belongs to the prompt."""
        if self._had and text:
            pairs = enumerate(zip(self._had, text, strict=False))
            shorter = min(len(self._had), len(text))
            same = next((place for place, (old, new) in pairs if old != new), shorter)
            self._had = self._had[same:] if same == len(text) else ""
            text = text[same:]
        return text


def _library(spec: Any) -> Callable[[list[str]], str]:
    """Return the library's own decoder for a description."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return lambda tokens: str(decoder.decode(tokens))


def _read(spec: Any) -> bytes:
    """Return a decoder's description as written by the library, with defaults filled in."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return bytes(decoder.__getstate__())


def open_detokenizer(tokenizer: bytes, prompt: Sequence[int]) -> Detokenizer:
    """Return a detokenizer for the reply to a prompt, from the bytes of a tokenizer.json."""
    return Spelling(TokenTable.read(tokenizer)).detokenizer(prompt)


class Piece:
    """The text of some tokens, decoded lazily unless stop strings are searched for."""

    def __init__(self, reply: "ReplyText", tokens: Sequence[int], text: str | None = None) -> None:
        self.tokens, self.text, self._reply = tokens, text, reply

    def __call__(self) -> str:
        """Return the text."""
        if self.text is None:
            self._reply.catch_up()
        assert self.text is not None
        return self.text


class ReplyText:
    """The text of a reply, up to an end token, a stop string or the length."""

    def __init__(
        self, detokenizer: Detokenizer, end: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        """`end`: tokens that end the reply. `stop`: strings that end it, unless completed within
        the first `min_tokens` tokens; special tokens in them match those in the reply."""
        self.detokenizer = detokenizer
        self._end, self._stopping, self._least = end, bool(stop), min_tokens
        hidden = detokenizer.marks(stop) if stop else {}
        self._marks = dict(zip(hidden, MARKS, strict=False))
        marked = list(stop)
        for token, mark in self._marks.items():
            marked = [text.replace(hidden[token], mark) for text in marked]
        marks = "".join(self._marks.values())
        self._stops = StopStrings(tuple(dict.fromkeys((*stop, *marked))), marks)
        self._count = 0  # tokens read so far
        self._shown: list[str] = []
        self._unread: list[Piece] = []
        self._stopwatch: Stopwatch | None = None
        self._about: object = None

    def watch(self, stopwatch: Stopwatch, about: object) -> None:
        """Record the time of each decoding. `about`: the session of this reply."""
        self._stopwatch, self._about = stopwatch, about

    @property
    def shown(self) -> str:
        """Return the text that the client has been sent."""
        self.catch_up()
        return "".join(self._shown)

    def read(self, tokens: Sequence[int], room: int) -> tuple[int, Piece, FinishReason | None]:
        """Return how many tokens belong to the reply, their text, and the finish reason, if any.
        `room`: the most further tokens."""
        kept, reason = tokens[:room], _LENGTH if len(tokens) >= room else None
        count = len(kept)
        for place, token in enumerate(kept):
            if token in self._end:
                kept, reason, count = kept[:place], _STOP, place + 1
                break
        piece = Piece(self, kept)
        if self._stopping:
            piece.text, stopped = self._until_stop(kept)
            if stopped:
                count, reason = stopped, _STOP
            self._shown.append(piece.text)
        else:
            self._unread.append(piece)
        self._count += count
        return count, piece, reason

    def catch_up(self) -> None:
        """Read the pieces that have not been read."""
        watch, unread, self._unread = self._stopwatch, self._unread, []
        for piece in unread:
            began_ns = watch.now_ns() if watch is not None and watch.fine else 0
            piece.text = self.detokenizer.push(*piece.tokens)
            self._shown.append(piece.text)
            if watch is not None and began_ns:
                watch.finely("detokenise", began_ns, self._about)

    def _until_stop(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the text up to a stop string, and the tokens that complete it; 0: none."""
        shown = ""
        for place, token in enumerate(tokens, 1):
            text = self.detokenizer.push(token) + self._marks.get(token, "")
            text, stopped = self._stops.push(text, early=self._count + place <= self._least)
            shown += text
            if stopped:
                return self._unmarked(shown), place
        return self._unmarked(shown), 0

    def left(self) -> str:
        """Return the text held back, which then counts as shown, after the last token."""
        self.catch_up()
        early = self._count <= self._least
        last, _ = self._stops.push(self.detokenizer.flush(), early=early)
        self._shown.append(self._unmarked(last + self._stops.flush()))
        return self._shown[-1]

    def _unmarked(self, text: str) -> str:
        """Return a text without marks of special tokens."""
        return text.translate(dict.fromkeys(map(ord, MARKS))) if self._marks else text


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            "settings", "the prompt has lone surrogates: it is not valid Unicode text"
        ) from None
    return text


def _tokenizer(content: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
        own = tokenizer.normalizer
        if own is not None and _growth(json.loads(own.__getstate__())) > MAX_GROWTH:
            raise ValueError(f"its normalizer may turn one character into more than {MAX_GROWTH}")
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise _unreadable(error) from None
    if len(content) >= LARGE:
        release_memory()
    return tokenizer


def _unreadable(error: Exception) -> RequestError:
    return RequestError("vocabulary", f"tokenizer.json cannot be read: {str(error)[:300]}")


def _growth(part: Any) -> float:
    """Return how many times longer a normalizer or decoder may make a text."""
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()))
    if part.get("type") != "Replace":
        return 1.0
    # an expression may match between any two characters
    replaced = len(str(part["pattern"].get("String", "")))
    return max(1.0, len(part["content"]) / replaced if replaced else 1 + len(part["content"]))
