"""The grammar of a reply that may or must call tools: thoughts, text and calls in one, in
llguidance's Lark."""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.protocol.errors import RequestError
from dovetail.protocol.grammar import GrammarVocabulary, json_part, literal, of_lark, of_schema
from dovetail.protocol.messages import MAX_RELAXED, Constraint, grammar_engine
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.runtime.tools.conversation import ToolUse
from dovetail.runtime.tools.formats import Family, Format
from dovetail.runtime.tools.support import Support

ANY = r"/(.|\n)*/"
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a function without parameters, as in OpenAI's API."""
UNKNOWN = {"type": "object"}
SPACES = '("\\n" | "\\n\\n")?'
LOOSER = {
    "tags": "lengths and patterns of texts are not enforced in this model's format",
    "gemma": "only names, types and enums are enforced in this model's format",
}
KIND, ANSWER = "tools", "answer"
LATE_S = 10.0  # seconds for the schemas of all tools; that of one ends by its own limits
QUOTE = '<|"|>'  # what begins and ends a string in Gemma's form


class Refused(Exception):
    """A strict tool has parameters that no grammar can enforce."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place


def constraint_of(
    use: ToolUse,
    support: Support,
    text: TextCodec,
    *,
    thinking: bool,
    answer: Constraint | None = None,
) -> Constraint:
    """Return the grammar of a reply. `thinking`: the prompt ends within thoughts. `answer`: the
    grammar of a reply without calls, after its thoughts. Raises `Refused`, and `RequestError` for
    tools that are too many or too large, or take longer than `LATE_S`."""
    vocabulary = GrammarVocabulary.of(text.table, text.facts)
    written = _Grammar(support, text.table.special, answer=answer is not None)
    relaxed = [*answer.relaxed] if answer is not None else []
    began_s = time.monotonic()
    for done, tool in enumerate(use.callable):
        if time.monotonic() - began_s >= LATE_S:
            many = f"{done} of {len(use.callable)} tools were compiled within {LATE_S:g} s"
            raise RequestError("constraint", f"{many}: send fewer tools, or simpler parameters")
        parameters, why = _followed(tool["function"], vocabulary)
        if why and tool["function"].get("strict"):
            raise Refused([*use.shown].index(tool), why)
        why = why or LOOSER.get(support.family.arguments if support.family else "", "")
        relaxed += [f"{tool['function']['name']}: {why}"[:500]] if why else []
        written.add_tool(tool["function"]["name"], parameters)
    grammar = of_lark(written.whole(use, thinking=thinking))
    if answer is not None:
        first, *others = _parts(answer.grammar)
        named = {**first, "name": ANSWER}
        parts = [{"lark_grammar": grammar}, named, *others]
        grammar = json.dumps({"grammars": parts}, ensure_ascii=False)
    vocabulary.matcher(grammar)
    kind = KIND if use.callable else answer.kind if answer is not None else ""
    return Constraint(
        grammar=grammar, engine=grammar_engine(), kind=kind, relaxed=tuple(relaxed[:MAX_RELAXED])
    )


def _parts(grammar: str) -> list[dict[str, Any]]:
    """Return the grammars of which a grammar's text consists."""
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def _followed(
    function: Mapping[str, Any], vocabulary: GrammarVocabulary
) -> tuple[dict[str, Any], str]:
    """Return the schema that a call's arguments follow, and why it is not the given one."""
    given = function.get("parameters") or NOTHING
    strict = bool(function.get("strict"))
    schema = given if "type" in given else {"type": "object", **given}
    if schema["type"] != "object":
        return UNKNOWN, f"arguments are an object, not {json.dumps(schema['type'])[:40]}"
    try:
        grammar = of_schema(schema, strict=strict)
        vocabulary.matcher(grammar)
    except RequestError as error:
        return UNKNOWN, str(error)
    return schema, "; ".join(vocabulary.warnings(grammar))


class _Grammar:
    """Rules of a grammar while they are written."""

    def __init__(self, support: Support, special: Mapping[str, int], *, answer: bool) -> None:
        """`answer`: the text of a reply follows the grammar `ANSWER`."""
        self._family = support.family or Family("", (), False, ("", "", ""), {})
        self._thoughts, self._special, self._answer = support.thoughts, special, answer
        markers = [*Format(support.thoughts, support.family).markers, QUOTE]
        spelt = [one for one in special if any(one in text for text in markers)]
        self._pattern = re.compile("|".join(map(re.escape, sorted(spelt, key=len)[::-1])) or "(?!)")
        self._rules: dict[str, str] = {}
        self._calls: list[str] = []

    def add_tool(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Add a function that may be called."""
        number = len(self._calls)
        write: Callable[[int, Mapping[str, Any]], str] = {
            "json": self._json,
            "tags": self._tags,
            "gemma": self._gemma,
            "python": self._python,
        }[self._family.arguments]
        arguments = write(number, parameters)
        _, middle, close = self._family.write
        close = "" if self._family.reply else close  # an end token there
        self._calls.append(
            self._rule(f"call_{number}", self._of(f"{name}{middle}"), arguments, self._of(close))
        )

    def whole(self, use: ToolUse, *, thinking: bool) -> str:
        """Return the whole grammar."""
        reply = self._with_calls(use) if self._calls else self._text()
        self._rules["start"] = f"{self._thought(thinking=thinking)} {reply}"
        return "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())

    def _text(self) -> str:
        """Return the text of a reply without calls."""
        begin = self._of(self._family.reply[0]) if self._family.reply else ""
        return f"{begin} {f'@{ANSWER}' if self._answer else ANY}"

    def _with_calls(self, use: ToolUse) -> str:
        family = self._family
        before, after = family.around
        opening = before + family.write[0]
        marker = family.markers[0] if opening.startswith(family.markers[0]) else opening
        called = self._rule("called", " | ".join(self._calls))
        more = ""
        if use.parallel and family.parallel:
            more = f"({self._of(family.between + family.write[0])} {called})*"
        rest = self._rule("rest", called, more, self._of(after))
        calls = self._rule("calls", self._of(opening), rest)
        if use.required:
            return calls
        if self._answer or family.reply:
            return f"({self._text()} | {calls})"
        if self._is_special(marker):
            return f"{ANY} {calls}?"
        escaped = literal(marker)
        if opening is marker:  # a call is all of a reply
            self._rules["TEXT"] = rf"{ANY} & ~/{escaped}(.|\n)*/"
            return f"(TEXT | {calls})"
        self._rules["TEXT"] = rf"{ANY} & ~/(.|\n)*{escaped}(.|\n)*/"
        self._rules["until_call[lazy]"] = rf"/(.|\n)*{escaped}/"
        return f"(TEXT | until_call {self._of(opening[len(marker) :])} {rest})"

    def _thought(self, *, thinking: bool) -> str:
        if (thoughts := self._thoughts) is None:
            return ""
        until = self._until("thought", thoughts.close)
        turn = self._of(self._family.turn)
        if thinking:
            return f"{until} {turn} {SPACES}"
        return f"({self._of(thoughts.open)} {until} {turn} {SPACES})?"

    def _until(self, name: str, end: str) -> str:
        """Return a rule for any text and this end, which is not in it."""
        if self._is_special(end):
            return f"{ANY} {self._of(end)}"
        self._rules[f"{name}[lazy]"] = rf"/(.|\n)*{literal(end)}/"
        return name

    def _rule(self, name: str, *parts: str) -> str:
        self._rules[name] = " ".join(filter(None, parts)) or '""'
        return name

    def _is_special(self, text: str) -> bool:
        return self._pattern.match(text) is not None

    def _of(self, text: str) -> str:
        """Return a text, in which special tokens are tokens."""
        parts, place = [], 0
        for found in self._pattern.finditer(text):
            parts += [text[place : found.start()], found]
            place = found.end()
        return " ".join(
            f"<[{self._special[part[0]]}]>"
            if isinstance(part, re.Match)
            else json.dumps(part, ensure_ascii=False)
            for part in (*parts, text[place:])
            if part
        )

    # -- arguments ---------------------------------------------------------------------------------

    def _json(self, number: int, parameters: Mapping[str, Any]) -> str:
        return self._rule(f"arguments_{number}", f"%json {json_part(parameters)}")

    def _tags(self, number: int, parameters: Mapping[str, Any]) -> str:
        """Each argument between tags: strings as they are, other values in JSON."""
        begin, middle, end = self._family.argument
        found = []
        for place, (key, schema, needed) in enumerate(_properties(parameters)):
            name = f"argument_{number}_{place}"
            if isinstance(schema.get("enum"), list):
                texts = [one if isinstance(one, str) else json.dumps(one) for one in schema["enum"]]
                value = f"({' | '.join(map(self._of, texts))}) {self._of(end)}"
            elif schema.get("type", "string") == "string":
                value = self._until(f"{name}_text", end)
            else:
                value = f"{self._json(10_000 * number + 10_000 + place, schema)} {self._of(end)}"
            rule = self._rule(name, self._of(f"{begin}{key}{middle}"), value)
            found.append(rule if needed else f"{rule}?")
        return " ".join(found)

    def _python(self, number: int, parameters: Mapping[str, Any]) -> str:
        """Named arguments, with values in JSON; required arguments come first."""
        needed, others = list[str](), list[str]()
        for place, (key, schema, required) in enumerate(_properties(parameters)):
            value = self._json(10_000 * number + 10_000 + place, schema)
            rule = self._rule(f"argument_{number}_{place}", self._of(f"{key}="), value)
            (needed if required else others).append(rule)
        rest, first = "", list[str]()
        for rule in others[::-1]:
            first.append(f"{rule} {rest}")
            rest = self._rule(f"{rule}_on", f'(", " {rule})?', rest)
        if needed:
            return ' ", " '.join(needed) + f" {rest}"
        return f"({' | '.join(first[::-1])})?" if others else ""

    def _gemma(self, number: int, parameters: Mapping[str, Any]) -> str:
        """JSON with keys and strings in Gemma's form; required arguments come first."""
        quote = self._of(QUOTE)
        self._rule("g_string", quote, ANY if self._is_special(QUOTE) else "/[^<]*/", quote)
        self._rule("g_pair", r'/[A-Za-z_][A-Za-z0-9_]*/ ":" g_value')
        self._rule("g_object", '"{" (g_pair ("," g_pair)*)? "}"')
        self._rule("g_array", '"[" (g_value ("," g_value)*)? "]"')
        self._rule("g_integer", r"/-?(0|[1-9][0-9]{0,17})/")
        self._rule("g_number", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/")
        self._rule("g_boolean", '"true" | "false"')
        self._rule("g_null", '"null"')
        self._rule("g_value", "g_string | g_object | g_array | g_number | g_boolean | g_null")
        needed, others = list[str](), list[str]()
        for key, schema, required in _properties(parameters):
            value = f"g_{schema.get('type', 'value')}"
            value = value if value in self._rules else "g_value"
            enum = schema.get("enum") or [None]
            if all(isinstance(one, str) for one in enum):
                value = f"({' | '.join(f'{quote} {self._of(one)} {quote}' for one in enum)})"
            (needed if required else others).append(f"{self._of(f'{key}:')} {value}")
        name = f"other_{number}"
        if others:
            self._rule(name, " | ".join(others))
        first = ' "," '.join(needed)
        if others:
            first = f'{first} ("," {name})*' if needed else f'({name} ("," {name})*)?'
        return f'"{{" {first} "}}"'


def _properties(parameters: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the name, the schema and whether it is required, of each property."""
    needed = parameters.get("required") or ()
    kept = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return [
        (name, {**kept, **(schema if isinstance(schema, dict) else {})}, name in needed)
        for name, schema in (parameters.get("properties") or {}).items()
    ]
