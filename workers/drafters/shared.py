"""The engine of a substitute: a low-bit copy of the target in the same process that reads the
target's own KV cache (SubSpec, section 4.1).

A session's cache is the target's: slots 0..n-2 hold the committed rows of a log of n tokens, as
computed by the target. Verification writes after them; the draft's rows - the root's, then those of
the tree's expanded nodes - come after all slots of verification, so neither overwrites the other.
When the root moves, the rows of accepted nodes are freed, since the target's rows have replaced
them, and those of the surviving subtree move together. Only the target prefills the prompt. States
of recurrent layers stay the target's, and the draft's rows have factors of their own.

The two models never run at the same time; `unified.py` ensures that."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.workers.drafters.model import Drafter, DraftLeft, DraftSession, Steps
from dovetail.workers.drafters.session import THE_ROOT
from dovetail.workers.drafters.side_by_side import Growth
from dovetail.workers.models.cache import SlotCache
from dovetail.workers.models.recurrent import LentStates
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.sessions.room import check_rows
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Order, Shape


@dataclass(frozen=True)
class Lent:
    """A session of the target that the draft uses."""

    log: Sequence[int]
    cache: Cache
    """The target's cache in the form for the substitute's layers, with all rows of the log
    committed except the last token's."""
    first: int  # the draft's first slot


Borrow = Callable[[int], Lent]
"""Returns the target's session of a number; raises `RequestError` if there is none."""


@dataclass(kw_only=True)
class SharedSession(DraftSession):
    number: int = -1  # the session's number at coordinator and target
    first: int = 0  # slot of the root's row; rows of the tree follow it
    own: int  # number of slots from there on
    rooted: bool = False  # True if the root has a row
    states: LentStates | None = None
    """The target's recurrent states, if any, and the factors of the draft's rows."""

    @property
    def rows(self) -> int:
        """The target computes the rows of the log, except the root's."""
        return len(self.log) - 1 + self.rooted

    @property
    def free_rows(self) -> int:
        return self.own - 1 - self.tree.rows_used

    @property
    def over(self) -> Cache:
        """The target's cache for the draft."""
        if self.states is None:
            return self.cache
        over = copy.copy(self.cache)
        assert isinstance(over, SlotCache)
        over.states = self.states
        return over

    @property
    def behind(self) -> bool:
        """True if the target's states include rows that the draft does not have yet."""
        return self.states is not None and self.states.length > len(self.log) - 1


class SharedDrafter(Drafter):
    """Drafts over the target's rows."""

    prompt_rows = 0
    borrow: Borrow

    def rows_beside(self, sampling: Sampling, tree: TreeSettings) -> int:
        """Return the slots that a session needs in addition to the target's: for the root and the
        tree."""
        return 1 + self._tree_rows(sampling, tree)

    def open(self, order: Open, base: DraftLeft | None = None) -> SharedSession:
        """Open a session; the target prefills the prompt, at the same time or later."""
        rows = self._tree_rows(order.sampling, order.tree)
        log = list(order.prompt)
        return SharedSession(
            log=log,
            tree=self._new_tree(),
            looked_up=self._look_up(order, log),
            ranking=self._ranking(order),
            policy=open_policy(order.tree),
            depth=order.tree.most_levels,
            capacity=order.capacity,
            cache=self.model.new_cache(0),
            rows_ahead=rows,
            room=min(order.capacity, self.model.context),
            own=1 + rows,
        )

    def _begin(self, place: int, order: Order[DraftSession]) -> Growth[DraftSession]:
        """Begin like `Drafter`, from the rows that the target has committed meanwhile. Raises
        `RequestError` if they are missing."""
        session = order.session
        assert isinstance(session, SharedSession)
        self._attach(session, [*session.log, *self._committed(order)])
        return super()._begin(place, order)

    def _may_grow_ahead(self, session: DraftSession) -> bool:
        """Return whether the target still has the session: otherwise its rows may belong to another
        one by now."""
        assert isinstance(session, SharedSession)
        return self._is_lent(session) and not session.behind

    def release(self, session: DraftSession) -> None:
        """Do nothing: the rows are the target's."""

    def _is_lent(self, session: SharedSession) -> bool:
        try:
            return self.borrow(session.number).cache is session.cache
        except RequestError:
            return False

    def _attach(self, session: SharedSession, log: Sequence[int]) -> None:
        """Switch to the target's current cache; nodes of the tree have their rows in the previous
        one."""
        lent = self.borrow(session.number)
        if lent.cache is not session.cache and session.tree.rows_used + session.rooted:
            raise RequestError(
                "session",
                f"session {session.number} was reopened by its target: reopen it here, too",
            )
        if [*lent.log[: len(log)]] != log or lent.cache.length < len(log) - 1:
            text = f"its target here has another log of {len(lent.log)} tokens; open it again"
            raise RequestError("prefix", f"session {session.number}: {text}")
        session.cache, session.first = lent.cache, lent.first
        session.states = self._states(session, lent)

    def _states(self, session: SharedSession, lent: Lent) -> LentStates | None:
        """Return the session's recurrent states; None if no layer has any."""
        if not isinstance(lent.cache, SlotCache) or (owner := lent.cache.states) is None:
            return None
        known = session.states
        if known is not None and known.owner is owner and known.first == lent.first:
            return known
        if owner.state.device.type == "cpu":  # another device reports out of memory itself
            check_rows(session.own, 0, 4 * sum(shape.row for shape in owner.shapes))
        return LentStates(owner, lent.first, session.own)

    def _move_root(
        self, session: DraftSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Move the root's row, if it has one, and those of the surviving subtree to the first of
        the draft's slots."""
        assert isinstance(session, SharedSession)
        if root is None:
            session.tree.clear()
            session.rooted = False
            return
        row = int(session.tree.rows[root])
        survivors = session.tree.move_root(root, width)
        session.rooted = row != NO_ROW
        if session.rooted:
            # all slots before the draft's count as committed
            own = copy.copy(session.over)
            own.length = session.first
            own.keep([session.first + 1 + old for old in (row, *survivors)], 0)

    def _read_log(self, session: DraftSession, shape: Shape) -> Steps:
        """Compute the root's row; logits [1, V]."""
        assert isinstance(session, SharedSession)
        position = len(session.log) - 1
        segment = Segment(session.over, session.first, 1, Paths.of(position, [[session.first]]))
        tokens = torch.tensor(session.log[-1:])
        positions = torch.tensor([position])
        logits = yield from self._ranked(session, THE_ROOT, tokens, positions, segment)
        session.rooted = True
        return logits

    def _read_nodes(self, session: DraftSession, nodes: Nodes, shape: Shape) -> Steps:
        """Compute nodes, as rows after those of the tree; each attends to the committed rows, the
        root, its ancestors and itself."""
        assert isinstance(session, SharedSession)
        tree, position, start = session.tree, len(session.log) - 1, session.first + 1
        used = tree.rows_used
        tree.give_rows(nodes)
        offsets, rows = tree.lineage(nodes)
        slots = np.insert(rows + np.int32(start), offsets[:-1], np.int32(session.first))
        paths = Paths(
            position, (offsets + np.arange(len(offsets))).astype(np.int32), slots.astype(np.int32)
        )
        tokens = torch.from_numpy(tree.tokens[nodes].astype(np.int64))
        positions = torch.from_numpy(position + tree.levels[nodes].astype(np.int64))
        segment = Segment(session.over, start + used, len(nodes), paths)
        return (yield from self._ranked(session, nodes, tokens, positions, segment))
