"""A part of a service on a node of a cluster. Its seat is polled, and each answer leads to a
decision; nothing blocks. Does not import Ray.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.launch.processes.supervise import Ending
from dovetail.protocol.errors import DovetailError, UserError

LOOK_EVERY_S, LOOK_SELDOM_S = 0.1, 1.0
"""Seconds between two polls of a process: at first and later."""
YOUNG_S = 30.0  # seconds after which a process is polled less often
LOST = 1  # the exit code of a process that was lost with its node
MISTAKEN = 2


class Failed(Exception):
    """A failed call to a seat; `mistake`: because of a user error."""

    def __init__(self, why: str, *, mistake: bool = False) -> None:
        super().__init__(why)
        self.mistake = mistake


@dataclass(frozen=True)
class SeatCommand:
    """A command for a seat, with the files and the cores that it needs."""

    arguments: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    cores: int = 0
    last: bool = False  # true if cores are claimed from the last one downwards
    reads: bool = False  # true if the process prints its address on stdout


class RemotePart:
    """One process on a node, from the request for a seat to its end."""

    def __init__(
        self,
        name: str,
        seat: Any,
        *,
        release: Mapping[str, Any],
        patience_s: float,
        why_waiting: Callable[[], str],
    ) -> None:
        """`seat`: a `RemoteSeat`; `release`: the release that a node must report. After
        `patience_s` seconds without a node this is logged, with `why_waiting`."""
        self.name, self.seat = name, seat
        self._release = release
        self._why_waiting, self._begun_s = why_waiting, time.monotonic()
        self._patience_s: float | None = patience_s
        self._command: SeatCommand | None = None
        self._begun = False
        self._told: list[str] = []
        self._look_s = 0.0
        self._lines: list[str] = []
        self._ending: Ending | None = None
        self._failure = self._heard = ""
        self._beats, self._cpu_s = False, 0.0
        self.pid, self.host, self.ip = 0, "", ""
        seat.ask("introduce")

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def begin(self, command: SeatCommand) -> None:
        """Start its process as soon as a node is available."""
        self._command = command

    def heard(self) -> str:
        return self._heard

    def beats(self) -> bool:
        beats, self._beats = self._beats, False
        return beats

    def cpu_s(self) -> float:
        return self._cpu_s

    def tell(self, line: str) -> bool:
        if not self.pid:
            self._told.append(line)
        elif not self.ended:
            self.seat.order("tell", line)
        return True

    def listen(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def ending(self) -> Ending:
        assert self._ending is not None
        return self._ending

    def failure(self) -> DovetailError:
        ending = self.ending()
        kind = UserError if ending.mistake else DovetailError
        return kind(self._failure or f"the {self.name} {ending.words}")

    def lose(self, why: str) -> None:
        """Count it as ended, ignoring later reports of its node."""
        if self._ending is None:
            self._ending = Ending(LOST, why)

    def poll(self, now_s: float) -> None:
        if self.ended:
            return
        try:
            if (answer := self.seat.answer()) is not None:
                self._take(answer, now_s)
        except Failed as error:
            self._refuse(str(error), mistake=error.mistake)
            return
        if self.seat.idle and self.host and not self.ended:
            self._go_on(now_s)
        if not self.host and self._patience_s and now_s - self._begun_s > self._patience_s:
            self._patience_s = None
            self._lines.append(f"it waits for a node: {self._why_waiting()}")

    def _take(self, answer: Mapping[str, Any], now_s: float) -> None:
        if "release" in answer:
            self._meet(answer)
        elif "why" in answer:
            self._refuse(answer["why"], mistake=answer["mistake"])
        elif "pid" in answer:
            self.pid = answer["pid"]
            for line in self._told:
                self.seat.order("tell", line)
        else:
            self._heard, self._cpu_s = answer["heard"], answer["cpu_s"]
            self._beats |= answer["beats"]
            self._lines += answer["lines"]
            young = now_s - self._begun_s < YOUNG_S
            self._look_s = now_s + (LOOK_EVERY_S if young else LOOK_SELDOM_S)
            if answer["ending"] is not None:
                self._failure = answer["failure"]
                self._ending = Ending(**answer["ending"])

    def _meet(self, answer: Mapping[str, Any]) -> None:
        theirs = {key: answer[key] for key in self._release}
        if theirs != self._release:
            self._refuse(
                f"the node {answer['host']} has dovetail {_release(theirs)} and this machine "
                f"{_release(self._release)}: install the same release on all nodes",
                mistake=True,
            )
            return
        self.host, self.ip = answer["host"], answer["ip"]

    def _go_on(self, now_s: float) -> None:
        command = self._command
        if self.pid and now_s >= self._look_s:
            self.seat.ask("look")
        elif command is not None and not self._begun:
            self._begun = True
            self.seat.ask(
                "start",
                self.name,
                [*command.arguments],
                dict(command.files),
                command.cores,
                last=command.last,
                reads=command.reads,
            )

    def _refuse(self, why: str, *, mistake: bool) -> None:
        words = "was not started" if mistake else why
        self._failure = f"the {self.name}: {why}" if mistake else ""
        code = MISTAKEN if mistake else LOST
        self._ending = Ending(code, words, mistake, last_line=why if mistake else "")


def _release(told: Mapping[str, Any]) -> str:
    return f"{told['release']} (protocol {'.'.join(map(str, told['protocol']))})"
