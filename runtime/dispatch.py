"""What workers are asked: commands wait for their turn, and several sessions' trees go into one pass.

Whose turn it is `scheduler.py` knows, what a pass costs `costs.py`, how many nodes pay `policies.py`, what of an ended session is kept `kept.py`.
"""

from collections.abc import Mapping, Sequence

from dovetail.protocol.messages import Close, Draft, Feed, Open, Verify, VerifyItem
from dovetail.runtime.live import Live
from dovetail.runtime.policies import cut
from dovetail.runtime.post import Post
from dovetail.runtime.registry import Registry, Worker
from dovetail.runtime.session import Ask


class Dispatch:
    """Asks the workers of sessions."""

    def __init__(self, post: Post, live: Mapping[int, Live], registry: Registry, *, reuse: bool) -> None:
        """`live`: the sessions by their numbers; `reuse`: whether workers keep what they have of ended ones."""
        self._post, self._live, self._registry, self._reuse = post, live, registry, reuse

    def ask(self, live: Live, asks: Sequence[Ask]) -> None:
        """Ask a session's workers, in their turn."""
        for ask in asks:
            self._ask(live, ask)

    def _ask(self, live: Live, ask: Ask) -> None:
        worker = live.target if ask.role == "target" else live.draft
        if worker is None or worker.peer not in self._registry.workers:
            return
        if isinstance(ask.command, Close):
            self._close(live, worker, ask.role, ask.command)
        else:
            worker.turns.ask(live.session.number, ask.command)
            self.next(worker)

    def _close(self, live: Live, worker: Worker, role: str, command: Close) -> None:
        """End a session on a worker, which keeps what it has of it if it can; then others may have to go."""
        idle = not worker.turns.busy_with(live.session.number)
        gone = None
        if command.keep and self._reuse and worker.limits.kept and live.draft is not live.target and not live.trial:
            gone = worker.shelf.add(live.session.kept(role, idle=idle))
        for session in gone or ():
            self._post.to_worker(worker, command.model_copy(update={"session": session, "keep": False}))
        self.forget(worker, command.model_copy(update={"keep": gone is not None}))

    def forget(self, worker: Worker, command: Close) -> None:
        """A session is over on a worker; what it was to go on from is there for others, if it did not even begin."""
        for dropped in worker.turns.forget(command.session):
            if isinstance(dropped, Open) and dropped.base is not None:
                worker.shelf.give_back(dropped.base)
        self._post.to_worker(worker, command)

    def next(self, worker: Worker) -> None:
        """Send a worker its next command, if it is there and free and one waits."""
        turn = worker.turns.next() if worker.peer in self._registry.workers else None
        if turn is None:
            return
        message, sessions = turn
        size, left_ns = self._post.to_worker(worker, message)
        if worker.peer not in self._registry.workers:
            return
        if isinstance(message, Open) and message.base is not None:
            worker.shelf.taken(message.base)
        if isinstance(message, Draft | Verify):
            worker.traffic.ordered(size)
        if isinstance(message, Verify):
            self._passing(worker, message)
        for number in sessions:
            live = self._live.get(number)
            if live is not None and isinstance(message, Feed):
                live.passed_on(size)
            elif live is not None and live.awaits(worker, message):
                live.left(left_ns, size // len(sessions))

    def cut(self, worker: Worker, items: Sequence[VerifyItem]) -> Sequence[int]:
        """How many nodes of each item of a pass are verified: whatever was offered, but where a session's policy leaves that to be decided."""
        counts = [len(item.tokens) for item in items]
        lives = [self._live[item.session] for item in items if item.session in self._live]
        if len(lives) < len(items):
            return counts
        choosing = [place for place, live in enumerate(lives) if live.pilot.cuts and counts[place]]
        context = sum(item.prefix for item in items) / len(items)
        rate = sum(live.pilot.rate(live.session.length) for live in lives)
        if not choosing or not worker.verifying.known or rate <= 0.0:
            return counts
        offers = [lives[place].session.scores for place in choosing]
        seconds = worker.verifying.table(len(items) + sum(counts), context).__getitem__
        fixed, most = sum(1 + count for place, count in enumerate(counts) if place not in choosing), worker.verifying.most_rows
        for place, kept in zip(choosing, cut(offers, rate=rate, seconds=seconds, fixed=fixed, most=most), strict=True):
            counts[place] = kept
        return counts

    def _passing(self, worker: Worker, pass_: Verify) -> None:
        """A pass begins: its sessions know what of theirs is in it, and what it is expected to take."""
        rows = sum(1 + len(item.tokens) for item in pass_.items)
        worker.passing = rows, sum(item.prefix for item in pass_.items) / len(pass_.items)
        for item in pass_.items:
            if (live := self._live.get(item.session)) is not None:
                live.session.sent(len(item.tokens))
                live.other_rows = rows - len(item.tokens)
                live.pilot.sends(item.prefix, live.session.scores, rows)
