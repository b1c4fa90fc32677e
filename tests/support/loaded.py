"""Scripted workers under load, each on a clock of its own: sessions draft while the target
computes, and wait for each other as they would.

The coordinator is the real one, on a hub of the simulator's. What passes, levels and prompts take
is said; nothing else takes any time but messages.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

from dovetail.protocol.calibration import ContextCurve, RowsSeconds
from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.messages import (
    Close,
    Closed,
    Command,
    Draft,
    Drafted,
    Drafts,
    Emitted,
    Event,
    Failed,
    Finished,
    Hello,
    Limits,
    Open,
    Opened,
    Result,
    Submit,
    Verified,
    VerifiedItem,
    Verify,
    VerifyItem,
)
from dovetail.protocol.noise import mix
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.runtime.costs.passes import PassCurves
from dovetail.runtime.costs.rounds import Messages
from dovetail.runtime.engine.coordinator import Coordinator
from simulation.clockwork import Agenda, Clock, Process, StillHub
from simulation.prices import PlacedCosts
from support.scripted import VOCABULARY, hello
from support.timed import choice

CLIENT = b"\1client"
EPOCH = 900
TICK_NS = 250_000_000
GOODPUT = TreeSettings(policy="goodput", gamma=15, depth=8)
FIXED = TreeSettings(policy="dynamic", gamma=15, depth=8)


@dataclass(frozen=True)
class Pace:
    """Times of simulated work, in seconds, and probabilities of right guesses."""

    pass_s: Callable[[int], float] = lambda rows: 0.02 + 0.0003 * rows
    """Rows of a pass of the target -> its seconds."""
    level_s: float = 0.001
    """Seconds of the draft for each node of its chains."""
    right: Callable[[int, int], float] = lambda prompt, place: 0.8
    """(tokens of the prompt, length of the log) -> probability that a guess is right."""
    belief: float | None = None
    """Probability that the draft gives a guess; None: the true one."""
    together: int = 1
    """Sessions that share a pass of the draft."""
    further_s: float = 0.0001
    """Added to a pass of the draft by each further session in it."""
    prompt_s: float = 0.01
    row_s: float = 0.0
    """Seconds that the target takes for each token of a log that it reads, beyond `prompt_s`."""
    kept: int = 0
    """Tokens of ended sessions that the target keeps."""
    draft_prompt_s: float = 0.01
    hop_s: float = 1e-4
    coordinator_s: float = 5e-5


class Scripted:
    """One worker of either role."""

    def __init__(self, role: str, epoch: int, clock: Clock, pace: Pace, **changes: Any) -> None:
        self._role, self._epoch, self._clock, self._pace, self._changes = (
            role,
            epoch,
            clock,
            pace,
            changes,
        )
        self.logs: dict[int, list[int]] = {}
        self.read: list[int] = []
        """Tokens that were read for each log."""
        self._prompts: dict[int, int] = {}
        self._last: dict[int, Drafted] = {}
        self.opened = 0
        self.passes: list[Verify] = []
        self.orders: list[Draft] = []
        self.late_s = 0.0
        """Seconds by which it answers orders later than its pace."""

    @property
    def sessions(self) -> int:
        return len(self.logs)

    def hello(self, epoch: int) -> Hello:
        self._epoch = epoch
        kept = self._pace.kept if self._role == "target" else 0
        limits = Limits(context=1 << 16, together=self._pace.together, kept=kept)
        return hello(
            self._role,
            **{"epoch": epoch, "limits": limits, "cores": (), "states": None, **self._changes},
        )

    def idle(self) -> bool:
        return False

    def handle(self, command: Command) -> Iterable[Event]:
        match command:
            case Open():
                yield self._open(command)
            case Verify():
                yield self._verify(command)
            case Draft():
                yield self._draft(command)
            case Drafts():
                yield from self._drafts(command.orders)
            case Close():
                self.logs.pop(command.session, None)
                yield Closed(epoch=self._epoch, session=command.session)

    def _spent(self, seconds: float) -> tuple[str, int, int]:
        began_ns = self._clock()
        self._clock.advance(seconds)
        return ("work", began_ns, self._clock() - began_ns)

    def _open(self, command: Open) -> Opened:
        self.opened += 1
        told = self.logs[command.session] = list(command.prompt)
        self._prompts[command.session] = len(told)
        self.read.append(len(told) - command.kept)
        if self._role == "draft":
            self._spent(self._pace.draft_prompt_s)
            return Opened(epoch=self._epoch, session=command.session)
        rows = len(command.prompt) - command.kept
        span = self._spent(self._pace.prompt_s + self._pace.row_s * rows)
        told.append(choice(told))
        return Opened(
            epoch=self._epoch,
            session=command.session,
            round=command.round,
            bonus=told[-1],
            margin=1.0,
            spans=(span,),
        )

    def _verify(self, command: Verify) -> Verified:
        self.passes.append(command)
        span = self._spent(self._pace.pass_s(sum(1 + len(item.tokens) for item in command.items)))
        return Verified(
            epoch=self._epoch, items=tuple(map(self._verdict, command.items)), spans=(span,)
        )

    def _verdict(self, item: VerifyItem) -> VerifiedItem:
        told, accepted, node = self.logs[item.session], list[int](), ROOT
        assert item.prefix == len(told)
        while (child := item.tree.children.get(node, {}).get(choice(told))) is not None:
            accepted.append(child)
            told.append(item.tokens[child])
            node = child
        told.append(choice(told))
        margins = (1.0,) * (len(accepted) + 1)
        return VerifiedItem(
            session=item.session,
            round=item.round,
            accepted=tuple(accepted),
            bonus=told[-1],
            margins=margins,
        )

    def _draft(self, command: Draft) -> Drafted:
        (drafted,) = self._drafts([command])
        return drafted

    def _drafts(self, commands: Sequence[Draft]) -> Iterable[Drafted]:
        """Chains that grow side by side, as long as what their next tokens bring is worth the price
        of a level of all of them; each is answered when nothing more of it is."""
        self.orders += commands
        self._spent(self.late_s)
        began_ns = self._clock()
        growing = [self._chain(command) for command in commands]
        while growing:
            for chain in [*growing]:
                if not chain.goes_on(self._clock() - began_ns):
                    growing.remove(chain)
                    yield self._drafted(chain, began_ns)
            taken = self._worth(growing)
            for chain in growing:
                chain.over = chain not in taken
            if taken:
                _, _, duration_ns = self._spent(self._level_s(len(taken)))
                for chain in taken:
                    chain.grow((len(taken), duration_ns))

    def _level_s(self, sessions: int) -> float:
        return self._pace.level_s + (sessions - 1) * self._pace.further_s

    def _worth(self, growing: Sequence["Chain"]) -> Sequence["Chain"]:
        """Return the chains of the next pass: those that together bring most above its price."""
        ranked = sorted(growing, key=lambda chain: -chain.gain)
        best, most = 0, 0.0
        for count in range(1, len(ranked) + 1):
            gains = sum(chain.gain for chain in ranked[:count])
            rate = sum(chain.command.rate or 0.0 for chain in ranked) / len(ranked)
            if (worth := gains - rate * self._level_s(count)) > most:
                best, most = count, worth
        return ranked[:best]

    def _chain(self, command: Draft) -> "Chain":
        told, last = self.logs[command.session], self._last.get(command.session)
        told += [
            *(last.tokens[node] for node in command.accepted if last),
            command.bonus,
            *command.more,
        ]
        assert command.prefix == len(told)
        return Chain(command, [*told], self._prompts[command.session], self._pace)

    def _drafted(self, chain: "Chain", began_ns: int) -> Drafted:
        command, count = chain.command, len(chain.tokens)
        drafted = self._last[command.session] = Drafted(
            epoch=self._epoch,
            session=command.session,
            round=command.round,
            tokens=tuple(chain.tokens),
            parents=tuple(range(-1, count - 1)),
            scores=tuple(min(0.0, log(score)) for score in chain.scores),
            grown=count,
            hit=False,
            passes=tuple(chain.passes),
            spans=(("draft", began_ns, self._clock() - began_ns),),
        )
        return drafted


@dataclass(eq=False)
class Chain:
    """The nodes that a draft grows for one session, one below the other."""

    command: Draft
    path: list[int]
    prompt: int
    pace: Pace
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self._look()

    def _look(self) -> None:
        """Set how likely the next token is right, along with all before it."""
        self.right = self.pace.right(self.prompt, len(self.path))
        belief = max(1e-6, self.right if self.pace.belief is None else self.pace.belief)
        self.score = (self.scores[-1] if self.scores else 1.0) * belief

    @property
    def gain(self) -> float:
        """Tokens that the next one brings."""
        return 1e9 if self.command.rate is None else self.score - self.command.floor

    def goes_on(self, elapsed_ns: int) -> bool:
        """Return whether a pass that begins so long after the order may add a node."""
        command, deadline_ms = self.command, self.command.deadline_ms
        late = deadline_ms is not None and elapsed_ns > deadline_ms * 1e6
        full = len(self.tokens) >= min(command.max_depth, command.max_nodes)
        return not (self.over or late or full or self.score < command.floor)

    def grow(self, taken: tuple[int, int]) -> None:
        """Grow by a token."""
        token, path = choice(self.path), self.path
        if mix(path[-1] + (len(path) << 32) + 12345) % 10_000 >= 10_000 * self.right:
            token = 1 + token % (VOCABULARY - 1)
        self.tokens.append(token)
        self.scores.append(self.score)
        self.passes.append(taken)
        path.append(token)
        self._look()


@dataclass
class Stream:
    """A request that has ended, as its client saw it."""

    result: Result
    began_ns: int
    """The time of its first token; `ended_ns`: of its last one."""
    ended_ns: int


@dataclass
class Crowded:
    """A coordinator, targets with a draft and clients, each on its own clock."""

    pace: Pace = field(default_factory=Pace)
    targets: int = 1
    profiled: bool = False
    """True if the target has a profile of its passes from the beginning."""

    def __post_init__(self) -> None:
        self.agenda = Agenda()
        self.hub = StillHub(self.agenda, Messages(self.pace.hop_s, self.pace.coordinator_s))
        self.coordinator = Coordinator(self.hub, clock_ns=self.hub.time, later=self.hub.later)
        self.hub.pump = self.coordinator.pump
        self.hub.join(CLIENT, self._hear)
        self._requests, self._began, self._told = 0, dict[int, int](), dict[int, Stream]()
        self._post(
            Hello(epoch=EPOCH, roles=("client",), name="client", host="client.simulated", pid=3)
        )
        self.workers: dict[str, Scripted] = {}
        for _ in range(self.targets):
            self.add("target")
        self.add("draft")
        self._settle()

    def add(self, role: str, *, at_ns: int = 0, pace: Pace | None = None, **changes: object) -> str:
        """A worker joins at this time; return its name. `pace`: another one than that of all."""
        clock, number, pace = Clock(), len(self.workers), pace or self.pace
        clock.wait_until(at_ns)
        rows = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        curve = ContextCurve(
            context=0, t_v=RowsSeconds(rows=rows, seconds=tuple(map(pace.pass_s, rows)))
        )
        name = f"{role}{number}" if role == "target" else role
        curves = (curve,) if self.profiled and role == "target" else ()
        worker = self.workers[name] = Scripted(
            role, 0, clock, pace, name=name, pid=number, curves=curves, **changes
        )
        Process(bytes([10 + number]) + name.encode(), worker, clock, self.hub).start()
        return name

    def join_after(self, seconds: float, pace: Pace | None = None, **changes: object) -> str:
        """One more target joins so long after now, while streams run; return its name."""
        return self.add(
            "target", at_ns=self.hub.clock() + round(1e9 * seconds), pace=pace, **changes
        )

    def _settle(self) -> None:
        while self.agenda.step():
            pass

    @property
    def target(self) -> Scripted:
        return self.workers["target0"]

    @property
    def draft(self) -> Scripted:
        return self.workers["draft"]

    def _post(self, message: Hello | Submit) -> None:
        self.hub.post(CLIENT, encode(message), self.hub.clock())

    def _hear(self, frames: list[bytes], time_ns: int) -> None:
        match reply := REPLY.decode(frames):
            case Emitted():
                self._began.setdefault(reply.request, time_ns)
            case Finished():
                self._told[reply.request] = Stream(
                    reply.result, self._began[reply.request], time_ns
                )
            case Failed():
                raise AssertionError(reply.text)

    def run(
        self,
        streams: int,
        tokens: int | Sequence[int] = 64,
        *,
        tree: TreeSettings = GOODPUT,
        speculate: bool = True,
        plain: Sequence[int] = (),
        apart_s: float = 0.0,
        prompt: int = 8,
        temperature: float = 0.0,
    ) -> list[Stream]:
        """Run so many streams, each with a prompt of its own length, that come at once or one after
        the other; those of the numbers in `plain` without a draft.

        `tokens`: of each reply, or of all of them.
        """
        lengths = [tokens] * streams if isinstance(tokens, int) else tokens
        asked = []
        for number in range(streams):
            self._requests += 1
            asked.append(self._requests)
            submit = Submit(
                epoch=EPOCH,
                request=self._requests,
                tokens=(3,) * (prompt + number),
                max_tokens=lengths[number],
                seed=1,
                tree=tree,
                speculate=speculate and number not in plain,
                sampling=Sampling(temperature=temperature),
            )
            sent_ns = self.hub.clock() + round(1e9 * apart_s * number)
            self.agenda.plan(
                sent_ns,
                lambda _, submit=submit, sent_ns=sent_ns: self.hub.post(
                    CLIENT, encode(submit), sent_ns
                ),
            )
        self._tick(asked)
        while not all(request in self._told for request in asked):
            assert self.agenda.step(), "nobody has anything to do, and not all replies are finished"
        self._settle()
        return [self._told.pop(request) for request in asked]

    def _tick(self, asked: Sequence[int]) -> None:
        """The coordinator's loop, until everything has been answered."""

        def tick(_: int) -> None:
            self.coordinator.tick()
            if not all(request in self._told for request in asked):
                self.agenda.plan(self.hub.clock() + TICK_NS, tick)

        self.agenda.plan(self.hub.clock() + TICK_NS, tick)


def rate(streams: Sequence[Stream]) -> float:
    """Tokens a second of all of them, from the first token of the first to the end of the last."""
    tokens = sum(stream.result.completion_tokens - 1 for stream in streams)
    return (
        tokens
        / (max(stream.ended_ns for stream in streams) - min(stream.began_ns for stream in streams))
        * 1e9
    )


def drafted(streams: Sequence[Stream]) -> int:
    """Rounds in which nodes were verified."""
    return sum(stream.result.rounds - stream.result.plain_rounds for stream in streams)


def passes_of(seconds: float) -> PlacedCosts:
    """Costs of passes that take as long over many rows as over one."""
    flat = RowsSeconds(rows=(1, 64), seconds=(seconds, seconds))
    return PlacedCosts(PassCurves([ContextCurve(context=0, t_v=flat)]), flat)
