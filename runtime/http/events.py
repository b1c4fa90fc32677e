"""The stream of events a reply consists of. A parser makes them from the text of a model, and the
writer of each API turns them into its own wire format. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Reasoning:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class Text:
    """More text of the reply."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A tool call begins; `index` counts the calls of a reply, `id` and `name` are not empty."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More text of a call's arguments, which together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The arguments of a call are complete."""

    index: int


Event = Reasoning | Text | CallBegun | CallArguments | CallEnded


def size(event: Event) -> int:
    """Return the characters of an event; 1 for one without text, so that each one counts."""
    return 1 if isinstance(event, CallBegun | CallEnded) else len(event.text)


def without(events: Iterable[Event], characters: int) -> tuple[Event, ...]:
    """Return the events after the first `characters` of their `size`."""
    left: list[Event] = []
    for event in events:
        skipped = min(characters, size(event))
        characters -= skipped
        if not skipped:
            left.append(event)
        elif skipped < size(event) and not isinstance(event, CallBegun | CallEnded):
            left.append(replace(event, text=event.text[skipped:]))
    return tuple(left)


def joined(events: Iterable[Event]) -> tuple[Event, ...]:
    """Join consecutive texts of one kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case (Text(before), Text(text)) if text:
                found[-1] = Text(before + text)
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(other, text)) if index == other:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(event)
    return tuple(found)


Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """Consecutive events of one kind: a run of reasoning or text, or a call."""

    kind: Kind
    index: int
    """Which block of the reply it is, from 0."""
    call: CallBegun | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text; of a call, its arguments, an object in any case."""
        return "".join(self.pieces) or ("{}" if self.call is not None else "")


@dataclass(frozen=True)
class Change:
    """A block begins, gets more text, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Groups the events of a reply into blocks."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """Yield the changes that these events make."""
        for event in events:
            match event:
                case Reasoning(text) | Text(text):
                    if text:
                        kind: Kind = "text" if isinstance(event, Text) else "reasoning"
                        yield from self._more(kind, text)
                case CallBegun():
                    yield from self._begin("call", event)
                case CallArguments(_, text):
                    yield from self._more("call", text)
                case CallEnded():
                    yield from self.end()

    def end(self) -> Iterator[Change]:
        """End the open block, if there is one."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Change("end", block)

    def _begin(self, kind: Kind, call: CallBegun | None = None) -> Iterator[Change]:
        yield from self.end()
        self._open = Block(kind, len(self.all), call)
        self.all.append(self._open)
        yield Change("begin", self._open)

    def _more(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        yield Change("more", self._open, text)


def all_text(blocks: Iterable[Block], kind: Kind) -> str:
    """Return the texts of all blocks of a kind."""
    return "".join(block.text for block in blocks if block.kind == kind)


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """Return the blocks of a whole reply."""
    blocks = Blocks()
    for _ in blocks.take(events):
        pass
    return blocks.all
