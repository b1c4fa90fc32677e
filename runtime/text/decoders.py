"""Decoders of a tokenizer.json, one token at a time: the concatenated pieces equal the library's
text of all tokens at once. A decoder is a chain of stages. Each takes pieces of tokens and passes
pieces on as soon as no later token can change them; the rest is passed on after the last token. A
piece is a text and whether its token ends with it: after a `Fuse` there is one token, which grows
until the end. A stage holds back only what is uncertain: an incomplete character, or a possible
beginning of a pattern. If the library fails on a token, its spelling is kept: no stage raises.

Unlike in the library, which replaces all bytes of a run of byte tokens if any is invalid UTF-8,
complete characters of such a run are kept (see `ByteFallback`)."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Piece = tuple[str, bool]
Rewrite = Callable[[str], str]  # decodes the text of one token
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EACH_BYTE = "dovetail.each_byte"  # name of the codec error handler that replaces each byte


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


class Stage:
    """Passes pieces on unchanged."""

    def push(self, text: str, end: bool) -> Iterable[Piece]:
        """Return the pieces that become available with one more piece."""
        return ((text, end),)

    def flush(self) -> Iterable[Piece]:
        """Return the remaining pieces after the last token."""
        return ()


class Fuse(Stage):
    """Merges all tokens into one."""

    def push(self, text: str, end: bool) -> Iterable[Piece]:
        return ((text, False),)

    def flush(self) -> Iterable[Piece]:
        return (("", True),)


class Strip(Stage):
    """Strips a number of characters from the beginning of a token, and a number from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._leading, self._held = start, ""

    def push(self, text: str, end: bool) -> Iterable[Piece]:
        cut = 0
        while cut < len(text) and self._leading and text[cut] == self._content:
            cut, self._leading = cut + 1, self._leading - 1
        if cut < len(text):
            self._leading = 0
        text = self._held + text[cut:]
        trailing = len(text) - len(text.rstrip(self._content)) if self._stop else 0
        keep = len(text) - min(trailing, self._stop)
        self._held = text[keep:]
        if end:
            self._leading, self._held = self._start, ""
        return ((text[:keep], end),)


class Replace(Stage):
    """Replaces a string by another within tokens."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content, self._held = pattern, content, ""

    def push(self, text: str, end: bool) -> Iterable[Piece]:
        *before, text = (self._held + text).split(self._pattern)
        keep = 0 if end else overlap(text, self._pattern)
        self._held = text[len(text) - keep :]
        shown = text[: len(text) - keep]
        return ((self._content.join([*before, shown]), end),)


class Metaspace(Stage):
    """Replaces the characters for spaces; drops a prepended one in the first token."""

    def __init__(self, replacement: str, *, prepended: bool) -> None:
        self._replacement, self._space = replacement, "" if prepended else " "

    def push(self, text: str, end: bool) -> Iterable[Piece]:
        shown = text.replace(self._replacement, self._space)
        if end:
            self._space = " "
        return ((shown, end),)


class WholeTokens(Stage, ABC):
    """Waits for the end of each token."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def push(self, text: str, end: bool) -> Iterable[Piece]:
        if end and not self._parts:
            return self.take(text)
        self._parts.append(text)
        if not end:
            return ()
        token, self._parts = "".join(self._parts), []
        return self.take(token)

    @abstractmethod
    def take(self, token: str) -> Iterable[Piece]:
        """Return the pieces of text that one more token completes."""


class Rewritten(WholeTokens):
    """Rewrites every token separately, the first one differently."""

    def __init__(self, rewrite: Rewrite, first: Rewrite | None = None) -> None:
        super().__init__()
        self._rewrite, self._next = rewrite, first or rewrite

    def take(self, token: str) -> Iterable[Piece]:
        rewrite, self._next = self._next, self._rewrite
        return ((_or_as_it_is(rewrite, token), True),)


class Deduplicated(WholeTokens):
    """CTC: equal consecutive tokens become one, which is rewritten; empty ones are dropped."""

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__()
        self._rewrite = rewrite
        self._last: str | None = None

    def take(self, token: str) -> Iterable[Piece]:
        again, self._last = token == self._last, token
        text = "" if again else _or_as_it_is(self._rewrite, token)
        return ((text, True),) if text else ()


class Suffixed(WholeTokens):
    """BPE: a suffix ends a word; it becomes a space, or nothing in the last token."""

    def __init__(self, suffix: str) -> None:
        super().__init__()
        self._suffix = suffix
        self._held: str | None = None  # the last token from its first suffix on

    def take(self, token: str) -> Iterable[Piece]:
        before = [] if self._held is None else [(self._held.replace(self._suffix, " "), True)]
        place = max(0, token.find(self._suffix)) if self._suffix in token else len(token)
        self._held = token[place:]
        return (*before, (token[:place], False))

    def flush(self) -> Iterable[Piece]:
        held, self._held = self._held, None
        return () if held is None else ((held.replace(self._suffix, ""), True),)


class Bytes(WholeTokens):
    """ByteLevel: every letter represents a byte; the result is one token."""

    def __init__(self, byte_of_letter: Mapping[str, int]) -> None:
        super().__init__()
        self._byte_of = byte_of_letter.__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token: str) -> Iterable[Piece]:
        try:
            spelt = bytes(map(self._byte_of, token))
        except KeyError:
            spelt = token.encode()
        return ((self._decoder.decode(spelt), False),)

    def flush(self) -> Iterable[Piece]:
        return ((self._decoder.decode(b"", final=True), True),)


class ByteFallback(WholeTokens):
    """Decodes runs of byte tokens such as <0xE4>. As in SentencePiece, each invalid byte becomes
    U+FFFD, and an incomplete character at the end a single one."""

    def __init__(self) -> None:
        super().__init__()
        self._running = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(EACH_BYTE)

    def take(self, token: str) -> Iterable[Piece]:
        byte = _byte(token)
        if byte is not None:
            self._running = True
            return ((self._decoder.decode(bytes([byte])), False),)
        rest = ((self._decoder.decode(b"", final=True), True),) if self._running else ()
        self._running = False
        return (*rest, (token, True))

    def flush(self) -> Iterable[Piece]:
        running, cut = self._running, bool(self._decoder.getstate()[0])
        self._running = False
        self._decoder.reset()
        return ((REPLACEMENT if cut else "", True),) if running else ()


class Spaced(WholeTokens):
    """No decoder: a space between two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._space = ""

    def take(self, token: str) -> Iterable[Piece]:
        space, self._space = self._space, " "
        return ((space + token, True),)


class Collected(WholeTokens):
    """A decoder of another type, which gets all tokens at the end."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        super().__init__()
        self._decode = decode
        self._tokens: list[str] = []

    def take(self, token: str) -> Iterable[Piece]:
        self._tokens.append(token)
        return ()

    def flush(self) -> Iterable[Piece]:
        tokens, self._tokens = self._tokens, []
        return ((_or_as_it_is(lambda _: self._decode(tokens), "".join(tokens)), True),)


def through(stages: Sequence[Stage], pieces: Iterable[Piece]) -> str:
    """Return a chain's text for these pieces."""
    for stage in stages:
        pieces = [out for text, end in pieces for out in stage.push(text, end)]
    return "".join([text for text, _ in pieces])


def flushed(stages: Sequence[Stage]) -> str:
    """Return the remaining text of a chain after the last token."""
    return "".join(
        through(stages[place + 1 :], stage.flush()) for place, stage in enumerate(stages)
    )


def open_stages(
    spec: Any,
    library: Callable[[Any], Callable[[list[str]], str]],
    byte_of_letter: Mapping[str, int],
) -> list[Stage]:
    """Return the stages of a decoder in tokenizer.json; `library` makes the library's."""

    def alone(spec: Any) -> Rewrite:
        decode = library(spec)
        return lambda token: decode([token])

    def behind(spec: Any) -> Rewrite:
        decode = library(spec)
        return lambda token: decode(["", token])

    def opened(spec: Any) -> list[Stage]:
        match spec:
            case {"type": "Sequence", "decoders": [*parts]}:
                return [stage for part in parts for stage in opened(part)]
            case {"type": "Fuse"}:
                return [Fuse()]
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": int(stop)}:
                return [Strip(content, start, stop)]
            case {
                "type": "Replace",
                "pattern": {"String": str(pattern)},
                "content": str(content),
            } if pattern:
                return [Replace(pattern, content)]
            case {"type": "Replace"}:
                return [Rewritten(alone(spec))]
            case {"type": "Metaspace", "replacement": str(replacement), "prepend_scheme": scheme}:
                return [Metaspace(replacement, prepended=scheme != "never")]
            case {"type": "WordPiece"}:
                return [Rewritten(behind(spec), first=alone(spec))]
            case {"type": "CTC"}:
                return [Deduplicated(alone(spec))]
            case {"type": "BPEDecoder", "suffix": str(suffix)}:
                return [Suffixed(suffix)]
            case {"type": "ByteLevel"}:
                return [Bytes(byte_of_letter)]
            case {"type": "ByteFallback"}:
                return [ByteFallback()]
            case _:
                return [Collected(library(spec))]

    return [Spaced()] if spec is None else opened(spec)


def overlap(text: str, pattern: str) -> int:
    """Return the length of the longest proper prefix of `pattern` that ends `text`."""
    return next(
        (n for n in range(min(len(text), len(pattern) - 1), 0, -1) if text.endswith(pattern[:n])), 0
    )


def _byte(token: str) -> int | None:
    """Return the byte of a token such as <0xE4>, parsed as in the library, which allows a plus
    sign."""
    digits = token[3:-1]
    if (
        len(token) != 6
        or not token.startswith("<0x")
        or not token.endswith(">")
        or not digits.isascii()
    ):
        return None
    digits = digits.removeprefix("+")
    return (
        int(digits, 16)
        if digits.isalnum() and all(digit in "0123456789abcdefABCDEF" for digit in digits)
        else None
    )


def _or_as_it_is(rewrite: Rewrite, token: str) -> str:
    """Rewrite a token; if the library fails or panics, the token is unchanged."""
    try:
        return rewrite(token)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException:
        return token
