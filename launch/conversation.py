"""A conversation with the models: what was said, how the next reply is asked for, and which lines are commands.

Knows nothing of who answers (`answering.py`), nor of terminals.
"""

import difflib
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import Sampling, TreeSettings

COMMANDS = {
    "stats": ("", "the figures of the last replies"),
    "draft": ("on|off", "whether the draft proposes tokens; the text is the same"),
    "temperature": ("X", "the temperature of the next replies; 0: greedy"),
    "seed": ("N|random", "the seed of the next replies"),
    "retry": ("", "take the last reply back and ask for another one"),
    "clear": ("", "forget what was said"),
    "save": ("FILE", "write what was said, and the figures of the replies, as JSON"),
    "help": ("", "these commands; a text that begins with / is written with //"),
    "quit": ("", "end; Ctrl-D does too"),
}
"""Name -> (what follows it, what it does)."""


@dataclass(frozen=True)
class Command:
    """A line that is not for the models."""

    name: str
    argument: str = ""


def parse(line: str) -> Command | str | None:
    """A command, a text to be answered, or None for an empty line; `UserError` for a command that there is not, or that lacks its argument."""
    text = line.strip()
    if not text.startswith("/") or text.startswith("//"):
        return text.removeprefix("/") if text.startswith("//") else text or None
    name, _, argument = text[1:].partition(" ")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise UserError(f"there is no command /{name}: {f'did you mean /{near[0]}?' if near else '/help tells which there are'}")
    wanted = COMMANDS[name][0]
    argument = argument.strip()
    if bool(wanted) != bool(argument) or (wanted == "on|off" and argument not in ("on", "off")):
        raise UserError(f"/{name} {argument}".rstrip() + f" is not possible: write /{name} {wanted}".rstrip())
    return Command(name, argument)


@dataclass(frozen=True)
class Manner:
    """How a reply is asked for."""

    sampling: Sampling
    max_tokens: int
    tree: TreeSettings
    seed: int | None = None
    stop: tuple[str, ...] = ()
    speculate: bool = True
    ahead: bool | None = None


@dataclass(frozen=True)
class Answer:
    """A reply: its text as far as it came, and its figures unless it was interrupted before there were any."""

    text: str
    result: Result | None = None
    interrupted: bool = False


@dataclass
class Conversation:
    """What was said: questions and answers in turn."""

    questions: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def turns_with(self, question: str) -> tuple[str, ...]:
        """All turns up to this question, user first."""
        said = [turn for pair in zip(self.questions, self.answers, strict=True) for turn in (pair[0], pair[1].text)]
        return (*said, question)

    def add(self, question: str, answer: Answer) -> None:
        """Keep an answer; one that was interrupted before its first word leaves no trace."""
        if answer.text or not answer.interrupted:
            self.questions.append(question)
            self.answers.append(answer)

    def take_back(self) -> str:
        """Forget the last answer; its question. `UserError` if there is none."""
        if not self.questions:
            raise UserError("nothing was said that could be asked again")
        self.answers.pop()
        return self.questions.pop()

    def clear(self) -> None:
        self.questions.clear()
        self.answers.clear()

    def as_json(self) -> str:
        """The turns, and of each reply the result as `--json` has it."""
        results = [answer.result.model_dump() if answer.result is not None else None for answer in self.answers]
        turns = self.turns_with("")[:-1]
        return json.dumps({"turns": turns, "results": results}, ensure_ascii=False, indent=1) + "\n"


class Paint:
    """Tells for every piece of a reply's text whether its token came from the draft.

    Tokens come with the text that they complete, the text of the reply comes apart from them - later where something is held back, and cut at a stop
    string - and is what counts: its characters are counted off those of the tokens.
    """

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
