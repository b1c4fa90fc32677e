"""Grammars that a reply must follow: how they are written, and which tokens they allow next.

The only module that uses llguidance. A grammar is llguidance's own text: Lark with `%json {...}`
parts, or JSON that contains schemas. Its masks depend on this text, the tokenizer and the version
of the library (`grammar_engine`) alone: after the same tokens they are the same, however they were
reached.

Schemas follow draft 2020-12 as far as the library implements it. Properties come in the order of
the schema, and text is written as UTF-8, without `\\u` escapes of characters that need none."""

import codecs
import copy
import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.messages import MAX_GRAMMAR, Constraint, ThoughtBudget, VocabularyFacts
from dovetail.protocol.schemas import expressed
from dovetail.protocol.vocabulary import TokenTable

WHITESPACE = " |\n {0,16}"
"""The whitespace at each place of a JSON text: a space, or a new line with an indentation. Without
a bound, a model that is stuck writes blanks to the end of its reply (vLLM #21026, ollama #2623)."""
MAX_SCHEMA = 1 << 18  # characters of a schema
MAX_DEPTH = 64  # nesting of a schema
MAX_PARTS = 10_000  # properties and enum values of a schema
MAX_PATTERNS = 100  # different patterns of a schema
MAX_CHOICES = 1000
MAX_TAGS = 64  # structures of a structural tag
MAX_BYTES = 4  # of a character in UTF-8
KEPT = 64  # compiled grammars that are kept
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Bounds of time and memory: `^(a{1000}){1000}$` is refused after 0.1 s, which took 0.9 s and
269 MB with the library's own bounds."""
SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/]")
VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are JSON texts, not schemas."""
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are schemas by name."""
NONE = 1 << 32  # above every id
SPACED_WORDS = r"\s{0,64}\S{1,64}|\s{1,64}"
GPT_2_WORDS = (
    r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]{1,64}| ?\d{1,3}| ?(?:[^\s\w]|_){1,64}|\s{1,64}(?!\S)|\s"
)
GPT_4_WORDS = (
    r"(?:[^\r\n\w]|_)?[^\W\d_]{1,64}|\d{1,3}| ?(?:[^\s\w]|_){1,64}[\r\n]{0,64}"
    r"|\s{0,64}[\r\n]{1,64}|\s{1,64}(?!\S)|\s"
)
"""Words that no token goes beyond, of about 64 characters at most: as SentencePiece cuts a text,
and as the expressions of GPT-2 and GPT-4 do, of which those of other models are variations."""
Allowed = NDArray[np.bool_]


def refused(text: str) -> RequestError:
    """Return the error for a grammar that cannot be followed, from the reason's first line, and the
    one that begins with "error:"."""
    lines = [one.strip() for one in text.splitlines() if one.strip()]
    first, *others = lines or ["it cannot be compiled"]
    cause = next((one.removeprefix("error:") for one in others if one.startswith("error:")), "")
    return RequestError("constraint", f"{first}{cause}"[:500])


# -- writing grammars ------------------------------------------------------------------------------


def of_schema(schema: Any, *, strict: bool = False, whitespace: str = WHITESPACE) -> str:
    """Return the grammar of JSON texts that follow a schema; see `json_part`."""
    content = json.loads(json_part(schema, strict=strict, whitespace=whitespace))
    return json.dumps({"grammars": [{"json_schema": content}]}, ensure_ascii=False)


def json_part(schema: Any, *, strict: bool = False, whitespace: str = WHITESPACE) -> str:
    """Return a schema as a grammar's text has it after `%json`. Unless `strict`, keywords that the
    library does not implement are ignored, and `relaxed` lists them. Raises `RequestError` of code
    "constraint" for a schema that is too large."""
    check_size(schema)
    if not isinstance(schema, dict | bool):
        raise refused(f"a schema is an object, not {json.dumps(schema)[:40]}")
    named = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    content = _read(named, strict)
    content["x-guidance"] = {"whitespace_pattern": whitespace, "lenient": not strict}
    return json.dumps(content, ensure_ascii=False)


def of_regex(pattern: str) -> str:
    """Return the grammar of texts that match a regular expression as a whole."""
    return str(llguidance.LLMatcher.grammar_from_regex(pattern))


def of_choice(texts: Sequence[str]) -> str:
    """Return the grammar of these texts."""
    if not 0 < len(texts) <= MAX_CHOICES:
        raise refused(f"{len(texts)} choices: give 1 to {MAX_CHOICES}")
    return of_regex("|".join(SPECIAL.sub(r"\\\g<0>", text) for text in texts))


def of_gbnf(text: str) -> str:
    """Return the grammar of llama.cpp's GBNF, or of Lark."""
    try:
        return of_lark(any_to_lark(text))
    except Exception as error:  # the library raises bare Exception, too
        raise refused(f"the grammar is neither GBNF nor Lark: {error}") from None


def of_lark(text: str) -> str:
    """Return the grammar of llguidance's Lark."""
    return str(llguidance.LLMatcher.grammar_from_lark(text))


def literal(text: str) -> str:
    """Return a pattern for a text, for between Lark's slashes."""
    return re.sub(r"[^A-Za-z0-9 ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def of_tags(tags: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> str:
    """Return the grammar of free text in which each trigger is the beginning of a tag: its opening,
    JSON that follows its schema, its end. `tags`: of (opening, schema, end). Raises `RequestError`
    of code "constraint" for an opening that has no trigger, and for too many."""
    for what, some in (("structures", tags), ("triggers", triggers)):
        if not 0 < len(some) <= MAX_TAGS:
            raise refused(f"{len(some)} {what}: give 1 to {MAX_TAGS}")
    firsts = [
        one
        for one in dict.fromkeys(triggers)
        if not any(other in one for other in {*triggers} - {one})
    ]
    rules, parts = [], []
    for number, trigger in enumerate(firsts):
        others = "|".join(literal(one) for one in firsts if one != trigger)
        apart = rf" & ~/(.|\n)*({others})(.|\n)*/" if others else ""
        rules.append(rf"until_{number}[lazy]: /(.|\n)*{literal(trigger)}/{apart}")
    for opening, schema, end in tags:
        own = [one for one in firsts if opening.startswith(one)]
        if not own:
            raise refused(f"no trigger is the beginning of {json.dumps(opening)[:80]}")
        rest = opening.removeprefix(own[0])
        before, after = (json.dumps(one, ensure_ascii=False) for one in (rest, end))
        parts.append(f"until_{firsts.index(own[0])} {before} %json {json_part(schema)} {after}")
    text = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*({'|'.join(map(literal, firsts))})(.|\n)*/"
    return of_lark("\n".join([f"start: ({' | '.join(parts)})* TEXT", text, *rules]))


def relaxed(schema: Any) -> list[str]:
    """Return the patterns of a schema that cannot be followed, and are dropped unless it is
    strict."""
    return [f"pattern {one}" for one in dict.fromkeys(_patterns(schema)) if _unreadable(one)]


def check_size(schema: Any) -> None:
    """Raise `RequestError` of code "constraint" for a schema beyond the limits."""
    layer, parts = [schema], 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for one in layer:
            if isinstance(one, dict):
                inner += one.values()
                counted = (one.get("properties"), one.get("enum"))
                parts += sum(len(some) for some in counted if isinstance(some, dict | list))
            elif isinstance(one, list):
                inner += one
        layer = [one for one in inner if isinstance(one, dict | list)]
        if not layer:
            break
    else:
        raise refused(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if parts > MAX_PARTS:
        raise refused(f"the schema has {parts} properties and enum values: use at most {MAX_PARTS}")
    if (patterns := len({*_patterns(schema)})) > MAX_PATTERNS:
        raise refused(f"the schema has {patterns} patterns: use at most {MAX_PATTERNS}")
    if (size := len(json.dumps(schema, ensure_ascii=False))) > MAX_SCHEMA:
        raise refused(f"the schema has {size} characters: use at most {MAX_SCHEMA}")


def _read(schema: Any, strict: bool) -> Any:
    """Return a schema without keywords that the library ignores but that can be expressed, such as
    OpenAPI's `nullable`, and without patterns that it cannot follow unless `strict`."""
    if isinstance(schema, list):
        return [_read(one, strict) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, one in schema.items():
        by_name = name in NAMED and isinstance(one, dict)
        parts = {own: _read(part, strict) for own, part in one.items()} if by_name else one
        found[name] = parts if by_name or name in VALUES else _read(one, strict)
    found = expressed(found)
    if not strict:
        if isinstance(pattern := found.get("pattern"), str) and _unreadable(pattern):
            del found["pattern"]
        if isinstance(named := found.get("patternProperties"), dict):
            found["patternProperties"] = {k: v for k, v in named.items() if not _unreadable(k)}
    if found.get("nullable") is not True:
        return found
    del found["nullable"]
    kinds = found.get("type")
    if isinstance(kinds, str | list):
        own = [kinds] if isinstance(kinds, str) else kinds
        return {**found, "type": [*own, *(() if "null" in own else ("null",))]}
    return {"anyOf": [found, {"type": "null"}]} if found else found


def _patterns(schema: Any) -> Iterator[str]:
    """Yield the regular expressions of a schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from _patterns(one)
    elif isinstance(schema, dict):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        if isinstance(named := schema.get("patternProperties"), dict):
            yield from named
        for name, one in schema.items():
            yield from _patterns(one) if name not in VALUES else ()


@lru_cache(1024)
def _unreadable(pattern: str) -> bool:
    """Return whether the library cannot follow a pattern of a schema."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return bool(llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS))


# -- following them --------------------------------------------------------------------------------


class Budget:
    """What is left of a thought's budget after some tokens of a reply."""

    def __init__(
        self, own: ThoughtBudget, tokens: llguidance.LLTokenizer, ending: Sequence[int]
    ) -> None:
        """`ending`: the tokens of what ends a thought."""
        self._tokens, self._left, self._ending = tokens, own.tokens, tuple(ending)
        self._open, self._close = own.open.encode(), own.close.encode()
        self._within, self._over = own.begun, False
        self._written = 0  # how many tokens of the ending were forced
        self._read = b""  # the end of what has been read

    def consume(self, token: int) -> None:
        """Go on to the place after a token."""
        if self._over:
            return
        self._written += bool(self.forced)
        self._left -= self._within
        self._read += self._tokens.decode_bytes([token])
        if not self._within:
            text = self._read.lstrip()
            self._within = text.startswith(self._open)
            self._over = not self._open.startswith(text[: len(self._open)])
            self._read = text[len(self._open) :] if self._within else text
        if self._within:
            self._over = self._close in self._read or self._written == len(self._ending)
            self._read = self._read[-len(self._close) - MAX_BYTES :]

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow: what ends the thought, after a whole character."""
        if self._over or not self._within or self._left > 0:
            return ()
        if not self._written and self._left > 1 - MAX_BYTES:
            decoder = codecs.getincrementaldecoder("utf-8")("ignore")
            decoder.decode(self._read)
            if decoder.getstate()[0]:
                return ()
        return self._ending[self._written :]


class Matcher:
    """A place in a reply that follows a grammar, or has a budget for its thought, or both."""

    def __init__(
        self,
        own: llguidance.LLMatcher | None,
        vocabulary: "GrammarVocabulary",
        budget: Budget | None = None,
    ) -> None:
        self._own, self._vocabulary, self._budget = own, vocabulary, budget
        self.ended = False  # True after a token that ends the reply and its grammar

    @property
    def size(self) -> int:
        """The size of the vocabulary."""
        return self._vocabulary.size

    def copy(self) -> "Matcher":
        """Return an independent matcher at the same place."""
        own = self._own.deep_copy() if self._own is not None else None
        copied = Matcher(own, self._vocabulary, copy.copy(self._budget))
        copied.ended = self.ended
        return copied

    def allowed(self) -> Allowed:
        """Return which tokens [V] may come next: after the end of a reply only those that end it.
        Raises `RequestError` of code "constraint" if a limit is reached."""
        vocabulary = self._vocabulary
        if self.ended:
            return vocabulary.ends
        if forced := self._ending:
            only = np.zeros(vocabulary.size, np.bool_)
            only[forced[0]] = True
            return only
        if self._own is None:
            return vocabulary.every
        mask = self._own.compute_bitmask()
        if self._own.is_error():
            raise refused(self._own.get_error())
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        return bits[: vocabulary.size].view(np.bool_)

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on to the place after `tokens`; those after the end of the reply are ignored. Raises
        `RequestError` of code "constraint" if the grammar does not allow them."""
        for token in tokens:
            if self.ended:
                return
            if self._budget is not None:
                self._budget.consume(token)
            if self._own is not None:
                if not self._own.consume_token(token):
                    raise refused(self._own.get_error())
                self.ended = bool(self._vocabulary.ends[token])

    def forced(self) -> list[int]:
        """Return the tokens that must come next, since there is no choice; none after the end."""
        if self.ended or self._own is None or self._ending:
            return [*self._ending]
        return list(self._own.compute_ff_tokens())

    @property
    def complete(self) -> bool:
        """Whether the reply may end here."""
        return self.ended or self._own is None or self._own.is_accepting()

    @property
    def _ending(self) -> tuple[int, ...]:
        """The tokens that must follow to end the thought."""
        return self._budget.forced if self._budget is not None else ()


class _Encoder:
    """Encodes forced text for llguidance's `TokenizerWrapper`. It is a byte-pair encoding that
    merges the pair whose token has the lowest id, since ids are in the order of merges. The result
    is nearly always that of the model's own tokenizer, which takes 100 MB for 262,144 tokens."""

    bos_token_id = None

    def __init__(self, table: TokenTable, size: int, ends: Sequence[int]) -> None:
        """`ends`: the ids that end a reply, which are no text whatever the tokenizer states."""
        special = {index: name.encode() for name, index in table.special.items()}
        special |= {end: (table.spelling(end) or "").encode() for end in ends}
        tokens = {**table.pieces(), **special}
        letters = {one: text for one, text in tokens.items() if len(text) == 1}
        spare = {one for one in letters if len(table.spelling(one) or "") > 1}  # of single bytes
        usual = {letters[one] for one in letters.keys() - spare}
        tokens.update((one, b"") for one in spare if letters[one] in usual)
        self.eos_token_id, self.special_token_ids = ends[0], [one for one in special if one < size]
        self.tokens = [tokens.get(one, b"") for one in range(size)]
        words = SPACED_WORDS
        if "ByteLevel" in str(table.decoder):
            words = GPT_2_WORDS if b"\n " in tokens.values() else GPT_4_WORDS
        self._added = table.added
        added = map(re.escape, sorted(self._added, key=len)[::-1])
        self._parts = re.compile("|".join([*added, words]))
        self.longest: Callable[[str], list[int]] = lambda _: []  # the longest tokens of a text

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text."""
        if isinstance(text, bytes):  # the wrapper tries them first, and then passes strings
            raise TypeError("a text is a string")
        return [one for part in self._parts.findall(text) for one in self._encode(part)]

    def _encode(self, part: str) -> list[int]:
        if part in self._added:
            return [self._added[part]]
        pieces = [*part]
        merged = [self._merged(*pair) for pair in pairwise(pieces)]
        while (lowest := min(merged, default=NONE)) != NONE:
            place = merged.index(lowest)
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
            around = pairwise(pieces[max(place - 1, 0) : place + 2])
            merged[max(place - 1, 0) : place + 2] = [self._merged(*pair) for pair in around]
        return [token for piece in pieces for token in self.longest(piece)]

    def _merged(self, one: str, other: str) -> int:
        """Return the token of two pieces."""
        ids = self.longest(one + other)
        return ids[0] if len(ids) == 1 else NONE


class GrammarVocabulary:
    """The tokens of a model, for which grammars are compiled: 100 MB for 262,144 tokens."""

    def __init__(self, table: TokenTable, size: int, end: Sequence[int]) -> None:
        """`size`: V; ids beyond the table are never allowed. `end`: the ids that end a reply.
        Raises `RequestError` of code "constraint" for a vocabulary that the library cannot read."""
        self.size = size
        self.every = np.ones(size, np.bool_)
        self.ends = np.zeros(size, np.bool_)
        self.ends[[token for token in end if token < size]] = True
        if not self.ends.any():
            raise refused("the model has no token that ends a reply, which grammars need")
        try:
            self._encoder = _Encoder(table, size, self.ends.nonzero()[0].tolist())
            wrapper = llguidance.TokenizerWrapper(self._encoder)
            self._tokens = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=[*end])
        except (ValueError, CheckpointError) as error:
            raise refused(f"grammars cannot use the model's tokenizer: {error}") from None
        self._encoder.tokens = wrapper.tokens = []  # 20 MB that have been read
        own = weakref.proxy(self)  # the library keeps the encoder
        self._encoder.longest = lambda text: own._tokens.greedy_tokenize(text)
        self._special = table.special
        self._compiled = lru_cache(KEPT)(self._compile)

    @classmethod
    def of(cls, table: TokenTable, facts: VocabularyFacts) -> "GrammarVocabulary":
        """Return the vocabulary of a model, made once for a table: it takes a second for 131,072
        tokens."""
        return _made(table, facts.size, facts.end)

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of a grammar. Raises `RequestError` of code
        "constraint" if the grammar is wrong, or exceeds the limits."""
        return Matcher(self._compiled(grammar).deep_copy(), self)

    def follow(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the beginning of a reply. Raises as `matcher` does."""
        own = self._compiled(constraint.grammar).deep_copy() if constraint.grammar else None
        thoughts = constraint.thoughts
        if thoughts is None:
            return Matcher(own, self)
        special = self._special.get(thoughts.close)
        ending = self._encoder(thoughts.close) if special is None else [special]
        return Matcher(own, self, Budget(thoughts, self._tokens, ending))

    def warnings(self, grammar: str) -> list[str]:
        """Return which parts of a grammar are ignored."""
        return list(self._compiled(grammar).get_grammar_warnings())

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if len(grammar) > MAX_GRAMMAR:
            raise refused(f"the grammar has {len(grammar)} characters: use at most {MAX_GRAMMAR}")
        own = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=LIMITS)
        trial = own.deep_copy()  # some limits are reached with the first masks
        trial.compute_bitmask()
        if forced := trial.compute_ff_tokens():
            trial.consume_tokens(forced)
            trial.compute_bitmask()
        if trial.is_error():
            why = trial.get_error()
            raise refused("no text matches it" if why.startswith("NoExtension") else why)
        return own


@lru_cache(2)
def _made(table: TokenTable, size: int, end: tuple[int, ...]) -> GrammarVocabulary:
    return GrammarVocabulary(table, size, end)
