"""Reads reasoning and tool calls from the text of a reply, with transformers' parser of responses.

It is fed letter by letter, so that the events do not depend on how the text arrives. Pure.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dovetail.runtime.http.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    Reasoning,
    Text,
    joined,
)
from dovetail.runtime.tools.calls import CallReader
from dovetail.runtime.tools.formats import Format

START = "\0"  # what precedes the part of a reply that the template has written
PLAIN = re.compile(r"[^\s<\[{]+")  # text in which no marker begins
UNREADABLE = (ValueError, KeyError)
"""What the parser raises for calls that it cannot read."""
NOT_PYTHON = (ValueError, KeyError, SyntaxError, TypeError, RecursionError, MemoryError)
NAMES: Mapping[str, Any] = {"true": True, "false": False, "null": None}  # JSON's in Python


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments, in JSON, of calls in Python's syntax, one a line or in a
    list. Raises one of `NOT_PYTHON` for anything else."""
    calls: list[tuple[str, str]] = []
    for statement in ast.parse(text.strip()).body:
        found = statement.value if isinstance(statement, ast.Expr) else statement
        for one in found.elts if isinstance(found, ast.List) else (found,):
            if not isinstance(one, ast.Call) or one.args or not all(w.arg for w in one.keywords):
                raise ValueError("not a call with named arguments")
            given = {w.arg: ast.literal_eval(_Literals().visit(w.value)) for w in one.keywords}
            written = json.dumps(given, ensure_ascii=False, allow_nan=False)
            calls.append((ast.unparse(one.func), written))
    return calls


class _Literals(ast.NodeTransformer):
    """Puts values in place of JSON's names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(NAMES[node.id])


def load_parser() -> Any:
    """Return transformers' class, which takes a second to import."""
    from transformers.utils.chat_parsing import ResponseParser

    return ResponseParser


class ReplyParser:
    """Turns the text of one reply into events, with the special tokens of its format kept."""

    def __init__(
        self,
        form: Format,
        name_call: Callable[[int], str],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = False,
    ) -> None:
        """`name_call`: the id of a call by its number. `thinking`: the prompt ends within
        thoughts."""
        self._form, self._name_call, self._tools = form, name_call, [*tools]
        opened = f"{START}{form.thoughts.open}" if thinking and form.thoughts else ""
        self._parser = self._new(opened)
        self._calls: CallReader | None = None
        self._held = ""  # what has been read and not been sent
        self._body = 0  # where the text of a call begins in it
        self._count = 0

    def feed(self, text: str) -> tuple[Event, ...]:
        """Return the events that more text completes."""
        events: list[Event] = []
        for letter in self._pieces(text):
            self._held += letter
            given, calls = letter, self._calls
            if calls is not None:
                if calls.in_string and letter in "<[" and self._form.plain_json:
                    given = f"\\u{ord(letter):04x}"  # no marker within a string ends a call
                events += calls.push(letter)
            try:
                found = self._parser.feed(given)
            except UNREADABLE:
                self._unreadable(events)
                continue
            for one in found:
                self._note(one, events, fed=calls is not None)
        return joined(events)

    def end(self) -> tuple[Event, ...]:
        """Return the events after the last text."""
        events: list[Event] = []
        try:
            for one in self._parser.finalize()[1]:
                self._note(one, events, fed=self._calls is not None)
        except UNREADABLE:
            self._unreadable(events)
        return joined(events)

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield a text letter by letter, or up to a possible marker while none is expected."""
        place = 0
        while place < len(text):
            plain = None if self._held or self._calls is not None else PLAIN.match(text, place)
            end = plain.end() if plain is not None else place + 1
            yield text[place:end]
            place = end

    def _new(self, prefix: str = "") -> Any:
        spec = {"start_anchor": START, "fields": self._form.fields}
        return load_parser()(spec, prefix, tools=self._tools)

    def _note(self, one: Mapping[str, Any], events: list[Event], *, fed: bool) -> None:
        """Note an event of the parser. `fed`: the calls have read the letters of a chunk."""
        kind, field = one["type"], one["field"]
        if kind == "region_chunk" and field != "tool_calls":
            events.append((Reasoning if field == "reasoning" else Text)(one["text"]))
            self._held = self._held[len(one["text"]) :]
        elif kind == "region_chunk":
            if not fed and self._calls is not None:
                for letter in one["text"]:
                    events += self._calls.push(letter)
        elif kind == "region_open" and field == "tool_calls":
            self._open(events)
        elif kind == "region_close" and field == "tool_calls":
            self._close(one["value"], events)
        elif field != "content":
            self._held = self._behind(field, "open" if kind == "region_open" else "close")

    def _behind(self, field: str, side: str) -> str:
        """Return what has been read behind the last opening or closing marker of a field."""
        spec = self._form.fields[field]
        given = spec.get(side, [])
        literals = [given] if isinstance(given, str) else given
        pattern = spec.get(f"{side}_pattern") or "|".join(map(re.escape, literals))
        ends = [found.end() for found in re.finditer(pattern, self._held)] if pattern else []
        return self._held[ends[-1] :] if ends else ""

    def _open(self, events: list[Event]) -> None:
        found = re.search(str(self._form.calls["open_pattern"]), self._held)
        self._body = found.end() if found is not None else 0
        name = found.groupdict().get("name") if found is not None else None
        if self._form.calls["content"] == "text":
            return  # read when it is complete
        if name is None:
            self._calls = CallReader(self._begin, self._form.keys)
        elif self._form.plain_json:
            self._calls = CallReader(self._begin, None, name)
            events += [self._calls.call] if self._calls.call is not None else []
        else:
            events.append(self._begin(name))

    def _close(self, value: Any, events: list[Event]) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            events += calls.close()
        elif isinstance(value, str):
            events += self._python(value)
        else:
            index, arguments = self._count - 1, value["function"]["arguments"]
            written = json.dumps(arguments, ensure_ascii=False)
            events += [CallArguments(index, written), CallEnded(index)]
        self._held = self._behind("tool_calls", "close")

    def _python(self, text: str) -> list[Event]:
        """Return the events of calls that are written in Python; of other text, as text."""
        try:
            calls = python_calls(text)
        except NOT_PYTHON:
            return [Text(self._held)]
        events: list[Event] = []
        for name, arguments in calls:
            begun = self._begin(name)
            events += [begun, CallArguments(begun.index, arguments), CallEnded(begun.index)]
        return events

    def _begin(self, name: str) -> CallBegun:
        begun = CallBegun(self._count, self._name_call(self._count), name)
        self._count += 1
        return begun

    def _unreadable(self, events: list[Event]) -> None:
        """Send a region that is no call as text; end a call that has begun."""
        calls, held, self._calls, self._held = self._calls, self._held, None, ""
        if calls is not None and calls.call is not None:
            events += calls.close()
        elif calls is None and self._count and held[self._body :]:
            events += [CallArguments(self._count - 1, held[self._body :])]
            events.append(CallEnded(self._count - 1))
        elif calls is None or not calls.count:
            events.append(Text(held))
        self._parser = self._new()
