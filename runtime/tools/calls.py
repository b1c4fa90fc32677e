"""Reads the JSON of tool calls letter by letter, so that arguments leave while they are written.
Pure."""

import json
from collections.abc import Callable

from dovetail.runtime.http.events import CallArguments, CallBegun, CallEnded, Event

CLOSING = {"}": "{", "]": "["}
EMPTY = "{}"  # the arguments of a call without any


class CallReader:
    """The calls in one region of a reply: an object or a list of objects, or arguments alone."""

    def __init__(
        self, begin: Callable[[str], CallBegun], keys: tuple[str, str] | None, name: str = ""
    ) -> None:
        """`begin` numbers a call with this name. `keys`: those of a call's name and its arguments;
        None: the region is the arguments of the call `name`."""
        self._begin, self._keys = begin, keys
        self._open: list[str] = []
        """Open brackets."""
        self._done = False  # after the arguments, where they are all
        self._string: list[str] | None = None  # the string that is being read
        self._escape = self._value = False  # after a backslash; after the colon of a call's key
        self._key, self._held = "", ""
        """The key of the value, and arguments that precede the name or are not an object."""
        self._passing = keys is None  # True while arguments are passed on
        self.call: CallBegun | None = None
        """The call that has begun and not ended."""
        self.wrote = False
        """True once the open call has arguments."""
        self.count = 0  # calls that have begun
        self._events: list[Event] = []
        if keys is None:
            self._named(name)

    @property
    def in_string(self) -> bool:
        return self._string is not None and not self._escape

    def push(self, letter: str) -> list[Event]:
        """Return the events of one more letter."""
        self._events = []
        if self._done:
            return []
        outer = self._at_call
        passed = self._passing or (outer and self._value and self._key == self._arguments)
        if self._string is not None:
            self._in_string(letter, outer=outer)
        elif letter == '"':
            self._string = []
        elif letter in "{[":
            self._open.append(letter)
            self._passing = self._passing or passed
        elif letter in CLOSING and self._open and self._open[-1] == CLOSING[letter]:
            passed = passed and not outer
            if outer:
                self._end()
            self._open.pop()
            if self._keys is None and not self._open:
                self._pass(letter)
                self._done, passed = True, False
        elif outer and letter in ":,":
            self._value, passed = letter == ":", False
        if passed and (self._passing or not letter.isspace()):
            self._pass(letter)
        if self._passing and self._at_call and self._keys is not None:
            self._passing, self._key = False, ""
        return self._events

    def close(self) -> list[Event]:
        """Return the events that end the open call."""
        self._events = []
        self._end()
        return self._events

    @property
    def _arguments(self) -> str | None:
        return self._keys[1] if self._keys is not None else None

    @property
    def _at_call(self) -> bool:
        """Whether the innermost bracket is that of a call."""
        return self._keys is not None and self._open in (["{"], ["[", "{"])

    def _in_string(self, letter: str, *, outer: bool) -> None:
        assert self._string is not None
        if self._escape or letter == "\\":
            self._escape = not self._escape
        elif letter == '"':
            text, self._string = "".join(self._string), None
            if outer and not self._value:
                self._key = _unescaped(text)
            elif outer and self._keys is not None and self._key == self._keys[0]:
                self._named(_unescaped(text))
            return
        self._string.append(letter)

    def _named(self, name: str) -> None:
        if not name or self.call is not None:
            return
        self.call, self.wrote, self.count = self._begin(name), False, self.count + 1
        held, self._held = self._held, ""
        self._events.append(self.call)
        if held:
            self._pass(held)

    def _pass(self, text: str) -> None:
        """Pass arguments on, once the name is known and they are known to be an object."""
        text, self._held = self._held + text, ""
        if self.call is None or (not self.wrote and not text.lstrip().startswith("{")):
            self._held = text
        elif text:
            self.wrote = True
            self._events.append(CallArguments(self.call.index, text))

    def _end(self) -> None:
        """End the open call; arguments that are no object may be its text."""
        if self.call is not None:
            if not self.wrote:
                self._events.append(CallArguments(self.call.index, _object(self._held)))
            self._events.append(CallEnded(self.call.index))
        self.call, self._held, self._value, self._key = None, "", False, ""


def _unescaped(text: str) -> str:
    """Return the value of a JSON string without its quotes."""
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _object(text: str) -> str:
    """Return arguments that were written as something else: JSON within a string, null, none."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip() or EMPTY
    return value if isinstance(value, str) and value else EMPTY if value is None else text.strip()
