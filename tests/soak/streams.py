"""Requests that run beside each other without end, each compared with what it was when nothing
happened."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from dovetail.protocol.messages import Emitted, Failed, Finished, Reply
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client

TREE = TreeSettings(policy="dynamic", insist=True, gamma=8, depth=5, width=4)


@dataclass(frozen=True)
class Case:
    """A request that can be repeated to the token."""

    turns: tuple[str, ...]
    sampling: Sampling
    tokens: int
    seed: int

    def submit(self, client: Client, *, speculate: bool = True) -> int:
        return client.submit(
            turns=self.turns,
            sampling=self.sampling,
            max_tokens=self.tokens,
            seed=self.seed,
            tree=TREE,
            speculate=speculate,
        )


@dataclass(frozen=True)
class Wrong:
    """A reply that is not what it should be."""

    case: Case
    what: str


@dataclass
class _Running:
    case: Case
    tokens: list[int]
    heard_s: float
    text: str = ""


@dataclass
class Streams:
    """Requests, so many at a time, from cases in turn; `expected` holds what each replies
    undisturbed."""

    client: Client
    cases: Sequence[Case]
    together: int
    expected: dict[Case, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    equal: int = 0
    tokens: int = 0
    moves: int = 0
    alone: int = 0  # replies of which no token was drafted
    longest_pause_s: float = 0.0  # the longest time between two that tokens came of one reply
    failed: list[Wrong] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    _running: dict[int, _Running] = field(default_factory=dict)

    def learn(self) -> Iterator[Case]:
        """Have each case decoded by the target alone while nothing happens; each, when that is
        done."""
        for case in self.cases:
            result = self.client.complete(case.submit(self.client, speculate=False)).result
            self.expected[case] = result.token_ids, result.text
            yield case

    def run(self, seconds: float, next_cases: "cycle[Case] | None") -> None:
        """Hear replies for so long, and ask anew for each that has ended; without `next_cases` no
        more."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            while next_cases is not None and len(self._running) < self.together:
                case = next(next_cases)
                self._running[case.submit(self.client)] = _Running(case, [], time.monotonic())
            if next_cases is None and not self._running:
                return
            reply = self.client.receive(left)
            if reply is not None:
                self._hear(reply)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def silent_s(self) -> float:
        """Seconds since something was heard of the request that has been silent for longest."""
        return max(
            (time.monotonic() - running.heard_s for running in self._running.values()), default=0.0
        )

    def _hear(self, reply: Reply) -> None:
        if isinstance(reply, Emitted):
            running = self._running[reply.request]
            now_s = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now_s - running.heard_s)
            running.heard_s = now_s
            running.tokens += reply.tokens
            running.text += reply.text
        elif isinstance(reply, Failed):
            assert reply.session is not None, reply.text
            running = self._running.pop(reply.session)
            self.failed.append(Wrong(running.case, f"{reply.code}: {reply.text}"))
        elif isinstance(reply, Finished):
            self._judge(self._running.pop(reply.request), reply)

    def _judge(self, running: _Running, reply: Finished) -> None:
        result, (tokens, text) = reply.result, self.expected[running.case]
        self.tokens += result.completion_tokens
        self.moves += result.moves
        self.alone += not result.drafted_tokens
        if (tuple(running.tokens), running.text) != (result.token_ids, result.text):
            self.wrong.append(
                Wrong(
                    running.case,
                    f"streamed {running.tokens}, and the result says {result.token_ids}",
                )
            )
        elif (result.token_ids, result.text) != (tokens, text):
            self.wrong.append(
                Wrong(
                    running.case,
                    f"{result.token_ids} after {result.moves} moves, undisturbed {tokens}",
                )
            )
        else:
            self.equal += 1
