"""A conversation with the models: its turns, the settings of the next reply, and the commands.
Independent of the source of replies (`answering.py`) and of terminals.
"""

import difflib
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import Sampling, TreeSettings

COMMANDS = {
    "stats": ("", "the figures of the last replies"),
    "draft": ("[on|off]", "whether the draft proposes tokens; the text is the same"),
    "temperature": ("[X]", "the temperature of the next replies; 0: greedy"),
    "seed": ("[N|random]", "the seed of the next replies"),
    "retry": ("", "ask the last question again; the new reply replaces the old one"),
    "clear": ("", "clear the conversation"),
    "save": ("FILE", "save the conversation, and the figures of the replies, as JSON"),
    "help": ("", "list these commands; begin a message with // to send a text that begins with /"),
    "quit": ("", "quit; so do /exit and Ctrl-D"),
}
"""Name -> (argument, what it does); without its optional [argument] it shows the value."""
ALIASES = {"exit": "quit"}


@dataclass(frozen=True)
class Command:
    """A line that is not for the models."""

    name: str
    argument: str = ""


def parse(line: str) -> Command | str | None:
    """A command, a text to be answered, or None for an empty line; `UserError` for an unknown
    command, or one that lacks its argument."""
    text = line.strip()
    if not text.startswith("/") or text.startswith("//"):
        return text.removeprefix("/") if text.startswith("//") else text or None
    name, _, argument = text[1:].partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, (*COMMANDS, *ALIASES), 1)
        raise UserError(
            f"there is no command /{name}: "
            f"{f'did you mean /{near[0]}?' if near else '/help lists them'}"
        )
    optional = COMMANDS[name][0].startswith("[")
    wanted = COMMANDS[name][0].strip("[]")
    argument = argument.strip()
    missing, needless = not argument and wanted and not optional, argument and not wanted
    if missing or needless or (wanted == "on|off" and argument not in ("on", "off", "")):
        raise UserError(
            f"/{name} {argument}".rstrip() + f" is not possible: write /{name} {wanted}".rstrip()
        )
    return Command(name, argument)


@dataclass(frozen=True)
class Manner:
    """The settings of a request for a reply."""

    sampling: Sampling
    max_tokens: int
    tree: TreeSettings
    seed: int | None = None
    stop: tuple[str, ...] = ()
    speculate: bool = True
    ahead: bool | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # values for the chat template
    said: frozenset[str] | None = None
    """The sampling settings that are sent to a server, which decides the others. None: all."""

    def decides(self, name: str) -> bool:
        """Return whether this sampling setting was set here."""
        return self.said is None or name in self.said

    @property
    def is_greedy(self) -> bool:
        return self.decides("temperature") and self.sampling.temperature == 0.0


@dataclass(frozen=True)
class Answer:
    """A reply: its text as far as it came, and its figures unless it was interrupted before there
    were any."""

    text: str
    result: Result | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Exchange:
    """A question, the manner in which it was asked, and the answer that it got."""

    question: str
    manner: Manner
    answer: Answer

    def is_repeated_in(self, manner: Manner) -> bool:
        """Return whether the question, asked in that manner, is sure to get the same answer:
        greedily, or with the same seed, whatever the draft does."""
        if self.answer.interrupted or (manner.sampling, manner.said) != (
            self.manner.sampling,
            self.manner.said,
        ):
            return False
        seed = self.answer.result.seed if self.answer.result is not None else self.manner.seed
        drawn_alike = (
            manner.seed is not None and manner.seed == seed and not manner.sampling.rejects
        )
        return manner.is_greedy or drawn_alike


@dataclass(frozen=True)
class Conversation:
    """The turns of a conversation so far."""

    exchanges: tuple[Exchange, ...] = ()

    def turns_with(self, question: str) -> tuple[str, ...]:
        """All turns up to this question, user first."""
        return (
            *(turn for said in self.exchanges for turn in (said.question, said.answer.text)),
            question,
        )

    def with_answer(self, question: str, manner: Manner, answer: Answer) -> "Conversation":
        return Conversation((*self.exchanges, Exchange(question, manner, answer)))

    def taken_back(self) -> tuple["Conversation", Exchange]:
        """The conversation up to the last question, and the question. `UserError` if there is
        none."""
        if not self.exchanges:
            raise UserError("there is no question to ask again")
        return Conversation(self.exchanges[:-1]), self.exchanges[-1]

    def as_json(self) -> str:
        """The turns, and the result of each reply as in `--json`."""
        results = [
            said.answer.result.model_dump() if said.answer.result is not None else None
            for said in self.exchanges
        ]
        turns = self.turns_with("")[:-1]
        return json.dumps({"turns": turns, "results": results}, ensure_ascii=False, indent=1) + "\n"


class Paint:
    """Finds for each piece of a reply whether the draft proposed its token. The text may come later
    than its tokens, and end at a stop string: characters are matched."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bool]] = deque()

    def push(self, spelt: Iterable[tuple[str, bool]]) -> None:
        """Tokens whose text is about to come: what each completes, and whether it was drafted."""
        self._waiting.extend(spelt)

    def take(self, text: str) -> list[tuple[str, bool]]:
        """The text in pieces that are drafted or not; what no token has spelt is not."""
        pieces: list[tuple[str, bool]] = []
        while text:
            spelt, flag = self._waiting.popleft() if self._waiting else (text, False)
            if len(spelt) > len(text):
                self._waiting.appendleft((spelt[len(text) :], flag))
            piece, text = text[: len(spelt)], text[len(spelt) :]
            if piece and pieces and pieces[-1][1] == flag:
                pieces[-1] = (pieces[-1][0] + piece, flag)
            elif piece:
                pieces.append((piece, flag))
        return pieces
