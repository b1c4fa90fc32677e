"""The draft worker: turns the coordinator's commands into calls of an engine, and proposals into
events.

Enforces the rules of rounds, measures spans, registers. Independent of links. The engines are in
`drafters/`: a small model, a head of the target, or n-grams without a model, in which case torch is
never imported."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from dovetail.protocol.arrays import Array
from dovetail.protocol.calibration import ContextCurve
from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.lookup import in_texts
from dovetail.protocol.messages import (
    MAX_SPANS,
    Close,
    Closed,
    Command,
    Draft,
    Drafted,
    Drafts,
    Event,
    Fed,
    Feed,
    Hello,
    Limits,
    Open,
    Opened,
    Read,
    Reading,
    ReadItem,
    VocabularyFacts,
    grammar_engine,
)
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers.drafters.engine import Engine, Keeper, SessionT
from dovetail.workers.serving.failures import as_request_error, failed
from dovetail.workers.sessions.prefix_cache import KeptSessions, Left
from dovetail.workers.sessions.rounds import check_chunk, check_round, find_session
from dovetail.workers.speculation.proposal import Order, Price, Proposal, Shape

if TYPE_CHECKING:
    from dovetail.workers.sessions.blocks import BlockStore, Chain
    from dovetail.workers.speculation.constrained import Constrained

MAX_OPEN = 1024  # the most open sessions, each with its own cache; memory is the real bound


@dataclass(frozen=True)
class Identity:
    """The facts with which a draft worker registers. Without a vocabulary it only uses tokens that
    it was sent."""

    name: str
    model: str
    device: str
    threads: int
    context: int
    vocabulary: VocabularyFacts | None = None
    table: TokenTable | None = None
    weights: str = ""
    curves: Sequence[ContextCurve] = ()
    """The cost of a level of its tree, from this machine's profile file."""
    kept_tokens: int = 0  # the number of tokens of ended sessions whose rows it can keep
    together: int = 1  # the most sessions that it drafts for in one pass
    blocks: "BlockStore | None" = None  # blocks of cached prompts; None: none are stored
    kept_extra: int = 0  # additional tokens that each session counts as, for its recurrent states


@dataclass
class _Held(Generic[SessionT]):
    """A session of the engine, its last round and the tree proposed in it."""

    session: SessionT
    round: int = 0
    proposed: TokenTree = field(default_factory=TokenTree)
    constrained: "Constrained | None" = None
    """The grammar of the reply, for tokens that must follow the engine's; None: there is none, or
    the engine draws its proposals."""
    origins: tuple[int, ...] = ()
    """For each proposed node its place in the engine's proposal, -1 if it is not in it."""
    chain: "Chain | None" = None  # the stored blocks of its rows; None: they are not stored


class DraftWorker(Generic[SessionT]):
    """Carries out Open, Draft, Drafts and Close for any number of sessions, one command at a
    time."""

    def __init__(
        self,
        engine: Engine[SessionT],
        identity: Identity,
        spans: Spans,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`spans` and `clock`: those of the engine."""
        self.engine, self.spans, self._identity, self._clock = engine, spans, identity, clock
        self._keeper = engine if identity.kept_tokens and isinstance(engine, Keeper) else None
        self._held: dict[int, _Held[SessionT]] = {}
        self.kept: KeptSessions[Left] = KeptSessions(identity.kept_tokens, identity.kept_extra)
        self._to_learn = False
        self._epoch = 0
        self.stale = 0

    @property
    def sessions(self) -> int:
        return len(self._held)

    @property
    def has_vocabulary(self) -> bool:
        """Whether the draft has its own vocabulary."""
        return self._identity.vocabulary is not None

    def session(self, number: int) -> SessionT:
        """Return the engine's session of that number; raise `RequestError` if it is not open."""
        return find_session(self._held, number).session

    def hello(self, epoch: int) -> Hello:
        """Return the registration; from now on events carry `epoch`."""
        self._epoch = epoch
        engine, its = self.engine, self._identity
        return Hello(
            epoch=epoch,
            roles=("draft",),
            name=its.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=its.model,
            device=its.device,
            weights=its.weights,
            threads=its.threads,
            limits=Limits(
                context=its.context,
                sessions=MAX_OPEN,
                kept=its.kept_tokens,
                prompt_rows=engine.prompt_rows,
                together=its.together,
                levels=engine.levels,
                shares=self._keeper is not None and self._keeper.shares,
            ),
            vocabulary=its.vocabulary,
            table=None if its.table is None else Array.of(its.table.packed),
            reads=engine.reads,
            grammars="" if engine.vocabulary is None else grammar_engine(),
            looks_up=engine.looks_up,
            cores=tuple(sorted(os.sched_getaffinity(0))) if its.device == "cpu" else (),
            curves=tuple(its.curves),
            blocks=b"" if its.blocks is None else its.blocks.begin(epoch),
        )

    def news(self) -> Iterable[Event]:
        """Return the reports about stored blocks that the coordinator lacks."""
        blocks = self._identity.blocks
        return () if blocks is None else blocks.news()

    def handle(self, command: Command) -> Iterable[Event]:
        """Carry out a command and return its answers; none if it is stale. Raises `RequestError`,
        changing nothing, if the command cannot be carried out."""
        try:
            match command:
                case Open():
                    return [self._open(command)]
                case Read():
                    return [self._read(command.item)]
                case Feed():
                    return [self._feed(command)]
                case Draft():
                    return [self._draft(command)]
                case Drafts():
                    return self._drafts(command)
                case Close():
                    self._close(command.session, keep=command.keep)
                    return [Closed(epoch=self._epoch, session=command.session)]
                case _:
                    raise RequestError("role", f"a draft worker does not take {command.type!r}")
        except StaleError:
            self.stale += 1
            return []

    def idle(self) -> bool:
        """Take a step of background work. In order: work that any proposal needs, a step of
        learning from verdicts, growing trees ahead in turn, and more learning."""
        began_ns = self._clock()
        grown: Sequence[int] = ()
        worked = self._get_ready() or bool(grown := self._grow_ahead()) or self.engine.learn()
        if worked and not grown:
            self.spans.add_beside("prepare", began_ns, self._clock())
        elif grown:
            number = grown[0] if len(grown) == 1 else None
            about = {} if number is None else {"session": number, "round": self._held[number].round}
            self.spans.add_beside("grow", began_ns, self._clock(), **about)
        blocks = self._identity.blocks
        return worked or (not self._held and blocks is not None and blocks.idle())

    def _get_ready(self) -> bool:
        """Precompute what any proposal needs, or take a step of learning; return False if there is
        neither."""
        if any(self.engine.prepare(held.session) for held in self._held.values()):
            return True
        to_learn, self._to_learn = self._to_learn, False
        return to_learn and self.engine.learn()

    def let_go(self) -> None:
        """Free the kept sessions; sessions that would have reused them start from scratch."""
        self.kept.clear()
        if (blocks := self._identity.blocks) is not None:
            blocks.let_go()

    def let_graphs_go(self) -> bool:
        """Return False: graphs are held by the arenas of the engine's caches."""
        return False

    def suspend(self) -> KeptSessions[Left]:
        held, self._held = self._held, {}
        for number, one in held.items():
            if self._keeper is not None:
                self.kept.hold(number, self._keeper.keep(one.session))
        return self.kept

    def _grow_ahead(self) -> Sequence[int]:
        """Make a pass ahead for the next sessions in turn, and return their numbers; empty if no
        session has anything to grow."""
        numbers = [*self._held]
        places = self.engine.grow_all_ahead([held.session for held in self._held.values()])
        grown = [numbers[place] for place in places]
        for number in numbers[: places[-1] + 1] if places else ():
            self._held[number] = self._held.pop(number)  # to the end of the queue
        return grown

    def _open(self, command: Open) -> Opened | Reading:
        number = command.session
        if number in self._held or number in self.kept:
            raise StaleError(f"session {number} has been opened already")
        if len(self._held) >= MAX_OPEN:
            text = f"{MAX_OPEN} sessions are open, the most that this worker holds; close one"
            raise RequestError("capacity", text)
        self.engine.check_tokens(command.prompt)
        session = self.engine.open(command, self._base(command))
        if not session.readable:
            print(
                f"{self._identity.name}: a prompt of {len(command.prompt)} tokens exceeds the "
                f"draft's context of {self._identity.context}: "
                "nothing is drafted for it",
                file=sys.stderr,
            )
        self._held[number] = held = _Held(session, command.round)
        if (blocks := self._identity.blocks) is not None and command.scope:
            held.chain = blocks.chain(command.scope)
        self._store(held)
        if command.constraint is not None and not command.sampling.rejects:
            held.constrained = self.engine.constrained(command)
            if held.constrained is not None and command.replied:
                held.constrained.extend(command.prompt[-command.replied :])
        return self._opened(command, session)

    def _base(self, command: Open) -> Left | None:
        """Return the rows that a session starts from, if any."""
        blocks = self._identity.blocks
        if blocks is None or self._keeper is None or command.base is not None or not command.kept:
            return self.kept.base(command, self._open_base(command.base))
        cache, _ = blocks.restore(command)
        return self._keeper.restored(list(command.prompt[: command.kept]), cache)

    def _store(self, held: _Held[SessionT]) -> None:
        """Store the blocks of a session's rows that are not stored yet, if they are to be."""
        if held.chain is not None and self._keeper is not None:
            left = self._keeper.left(held.session)
            held.chain.extend(left.log, left.cache, left.whole)

    def _open_base(self, number: int | None) -> Left | None:
        """Return the log and rows of an open session."""
        held = self._held.get(number or 0)
        return None if held is None or self._keeper is None else self._keeper.left(held.session)

    def _opened(self, about: Open | ReadItem, session: SessionT) -> Opened | Reading:
        """Return Opened if the whole prompt has been prefilled, else Reading."""
        told: dict[str, Any] = {
            "epoch": self._epoch,
            "session": about.session,
            "round": about.round,
            "spans": self.spans.take(MAX_SPANS),
        }
        done, left = self.engine.rows(session) if self.engine.prompt_rows else (0, 0)
        return Reading(**told, done=done) if left else Opened(**told)

    def _read(self, item: ReadItem) -> Opened | Reading:
        held = find_session(self._held, item.session)
        if not self.engine.prompt_rows:
            raise RequestError("role", "this draft reads prompts whole: send Open without `read`")
        done, left = self.engine.rows(held.session)
        if item.round != held.round:
            raise StaleError(f"session {item.session} was opened again")
        check_chunk(item, done)
        if not left:
            raise RequestError("prefix", f"session {item.session}: all {done} rows have been read")
        self.engine.read(held.session, item.rows)
        self._store(held)
        return self._opened(item, held.session)

    def _close(self, number: int, *, keep: bool) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self._store(held)
        if not keep:
            self.kept.drop(number)
        elif held and self._keeper and self.kept.takes(len(held.session.log)):
            self.kept.add(number, self._keeper.keep(held.session))

    def _feed(self, command: Feed) -> Fed:
        held = find_session(self._held, command.session)
        try:
            self.engine.feed(held.session, command.start, command.features)
        except (RequestError, StaleError):
            raise
        except BaseException:  # some rows may have been computed
            del self._held[command.session]
            raise
        self._store(held)
        return Fed(
            epoch=self._epoch,
            session=command.session,
            round=command.round,
            start=command.start,
            spans=self.spans.take(MAX_SPANS),
        )

    def _draft(self, command: Draft) -> Drafted:
        self._check(find_session(self._held, command.session), command)
        for _, outcome in self._outcomes([command]):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        raise RuntimeError(f"session {command.session}: the order was not answered")

    def _drafts(self, command: Drafts) -> Iterator[Event]:
        """Carry out valid orders in shared passes; invalid ones are answered with Failed and do not
        affect the others."""
        sound: dict[int, Draft] = {}
        for order in command.split():
            try:
                self._check(find_session(self._held, order.session), order)
                if order.session in sound:
                    raise StaleError(f"session {order.session} occurs twice in a command")
            except StaleError:
                self.stale += 1
            except RequestError as error:
                yield failed(self._epoch, error, order.session, order.round)
            else:
                sound[order.session] = order
        for order, outcome in self._outcomes([*sound.values()]):
            if isinstance(outcome, Exception):
                failure = as_request_error(outcome)
                yield failed(self._epoch, failure, order.session, order.round)
            else:
                yield outcome

    def _outcomes(self, commands: Sequence[Draft]) -> Iterator[tuple[Draft, Drafted | Exception]]:
        """Yield each order with its answer, or with the exception that it failed with, as soon as
        it is done. A session whose order failed is dropped: its log may have moved and its cache
        not."""
        start = self._clock()
        left = {command.session: command for command in commands}
        try:
            orders = []
            for command in commands:
                try:
                    orders.append((command, self._order(command, start)))
                except Exception as error:
                    del left[command.session], self._held[command.session]
                    yield command, error
            for place, outcome in self.engine.draft_all([order for _, order in orders]):
                command = orders[place][0]
                del left[command.session]
                if isinstance(outcome, Exception):
                    del self._held[command.session]
                    yield command, outcome
                else:
                    yield command, self._drafted(command, outcome, start)
        finally:
            for session in left:
                self._held.pop(session, None)

    def _order(self, command: Draft, start_ns: int) -> Order[SessionT]:
        """Return the order for the engine, after taking the features that came with it."""
        held, deadline_ms = self._held[command.session], command.deadline_ms
        session, accepted = held.session, command.accepted
        bonus, more = command.bonus, tuple(command.more)
        if held.constrained is not None:
            committed = [*(held.proposed.tokens[node] for node in accepted), bonus, *more]
            held.constrained.extend(committed)
            accepted = tuple(one for node in accepted if (one := held.origins[node]) >= 0)
            bonus, *rest = committed[len(accepted) :]
            more = tuple(rest)
        if command.features is not None:
            self.engine.take_features(session, command.features)
        return Order(
            session,
            accepted,
            bonus,
            Shape(command.max_nodes, command.max_depth, command.max_width),
            None if deadline_ms is None else start_ns + int(deadline_ms * 1e6),
            more,
            Price(command.rate, command.floor),
            command.ahead,
            in_texts(command.recalled),
        )

    def _check(self, held: _Held[SessionT], command: Draft) -> None:
        committed = len(command.accepted) + len(command.more)  # and the bonus
        length, left_out = len(held.session.log) + committed + 1, len(command.more)
        check_round(
            command.session,
            last=held.round,
            round=command.round,
            length=length,
            prefix=command.prefix,
            left_out=left_out,
        )
        if not held.proposed.is_path(command.accepted):
            text = f"nodes {command.accepted} are not a path of the proposal of round {held.round}"
            raise RequestError("prefix", f"session {command.session}: {text}")
        self.engine.check_tokens([command.bonus, *command.more])
        for _, *tokens in filter(None, command.recalled):
            self.engine.check_tokens([command.bonus, *tokens])
        self.engine.check_features(held.session, committed, command.features)

    def _drafted(self, command: Draft, proposal: Proposal, start_ns: int) -> Drafted:
        held, self._to_learn = self._held[command.session], True
        if held.constrained is not None:
            proposal, held.origins = held.constrained.completed(proposal, command.max_nodes)
        held.round, held.proposed = command.round, proposal.tree
        self.spans.add("draft", start_ns, self._clock())
        return Drafted(
            epoch=self._epoch,
            session=command.session,
            round=command.round,
            tokens=proposal.tree.tokens,
            parents=proposal.tree.parents,
            scores=proposal.scores,
            grown=proposal.grown,
            hit=proposal.hit,
            ahead=proposal.ahead,
            wasted=proposal.wasted,
            passes=proposal.passes,
            entropy=proposal.entropy,
            candidates=proposal.candidates,
            probabilities=proposal.probabilities,
            spans=self.spans.take(MAX_SPANS),
            beside=self.spans.take_beside(MAX_SPANS),
        )
