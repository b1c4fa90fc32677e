"""Reads the JSON of tool calls letter by letter, so that arguments leave while they are written.
Pure."""

import json
import re
from collections.abc import Callable

from dovetail.runtime.http.events import CallArguments, CallBegun, CallEnded, Event

STEPS = {"{": 1, "[": 1, "}": -1, "]": -1}
STRING = r'"(?:[^"\\]|\\.)*'  # without its end
EMPTY = "{}"  # the arguments of a call without any


class CallReader:
    """The calls in one region of a reply: an object or a list of objects, or arguments alone."""

    def __init__(
        self, begin: Callable[[str], CallBegun], keys: tuple[str, str] | None, name: str = ""
    ) -> None:
        """`begin` numbers a call with this name. `keys`: those of a call's name and its arguments;
        None: the region is the arguments of the call `name`."""
        self._begin, self._alone = begin, keys is None
        named, given = keys or ("", "")
        self._name = re.compile(rf'"{named}"\s*:\s*({STRING}")$')
        self._given = re.compile(rf'"{given}"\s*:\s*({STRING}["\\]?|[^",\s]*)')
        self._depth, self._level = 0, 1  # open brackets; those around the keys of a call
        self._quoted = self._escape = False  # within a string; after a backslash in it
        self._passing = False  # while arguments are passed on
        self._done = False  # after the arguments, where they are all
        self._head, self._held = "", ""
        """The open call without nested values, and arguments that precede the name or are not an
        object."""
        self._wrote = False  # once the open call has arguments
        self.call: CallBegun | None = None
        """The call that has begun and not ended."""
        self.count = 0  # calls that have begun
        if self._alone:
            self._named(name)

    @property
    def in_string(self) -> bool:
        return self._quoted and not self._escape

    def push(self, letter: str) -> list[Event]:
        """Return the events of one more letter."""
        if self._done:
            return []
        quoted, outer = self._quoted, self._depth == self._level
        self._quoted ^= letter == '"' and not self._escape
        self._escape = quoted and letter == "\\" and not self._escape
        step = 0 if quoted else STEPS.get(letter, 0)
        if step > 0 and not self._depth:
            self._level = 2 if letter == "[" else 1
        self._depth = max(0, self._depth + step)
        if self._alone:
            self._done = step < 0 and not self._depth
            return self._pass(letter)
        if outer and step < 0:
            return self.close()
        if outer and step > 0:
            found = self._given.search(self._head)
            self._passing = found is not None and found.end() == len(self._head)
            self._head += "null"
        elif outer:
            self._head += letter
            found = self._name.search(self._head) if quoted and not self._quoted else None
            return self._named(_unescaped(found[1])) if found is not None else []
        events = self._pass(letter) if self._passing else []
        self._passing = self._passing and self._depth > self._level
        return events

    def close(self) -> list[Event]:
        """Return the events that end the open call; arguments that are no object may be its
        text."""
        events: list[Event] = []
        if self.call is not None:
            if not self._wrote:
                found = self._given.search(self._head)
                given = self._held or (found[1] if found is not None else "")
                events.append(CallArguments(self.call.index, _object(given)))
            events.append(CallEnded(self.call.index))
        self.call, self._head, self._held = None, "", ""
        return events

    def _named(self, name: str) -> list[Event]:
        """Begin a call, unless one has begun; return the events."""
        if not name or self.call is not None:
            return []
        self.call, self._wrote, self.count = self._begin(name), False, self.count + 1
        return [self.call, *self._pass("")]

    def _pass(self, text: str) -> list[Event]:
        """Pass arguments on, once the name is known and they are known to be an object."""
        self._held += text
        if self.call is None or not (self._wrote or self._held.lstrip().startswith("{")):
            return []
        text, self._held, self._wrote = self._held, "", True
        return [CallArguments(self.call.index, text)]


def _unescaped(text: str) -> str:
    """Return the value of a JSON string."""
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def _object(text: str) -> str:
    """Return arguments that were written as something else: JSON within a string, null, none."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip() or EMPTY
    return value if isinstance(value, str) and value else EMPTY if value is None else text.strip()
