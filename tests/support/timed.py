"""Scripted workers whose work takes the time that it is told to, on a clock of their own: a
coordinator with them lives in virtual time.

A draft guesses each next token rightly with a given probability, and believes another one or the
same; passes, levels and hops cost what is said. One thing happens at a time: nothing is drafted
while the target verifies.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log as ln
from typing import Any

from dovetail.protocol.messages import (
    Command,
    Draft,
    Drafted,
    Event,
    Failed,
    Finished,
    Limits,
    Open,
    Opened,
    RoundRecord,
    Verified,
    VerifiedItem,
    Verify,
)
from dovetail.protocol.messages import Recorded as RecordedRound
from dovetail.protocol.noise import mix
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.runtime.client import Client
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.fleet.records import PairRecords
from support.memory_links import MemoryHub, MemoryLink, memory_links
from support.scripted import VOCABULARY, ScriptedWorker

HOST_S = 1e-4
"""Seconds that the coordinator takes for every look at its messages."""


def choice(log: Sequence[int]) -> int:
    """A language that never ends."""
    return 1 + mix(log[-1] + (len(log) << 20)) % (VOCABULARY - 1)


@dataclass
class Costs:
    """Seconds, chances and beliefs; `context` is the committed length."""

    pass_s: Callable[[int, int], float] = lambda rows, _context: 0.02 + 0.0005 * rows
    level_s: Callable[[int], float] = lambda _context: 0.002
    right: Callable[[int], float] = lambda _context: 0.8
    belief: Callable[[int], float] | None = None
    """None: as likely as it is."""
    target_hop_s: float = 2e-4
    draft_hop_s: float = 2e-4
    drafted_hop_s: float = 0.0
    """How much longer a target's hop is in a round with a draft."""
    noise: float = 0.0
    """The share by which passes vary."""
    ahead_slows: float = 1.0
    """The target's passes, where the last order was to go on drafting."""


@dataclass
class Clock:
    now_ns: int = 1_000_000_000
    ahead: bool = False

    def pass_s(self, seconds: float) -> tuple[str, int, int]:
        """Let so many seconds go by; the span."""
        began, self.now_ns = self.now_ns, self.now_ns + round(seconds * 1e9)
        return ("work", began, self.now_ns - began)


@dataclass
class TimedWorker(ScriptedWorker):
    clock: Clock = field(default_factory=Clock)
    costs: Costs = field(default_factory=Costs)
    chance: random.Random = field(default_factory=lambda: random.Random(1))


class TimedTarget(TimedWorker):
    def work(self, command: Command) -> list[Event]:
        self.clock.pass_s(self.costs.target_hop_s)
        if isinstance(command, Open):
            log = self.logs[command.session] = list(command.prompt)
            span = self.clock.pass_s(0.01)
            log.append(choice(log))
            return [
                Opened(
                    epoch=self.epoch,
                    session=command.session,
                    bonus=log[-1],
                    margin=1.0,
                    spans=(span,),
                )
            ]
        assert isinstance(command, Verify)
        if any(item.tokens for item in command.items):
            self.clock.pass_s(self.costs.drafted_hop_s)
        rows = sum(1 + len(item.tokens) for item in command.items)
        context = sum(item.prefix for item in command.items) // len(command.items)
        slower = self.costs.ahead_slows if self.clock.ahead else 1.0
        varied = 1.0 + self.costs.noise * self.chance.expovariate(1.0)
        span = self.clock.pass_s(self.costs.pass_s(rows, context) * slower * varied)
        items = []
        for item in command.items:
            log, accepted, node = self.logs[item.session], [], ROOT
            assert item.prefix == len(log)
            while (child := item.tree.children.get(node, {}).get(choice(log))) is not None:
                accepted.append(child)
                log.append(item.tokens[child])
                node = child
            log.append(choice(log))
            margins = (1.0,) * (len(accepted) + 1)
            items.append(
                VerifiedItem(
                    session=item.session,
                    round=item.round,
                    accepted=tuple(accepted),
                    bonus=log[-1],
                    margins=margins,
                )
            )
        return [Verified(epoch=self.epoch, items=tuple(items), spans=(span,))]


class TimedDraft(TimedWorker):
    """Proposes a chain, as long as its next token is worth the price of a level."""

    last: dict[int, Drafted]
    orders: list[Draft]

    def work(self, command: Command) -> list[Event]:
        self.clock.pass_s(self.costs.draft_hop_s)
        if isinstance(command, Open):
            self.logs[command.session] = list(command.prompt)
            return [Opened(epoch=self.epoch, session=command.session)]
        assert isinstance(command, Draft)
        self.last, self.orders = getattr(self, "last", {}), getattr(self, "orders", [])
        self.orders.append(command)
        self.clock.ahead = command.ahead
        log = self.logs[command.session]
        log += [
            *(self.last[command.session].tokens[n] for n in command.accepted),
            command.bonus,
            *command.more,
        ]
        assert command.prefix == len(log)
        self.last[command.session] = self.propose(command, list(log))
        return [self.last[command.session]]

    def propose(self, command: Draft, path: list[int]) -> Drafted:
        costs, began = self.costs, self.clock.now_ns
        tokens, scores, score, level_s = [], [], 0.0, costs.level_s(len(path))
        passes = []
        for _ in range(min(command.max_depth, command.max_nodes)):
            belief = max(1e-6, (costs.belief or costs.right)(len(path)))
            late = (
                command.deadline_ms is not None
                and self.clock.now_ns - began > command.deadline_ms * 1e6
            )
            likely = 2.718281828 ** (score + ln(belief))
            if late or (
                command.rate is not None and likely - command.floor < command.rate * level_s
            ):
                break
            _, _, duration_ns = self.clock.pass_s(level_s)
            passes.append((1, duration_ns))
            token = choice(path)
            if mix(path[-1] + (len(path) << 32) + 12345) % 10_000 >= 10_000 * costs.right(
                len(path)
            ):
                token = 1 + token % (VOCABULARY - 1)
            score += ln(belief)
            tokens.append(token)
            scores.append(score)
            path.append(token)
        return Drafted(
            epoch=self.epoch,
            session=command.session,
            round=command.round,
            tokens=tuple(tokens),
            parents=tuple(range(-1, len(tokens) - 1)),
            scores=tuple(scores),
            grown=len(tokens),
            hit=False,
            passes=tuple(passes),
            spans=(("draft", began, self.clock.now_ns - began),),
        )


class TimedHouse:
    """A coordinator, a target, a draft and a client, in virtual time."""

    def __init__(
        self,
        costs: Costs,
        *,
        target: dict[str, object] | None = None,
        draft: dict[str, object] | None = None,
        records: PairRecords | None = None,
    ) -> None:
        """`target`, `draft`: changes to their Hellos; `records`: those of earlier houses."""
        self.hub: MemoryHub = memory_links()
        self.clock = Clock()
        self.coordinator = Coordinator(
            self.hub, clock_ns=lambda: self.clock.now_ns, records=records
        )
        limits = Limits(context=1 << 16)
        self.target = TimedTarget(
            self.hub.connect(), "target", epoch=100, clock=self.clock, costs=costs
        )
        self.draft = TimedDraft(
            self.hub.connect(), "draft", epoch=101, clock=self.clock, costs=costs
        )
        self.target.register(**{"limits": limits, **(target or {})})
        self.draft.register(**{"limits": limits, **(draft or {})})
        self.run()
        self.client = Client(self._pumped(self.hub.connect()))

    def _pumped(self, link: MemoryLink) -> MemoryLink:
        receive = link.receive
        link.receive = lambda timeout_s, **_: (self.run(), receive(0))[1]  # type: ignore[method-assign]
        return link

    def run(self) -> None:
        """Let everybody do what there is to do."""
        busy = True
        while busy:
            self.clock.pass_s(HOST_S)
            self.coordinator.pump()
            busy = bool(self.target.step(1) + self.draft.step(1))  # it receives between two passes

    def complete(
        self,
        tokens: int = 400,
        *,
        prompt: int = 8,
        policy: str = "goodput",
        gamma: int = 15,
        depth: int = 8,
        **options: Any,
    ) -> Finished:
        """Decode so many tokens."""
        tree = TreeSettings(policy=policy, gamma=gamma, depth=depth, insist=policy != "goodput")
        asked = {"seed": 1, "tree": tree, "sampling": Sampling(), **options}
        return self.client.complete(
            self.client.submit(tokens=[3] * prompt, max_tokens=tokens, **asked)
        )

    def rate(self, tokens: int = 400, **options: Any) -> float:
        """Tokens a second of a reply."""
        return self.complete(tokens, **options).result.tokens_per_s

    def records(self, tokens: int, **options: Any) -> tuple[list[RoundRecord], Finished]:
        """Return the record of every round of a reply, and its end."""
        tree = TreeSettings(policy="goodput")
        self.client.submit(
            tokens=[3] * 8, max_tokens=tokens, seed=1, record=True, **{"tree": tree, **options}
        )
        replies = []
        while not isinstance(reply := self.client.receive(0), Finished):
            assert reply is not None
            assert not isinstance(reply, Failed), reply.text
            replies.append(reply)
        return [reply.record for reply in replies if isinstance(reply, RecordedRound)], reply
