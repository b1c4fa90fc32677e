"""Chooses which workers serve a session (those with the highest expected rate) and which rows of an
ended session each of them reuses.

The cost of a worker's passes with one more session is predicted from past passes or its profile. If
it is not known for all candidates, the one with the fewest sessions is chosen, which makes its cost
known. Sends nothing."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dovetail.protocol.messages import Submit
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.control.controller import Controller
from dovetail.runtime.control.learned import recall, record_of
from dovetail.runtime.control.pairs import Pair, share_cores, share_device
from dovetail.runtime.costs.passes import slowness
from dovetail.runtime.costs.rounds import PairCosts
from dovetail.runtime.engine.running import JOIN_WORTH, RunningRequest
from dovetail.runtime.engine.stored import StoredReply
from dovetail.runtime.fleet.beginnings import prompts_on_draft, prompts_on_target
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.prefix_cache import WORTH, bases
from dovetail.runtime.fleet.records import PairRecords
from dovetail.runtime.fleet.registry import Registry
from dovetail.runtime.session.draft_sync import DraftSync
from dovetail.runtime.session.request import TOKEN_BYTES, Base, Request, draft_scope
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.metrics import Accounts, Tally

NOISE = 1.25  # ratio of pass times up to which targets count as equally fast: noise is as large


def are_alike(targets: Sequence[Worker]) -> bool:
    """Return whether targets compute the same bytes, and have no profiles of their passes."""
    return len({str(target.hello.fingerprint) for target in targets}) == 1 and not any(
        target.verifying.profiled for target in targets
    )


def next_of(targets: Sequence[Worker], context: int) -> Worker:
    """Return the target with the shortest rounds for one more session; unmeasured ones win ties."""
    known = [target for target in targets if target.verifying.known]
    if not known:
        return min(targets, key=lambda target: target.sessions)
    first = known[0].verifying.curve(context, usual=True)
    row_s = known[0].verifying.at(1, context)

    def round_s(target: Worker) -> tuple[float, bool]:
        factor = slowness(target.verifying.curve(context, usual=True), first)
        if 1.0 / NOISE < factor < NOISE:
            factor = 1.0
        return factor * row_s * (target.sessions + 1) + target.hop_s, target.verifying.known

    return min(targets, key=round_s)


ROWS = 4.0  # rows of a session in a pass, if no pair has measured them

Peers = tuple[bytes, bytes]  # the addresses of a draft and a target


def candidates(workers: Iterable[Worker], role: str) -> list[Worker]:
    """Return the workers of a role that may get one more session."""
    return [
        worker
        for worker in workers
        if worker.plays(role) and worker.available and worker.sessions < worker.limits.sessions
    ]


def best(workers: Sequence[Worker], rates: Sequence[float]) -> Worker | None:
    """Prefer the best rate if all are known, else the fewest sessions, then an unmeasured one."""
    known = all(rates)
    ranked = [
        (-rate if known else 0.0, worker.sessions, rate > 0.0, place)
        for place, (worker, rate) in enumerate(zip(workers, rates, strict=True))
    ]
    return workers[min(ranked)[-1]] if ranked else None


def target_rate(target: Worker, pairs: Mapping[Peers, Pair], context: int) -> float:
    """Return rounds/s with one more session of the usual number of rows; 0: unknown."""
    if not target.verifying.known:
        return 0.0
    gammas = [
        pair.gamma.value
        for (_, peer), pair in pairs.items()
        if peer == target.peer and pair.gamma.known
    ]
    rows = 1.0 + sum(gammas) / len(gammas) if gammas else ROWS
    return 1.0 / (target.verifying.at(round(rows * (target.sessions + 1)), context) + target.hop_s)


def draft_rate(draft: Worker, target: Worker, pair: Pair | None, context: int) -> float:
    """Return tokens/s of one more session; 0: unknown. Unless passes are shared, drafting waits."""
    if pair is None or not (pair.rounds and pair.costs.exposed_s.known and target.verifying.known):
        return 0.0
    verify_s = target.verifying.at(round((1.0 + pair.gamma.value) * (target.sessions + 1)), context)
    pass_s = pair.costs.pass_s(1)
    longer = pair.costs.pass_s(draft.sessions + 1) / pass_s if pass_s else draft.sessions + 1
    draft_s = pair.costs.exposed_s.value * longer
    return pair.tokens.value / (verify_s + draft_s + draft.hop_s + target.hop_s)


REFEED_WORTH = 64
"""Like `JOIN_WORTH`, for a draft that reads its target, which then prefills the whole log again."""


class Placement:
    """Chooses among registered workers; stores the statistics of pairs."""

    def __init__(
        self,
        registry: Registry,
        epoch: int,
        running: Mapping[int, RunningRequest],
        *,
        reuse: bool,
        say: Callable[[str], None],
        sessions: int = 0,
        records: PairRecords | None = None,
    ) -> None:
        """`running`: sessions by number. `reuse`: they may reuse rows of others. `say`: called with
        decisions; `sessions`: the highest number so far; `records`: of earlier services."""
        self._records = records
        self._registry, self._epoch, self._reuse, self._say = registry, epoch, reuse, say
        self._running = running
        self._pairs: dict[Peers, Pair] = {}  # by the addresses of draft and target
        self._alone: dict[bytes, PairCosts] = {}
        """Costs of rounds of a target alone, by its address."""
        self._sessions = sessions

    # -- statistics --------------------------------------------------------------------------------

    def pair(self, draft: Worker | None, target: Worker) -> tuple[Pair | None, PairCosts]:
        """Return the statistics and costs of this pair, or of the target alone."""
        if draft is None:
            return None, self._alone.setdefault(target.peer, PairCosts(target.verifying))
        key = (draft.peer, target.peer)
        if key not in self._pairs:
            costs = PairCosts(
                target.verifying,
                draft.drafting,
                together=draft.limits.together,
                levels=draft.limits.levels,
            )
            self._pairs[key] = Pair(
                draft.name,
                target.name,
                costs,
                shared=share_device(draft.hello, target.hello),
                in_turns=share_cores(draft.hello, target.hello),
                reads=draft.hello.reads is not None,
                looks_up=draft.hello.looks_up,
            )
            record = self._records and self._records.find(draft.hello, target.hello)
            if record:
                recall(self._pairs[key], record)
        return self._pairs[key], self._pairs[key].costs

    def keep(self, *leaving: Worker) -> None:
        """Save what the pairs of registered workers, and of `leaving` ones, have learned."""
        if self._records is None:
            return
        workers = {**self._registry.workers, **{worker.peer: worker for worker in leaving}}
        for (draft, target), pair in self._pairs.items():
            if draft in workers and target in workers:
                hellos = workers[draft].hello, workers[target].hello
                self._records.keep(*hellos, record_of(pair))

    def forget(self, worker: Worker) -> None:
        """Forget a worker that leaves; save what its pairs have learned."""
        self.keep(worker)
        self._alone.pop(worker.peer, None)
        self._pairs = {
            peers: pair for peers, pair in self._pairs.items() if worker.peer not in peers
        }

    @property
    def pairs(self) -> Collection[Pair]:
        return self._pairs.values()

    # -- workers of a new session ------------------------------------------------------------------

    def target(
        self, wanted: Callable[[Worker], bool] = lambda _: True, *, context: int = 0
    ) -> Worker | None:
        """Return the accepted target with room that has the best predicted rate at this length."""
        targets = [
            target
            for target in candidates(self._registry.workers.values(), "target")
            if wanted(target)
        ]
        if targets and are_alike(targets):
            return next_of(targets, context)
        return best(targets, [target_rate(target, self._pairs, context) for target in targets])

    def reader(self) -> Worker | None:
        """Return the target by which requests are read: the one with the longest context."""
        targets = [
            worker
            for worker in self._registry.workers.values()
            if worker.plays("target") and worker.available
        ]
        longest = max((target.limits.context for target in targets), default=0)
        roomiest = [target for target in targets if target.limits.context == longest]
        return self.target(roomiest.__contains__) or next(iter(roomiest), None)

    def draft(
        self, target: Worker, wanted: Callable[[Worker], bool] = lambda _: True, *, context: int = 0
    ) -> Worker | None:
        """Return the accepted draft with room that has the best predicted rate on this target."""
        drafts = [
            draft
            for draft in candidates(self._registry.workers.values(), "draft")
            if self.goes_with(draft, target) and wanted(draft)
        ]
        return best(
            drafts,
            [
                draft_rate(draft, target, self._pairs.get((draft.peer, target.peer)), context)
                for draft in drafts
            ],
        )

    def goes_with(self, draft: Worker, target: Worker) -> bool:
        """Return whether a draft suits a target: a unified one serves only itself."""
        own = [
            other
            for other in self._registry.workers.values()
            if other.plays("target") and other.process == draft.process
        ]
        return not own or any(other.process == target.process for other in own)

    def settle(
        self, target: Worker, request: Request, has_room: Callable[[Worker], bool]
    ) -> Worker | None:
        """Return the target for a request that was tokenized for `target`: the best one with the
        same vocabulary and enough room; None if all are full and the request must wait. If `target`
        is lost and the request could never run on another, return `target`: the session then waits
        for its return."""
        able = [
            other
            for other in self._registry.workers.values()
            if other.plays("target")
            and other.available
            and other.reads_as(target)
            and other.obeys(request.constraint)
            and request.capacity <= other.limits.context
        ]
        best = self.target(
            lambda other: other in able and has_room(other), context=len(request.prompt)
        )
        if best is not None or target.peer not in self._registry.workers:
            return best if able else target
        full = target.sessions >= target.limits.sessions
        return None if full or not has_room(target) else target

    def house(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request,
        tally: Tally,
        now_ns: int,
        begun: StoredReply | None = None,
    ) -> RunningRequest:
        """Return a session for a request, on its target and on the best draft worker. `begun`: what
        an earlier coordinator has committed for it."""
        drafts = submit.speculate and bool(submit.tree.gamma) and submit.max_tokens > 0
        log = request.packed if begun is None else begun.log
        length = len(log) // TOKEN_BYTES
        draft = self.draft(target, context=length) if drafts else None
        reads = draft.hello.reads if draft is not None else None
        target_base = draft_base = None
        if self._reuse and request.may_reuse and draft is not target:
            shelf = draft.shelf if draft is not None else None
            target_base, draft_base = bases(
                log,
                target.shelf,
                shelf,
                scope=request.scope,
                reads=reads is not None,
                on_target=prompts_on_target(self._running, target, request.scope),
                on_draft=()
                if draft is None
                else prompts_on_draft(self._running, draft, request.scope),
                stored=(
                    lambda base: target.blocks.find(request.blocks, log, base),
                    lambda base: self._stored(draft, target, request, log, base),
                ),
            )
            if reads is not None and target_base is None and not request.tree.insist:
                target_base = self._beginning(target, request)
                draft = draft if target_base is None else None
        draft_sync = DraftSync(length, reads=reads, base=draft_base) if draft is not None else None
        accounts = Accounts(now_ns, tally)
        try:
            running = self._running_request(
                client, submit, target, draft, request, draft_sync, accounts, now_ns, begun
            )
        except BaseException:
            for worker, base in ((target, target_base), (draft, draft_base)):
                if worker is not None and base is not None:
                    worker.shelf.give_back(base)
            raise
        running.session.target_base, running.drafts = target_base, drafts
        return running

    def _stored(
        self, draft: Worker | None, target: Worker, request: Request, log: bytes, base: Base | None
    ) -> Base | None:
        """Return the rows that a draft has stored of a packed log, if more than of the base."""
        if draft is None:
            return base
        scope = request.blocks
        if draft.hello.reads is not None:
            scope = draft_scope(scope, str(target.hello.fingerprint))
        return draft.blocks.find(scope, log, base)

    def _beginning(self, target: Worker, request: Request) -> Base | None:
        """Return the target's shared rows for a session whose feature-reading draft lacks them; the
        draft joins later, if recomputing all features pays off."""
        running = prompts_on_target(self._running, target, request.scope)
        base = target.shelf.find(request.packed, scope=request.scope, running=running)
        return base if base is not None and base.shared else None

    def try_out(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        draft: Worker | None,
        request: Request,
        now_ns: int,
    ) -> RunningRequest:
        """Return an uncounted session on these workers."""
        draft_sync = (
            DraftSync(len(request.prompt), reads=draft.hello.reads) if draft is not None else None
        )
        return self._running_request(
            client, submit, target, draft, request, draft_sync, Accounts(now_ns), now_ns
        )

    def read_log(
        self, client: ClientPeer, target: Worker, request: Request, now_ns: int
    ) -> RunningRequest:
        """Return a session that only reads a prompt here, in preparation for a move."""
        submit = Submit(
            epoch=self._epoch,
            request=0,
            tokens=request.prompt[:1],
            max_tokens=0,
            sampling=Sampling(),
            tree=TreeSettings(),
        )
        running = self.try_out(client, submit, target, None, request, now_ns)
        base = self.begins_with(request.packed, request, target)
        if base is not None:
            target.shelf.pin(base)
        running.session.target_base = base
        return running

    def begins_with(self, log: bytes, request: Request, target: Worker) -> Base | None:
        """Return the rows that a target has of the packed `log` of a session elsewhere."""
        if not (self._reuse and request.may_reuse):
            return None
        running = prompts_on_target(self._running, target, request.scope)
        base = target.shelf.find(log, scope=request.scope, running=running)
        return target.blocks.find(request.blocks, log, base)

    def _running_request(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        draft: Worker | None,
        request: Request,
        draft_sync: DraftSync | None,
        accounts: Accounts,
        now_ns: int,
        begun: StoredReply | None = None,
    ) -> RunningRequest:
        self._sessions += 1
        done = {} if begun is None else begun.done()
        session = Session(
            number=self._sessions,
            epoch=self._epoch,
            request=request,
            detokenizer=target.spelling.detokenizer(request.prompt),
            accounts=accounts,
            fingerprint=str(target.hello.fingerprint),
            draft_sync=draft_sync,
            **done,
        )
        pair, costs = self.pair(draft, target)
        greedy, drawn = request.sampling.temperature == 0.0, request.sampling.rejects
        controller = Controller(
            self._sessions,
            tree=request.tree,
            pair=pair,
            costs=costs,
            greedy=greedy,
            ahead=submit.ahead,
            say=self._say,
            drawn=drawn,
        )
        return RunningRequest(
            session, client, submit.request, target, draft, now_ns, submit.trace, controller
        )

    # -- workers of a running session --------------------------------------------------------------

    def joining(self, running: RunningRequest) -> Worker | None:
        """Return a draft for a session without an available one, if that pays."""
        return self.draft(
            running.target,
            lambda draft: self._is_worth_joining(draft, running),
            context=running.session.length,
        )

    def _is_worth_joining(self, draft: Worker, running: RunningRequest) -> bool:
        """Return whether the tokens to come may pay for a draft's prefill; a draft that reads its
        target must also have paid off recently."""
        if draft.peer in running.shunned or draft is running.draft:
            return False
        if draft.hello.reads is None:
            return running.session.room >= JOIN_WORTH
        pair, _ = self.pair(draft, running.target)
        return (
            running.session.room >= REFEED_WORTH
            and pair is not None
            and running.controller.hopeful(pair)
        )

    def draft_base(self, running: RunningRequest, draft: Worker) -> Base | None:
        """Return a joining draft's pinned base; the draft reads all but the last token."""
        session = running.session
        if not (self._reuse and session.request.may_reuse) or draft is running.target:
            return None
        log = session.packed(session.length - 1)
        base = draft.shelf.find(
            log,
            scope=session.request.scope,
            known=int(draft.hello.reads is not None),
        )
        base = self._stored(draft, running.target, session.request, log, base)
        if base is not None:
            draft.shelf.pin(base)
        return base

    def target_base(self, running: RunningRequest, target: Worker) -> Base | None:
        """Return the base on a session's new target, or None; no features are needed."""
        session = running.session
        if running.draft is target:
            return None
        base = self.begins_with(session.packed(), session.request, target)
        if base is None or (tokens := min(base.tokens, session.shown_from)) < WORTH:
            return None
        target.shelf.pin(base)
        return replace(base, tokens=tokens)
