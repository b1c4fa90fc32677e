"""The grammar of a request, under any of the names that OpenAI, vLLM, llama.cpp and SGLang give it.
A request has at most one; it is compiled before the request is sent, and refused in words."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.protocol import grammar as grammars
from dovetail.protocol.errors import RequestError
from dovetail.protocol.grammar import WHITESPACE, GrammarVocabulary
from dovetail.protocol.messages import MAX_RELAXED, Constraint, grammar_engine
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.bodies import Decoding
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.fields import plain

COMPILERS = 2  # grammars that are compiled at a time
LATE_S = 2.0  # seconds after which a grammar is refused; its compilation ends by its own limits
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Wanted:
    """A grammar that a request has."""

    kind: str  # json_object, json_schema, regex, choice, grammar or structural_tag
    param: str  # the field that has it
    write: Callable[[], str]  # returns the grammar's text; raises `RequestError`
    schema: Any = None  # of which patterns may be left out


def wanted(body: Decoding) -> Wanted | None:
    """Return the grammar of a request, if it has one; raise `ApiError` for two, or a wrong one."""
    found = [one for name in READERS if (one := _read(body, name)) is not None]
    if len(found) > 1:
        first, second = (one.param for one in found[:2])
        text = f"{first} and {second} both constrain the reply: leave one of them out"
        raise ApiError(400, text, param=second)
    if found and body.ignore_eos:
        text = f"a reply with {found[0].param} ends where its grammar does: leave ignore_eos out"
        raise ApiError(400, text, param="ignore_eos")
    return found[0] if found else None


def compiled(one: Wanted, target: RequestTarget) -> Constraint:
    """Return the grammar as it is sent to the workers. Raises `ApiError` if it cannot be followed,
    which is also the case if its first mask exceeds a limit."""
    try:
        text = one.write()
        own = vocabulary_of(target)
        own.matcher(text)
        relaxed = (*grammars.relaxed(one.schema), *own.warnings(text))
    except RequestError as error:
        schema = one.kind in ("json_schema", "json_object")
        code = "unsupported_schema" if schema else "unsupported_grammar"
        raise ApiError(400, f"{one.param}: {error}", param=one.param, code=code) from None
    return Constraint(
        grammar=text,
        engine=grammar_engine(),
        kind=one.kind,
        relaxed=tuple(one[:512] for one in relaxed[:MAX_RELAXED]),
    )


def vocabulary_of(target: RequestTarget) -> GrammarVocabulary:
    """Return the target's vocabulary for grammars. Raises `RequestError` if it has none."""
    return GrammarVocabulary.of(target.text.table, target.described.vocabulary)


class Compilers:
    """Compiles grammars in threads, a few at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(COMPILERS, "grammar")

    async def constraint(self, body: Decoding, target: RequestTarget) -> Constraint | None:
        """Return the compiled grammar of a request, if it has one. Raises `ApiError` if it is
        refused, or compiling it takes too long."""
        if (one := wanted(body)) is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, vocabulary_of, target)
        except RequestError as error:
            raise ApiError(400, f"{one.param}: {error}", param=one.param) from None
        try:
            async with asyncio.timeout(LATE_S):
                return await loop.run_in_executor(self._threads, compiled, one, target)
        except TimeoutError:
            text = f"{one.param}: it was not compiled within {LATE_S:g} s: make it simpler"
            raise ApiError(400, text, param=one.param, code="unsupported_grammar") from None


# -- the fields ------------------------------------------------------------------------------------


def _read(body: Decoding, name: str) -> Wanted | None:
    value = getattr(body, name)
    return None if value is None or value in ("", []) else READERS[name](name, value, body)


def _response_format(name: str, value: Mapping[str, Any], body: Decoding) -> Wanted | None:
    """OpenAI's; json_object may have llama.cpp's `schema` or huggingface_hub's `value`."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema", value.get("value", ANY_OBJECT))
        return _schema(name, schema, body, kind=kind)
    if kind == "json_schema":
        own = value.get("json_schema")
        if not isinstance(own, dict) or "schema" not in own:
            text = "response_format.json_schema needs a name and a schema"
            raise ApiError(400, text, param=name)
        strict, param = own.get("strict") is True, f"{name}.json_schema.schema"
        return _schema(param, own["schema"], body, strict=strict)
    if kind == "structural_tag":
        return _tags(name, value, body)
    known = "text, json_object, json_schema or structural_tag"
    raise ApiError(400, f"response_format.type is {known}, not {json.dumps(kind)[:40]}", param=name)


def _structured(name: str, value: Mapping[str, Any], body: Decoding) -> Wanted | None:
    """vLLM's since 0.12: one of several kinds, and the whitespace of JSON."""
    given = {key: one for key, one in value.items() if one is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    space = _text(name, given.pop("whitespace_pattern", WHITESPACE))
    if given.pop("disable_any_whitespace", False):
        space = ""
    given.pop("disable_fallback", None)  # there is only one engine
    if given.pop("disable_additional_properties", False):
        text = "structured_outputs.disable_additional_properties is not supported: write "
        raise ApiError(400, f'{text}"additionalProperties": false in the schema', param=name)
    if not given:
        return None
    if len(given) > 1 or (kind := next(iter(given))) not in STRUCTURED:
        text = f"structured_outputs takes one of {', '.join(STRUCTURED)}, not {', '.join(given)}"
        raise ApiError(400, text[:300], param=name)
    if kind == "json_object":
        return _schema(name, ANY_OBJECT, body, kind=kind, space=space)
    if kind == "json":
        return _schema(f"{name}.json", given[kind], body, space=space)
    return STRUCTURED[kind](f"{name}.{kind}", given[kind], body)


def _schema(
    param: str,
    value: Any,
    body: Decoding,
    *,
    kind: str = "json_schema",
    strict: bool = False,
    space: str | None = None,
) -> Wanted:
    value = _parsed(param, value, "the schema")
    if space is None:
        space = body.guided_whitespace_pattern or WHITESPACE
    write = partial(grammars.of_schema, value, strict=strict, whitespace=space)
    return Wanted(kind, param, write, None if strict else value)


def _parsed(param: str, value: Any, what: str) -> Any:
    """Return the JSON of a field that may also be its text."""
    if not isinstance(value, str):
        return value
    try:
        value = json.loads(value)
    except (ValueError, RecursionError):
        raise ApiError(400, f"{param} is not JSON: send {what}", param=param) from None
    _check_plain(param, value)
    return value


def _tags(param: str, value: Any, _: Decoding) -> Wanted:
    """The structural tag of vLLM and SGLang: free text with JSON between tags."""
    value = _parsed(param, value, "structures and triggers")
    own = value if isinstance(value, dict) else {}
    tags, triggers = (
        one if isinstance(one := own.get(name), list) else [] for name in ("structures", "triggers")
    )
    whole = all(isinstance(one, dict) and {"begin", "schema", "end"} <= {*one} for one in tags)
    named = [(one["begin"], one["schema"], one["end"]) for one in tags] if whole else []
    texts = [*triggers, *(one for begin, _, end in named for one in (begin, end))]
    if not (named and triggers and all(triggers) and all(isinstance(one, str) for one in texts)):
        text = "structures, each with begin, schema and end, and the triggers that begin them"
        raise ApiError(400, f"{param} needs {text}", param=param)
    schemas = [schema for _, schema, _ in named]
    return Wanted("structural_tag", param, partial(grammars.of_tags, named, triggers), schemas)


def _choice(param: str, value: Any, _: Decoding) -> Wanted:
    texts = value if isinstance(value, list) else ()
    if not texts or not all(isinstance(one, str) for one in texts):
        raise ApiError(400, f"{param} must be a list of strings", param=param)
    _check_plain(param, texts)
    return Wanted("choice", param, partial(grammars.of_choice, texts))


def _of_text(kind: str, write: Callable[[str], str], param: str, value: Any, _: Decoding) -> Wanted:
    return Wanted(kind, param, partial(write, _text(param, value)))


def _check_plain(param: str, value: Any) -> None:
    """Raise `ApiError` for a value that UTF-8 JSON cannot contain, such as a lone surrogate."""
    try:
        plain(value)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None


def _text(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{param} must be a string", param=param)
    return value


Reader = Callable[[str, Any, Decoding], Wanted | None]
_regex = partial(_of_text, "regex", grammars.of_regex)
_grammar = partial(_of_text, "grammar", grammars.of_gbnf)
STRUCTURED: Mapping[str, Reader] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _schema,
    "structural_tag": _tags,
}
READERS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "grammar": _grammar,
    "regex": _regex,
    "ebnf": _grammar,
}
"""How each field is read: its name, its value, the body -> the grammar."""
