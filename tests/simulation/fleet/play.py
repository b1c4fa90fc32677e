"""Plays a load on a fleet: a router, coordinators with their queues, servers, failures.

A router chooses a coordinator by the real function, a coordinator places the request where rounds
with it are shortest, as the real one does, or has it wait in the real fair queue. What fails comes
back after a while; its sessions go on elsewhere, where their logs are read again.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from statistics import fmean

import numpy as np

from dovetail.runtime.fleet.queue import FairQueue
from dovetail.runtime.router.choice import (
    USUAL_TOKENS,
    Replica,
    ReplicaLoad,
    Wanted,
    agree_on_rates,
    choose,
)
from simulation.fleet.arrivals import Requests
from simulation.fleet.layout import Group, Kind, Plan, Played, Router, handled_s
from simulation.fleet.server import NEVER, Server, Session

NS = 1_000_000_000
HOUR_S = 3600.0


class Fleet:
    """A fleet at work; `play` is all that one does with it."""

    STEP, FAIL, REPAIR, PAUSE, RESUME, GPU, GPU_BACK, NODE = range(8)  # kinds of events

    def __init__(self, kinds: Sequence[Kind], plan: Plan) -> None:
        self._kinds, self._plan = kinds, plan
        self._random = np.random.default_rng(plan.seed)
        self._events: list[tuple[float, int, int, int, int]] = []
        """(when, order, what, index, version): a heap."""
        self._order = count()
        self._servers = self._laid_out()
        size = plan.per_coordinator
        self._groups: list[Group] = []
        self._routers: list[Router] = []
        for first in range(0, len(self._servers), size):
            if len(self._groups) % plan.per_router == 0:
                self._routers.append(Router())
            self._add_group(self._servers[first : first + size], self._routers[-1])
        for router in self._routers:
            agree_on_rates(router.replicas)
        self._missing: list[Session] = []  # sessions for which no coordinator is there
        self._done: list[tuple[Session, float]] = []
        self._marks: list[float] = []
        self._counted: list[list[list[float]]] = []
        """By mark, the seconds and tokens of each kind until then."""
        self._refused, self._taken, self._now_s = 0, 0, 0.0
        self.failures = dict.fromkeys(("worker", "node", "gpu", "coordinator"), 0)

    def _laid_out(self) -> list[Server]:
        """Return all servers, kinds mixed, so that coordinators have some of each."""
        order = np.repeat(np.arange(len(self._kinds)), [kind.count for kind in self._kinds])
        if len(self._kinds) > 1:
            self._random.shuffle(order)
        size = self._plan.per_coordinator
        servers = [
            Server(index, int(kind), index // size, self._kinds[int(kind)].profile)
            for index, kind in enumerate(order)
        ]
        for number, kind in enumerate(self._kinds):
            own = [server for server in servers if server.kind == number]
            for first in range(0, len(own), kind.per_node):
                node = own[first : first + kind.per_node]
                for server in node:
                    server.node = node
        return servers

    def _add_group(self, servers: list[Server], router: Router) -> None:
        room = sum(server.profile.most for server in servers)
        profiles = [server.profile for server in servers]
        alone_s = fmean(profile.token_s(1) for profile in profiles)
        full_s = fmean(profile.token_s(profile.most) for profile in profiles)
        load = ReplicaLoad(
            seconds_per_token=alone_s,
            further_seconds_per_token=(full_s - alone_s) / max(1, room - 1),
            reading_seconds_per_token=fmean(profile.read_s for profile in profiles),
            targets=len(servers),
        )
        replica = Replica(str(len(self._groups)), ready=True, load=load)
        queue = FairQueue[Session](self._plan.queue, self._plan.key_queue)
        group = Group(servers, queue, room, router, replica)
        router.replicas.append(replica)
        router.groups[replica.url] = group
        self._groups.append(group)

    def play(self, requests: Requests, window: tuple[float, float]) -> Played:
        """Return what becomes of the requests, all of which are carried to their end; work is
        counted within the `window` of seconds."""
        self._marks = [*window]
        decided, busy = self._routed(requests)
        self._draw_failures(float(decided[-1]) if len(decided) else 0.0)
        rows = zip(
            *(a.tolist() for a in (requests.prompts, requests.replies, requests.keys)), strict=True
        )
        begun = decided + self._plan.begin_s
        waiting = zip(begun.tolist(), requests.at_s.tolist(), rows, strict=True)
        left, number = next(waiting, None), 0
        while left is not None or self._open:
            when_s = min(left[0] if left else NEVER, self._events[0][0] if self._events else NEVER)
            while self._marks and self._marks[0] <= when_s:
                self._count(self._marks.pop(0))
            if left is not None and (not self._events or left[0] <= self._events[0][0]):
                self._now_s, asked_s, (prompt, reply, key) = left
                self._place(Session(number, prompt, reply, key, asked_s))
                left, number = next(waiting, None), number + 1
            else:
                self._next_event()
        for mark_s in self._marks:
            self._count(mark_s)
        return self._told(busy, window)

    def _count(self, now_s: float) -> None:
        """Note what each kind has done until now."""
        counted = [[0.0, 0.0] for _ in self._kinds]
        for server in self._servers:
            server.advance(now_s)
            counted[server.kind][0] += server.busy_s
            counted[server.kind][1] += server.tokens
        self._counted.append(counted)

    @property
    def _open(self) -> bool:
        return len(self._done) + self._refused < self._taken

    def _routed(self, requests: Requests) -> tuple[np.ndarray, float]:
        """Return when the router, which decides one after the other, has decided each request, and
        the share of its time that this takes."""
        self._taken = len(requests)
        if not len(requests):
            return requests.at_s, 0.0
        each_s = self._plan.request_s / len(self._routers)
        slack = requests.at_s - each_s * np.arange(len(requests))
        decided = np.maximum.accumulate(slack) + each_s * np.arange(1, len(requests) + 1)
        lasts_s = max(float(decided[-1]), each_s)
        return decided, each_s * len(requests) / lasts_s if each_s else 0.0

    # -- placing -----------------------------------------------------------------------------------

    def _place(self, session: Session) -> None:
        """Route a request to a coordinator, or to another one if that has no place in its queue."""
        router = self._routers[session.number % len(self._routers)]
        prompt, reply = self._plan.tokens
        wanted = Wanted((), session.prompt or prompt, min(reply, float(USUAL_TOKENS)))
        left, tried = router.replicas, False
        while (replica := choose(left, wanted, self._now_s)) is not None:
            if self._take(router.groups[replica.url], session):
                return
            left, tried = [other for other in left if other is not replica], True
        if tried:
            self._refused += 1
        else:
            self._missing.append(session)

    def _take(self, group: Group, session: Session) -> bool:
        """Begin a request or have it wait; False: the queue is full."""
        key = str(session.key)
        idle = not len(group.queue) or session.moves
        if idle and (server := self._best(group)) is not None:
            self._begin(group, server, session)
            return True
        if group.queue.full(key) and not session.moves:
            return False
        group.replica.in_flight += 1
        group.queue.add(key, session, self._now_ns)
        self._drain(group)
        return True

    def _best(self, group: Group) -> Server | None:
        """Return the server where rounds with a session more are shortest; None: all are full."""
        if group.sessions >= group.room:
            return None
        free = [s for s in group.servers if s.up and s.sessions < s.profile.most]
        return min(free, key=lambda server: server.next_round_s, default=None)

    def _begin(self, group: Group, server: Server, session: Session) -> None:
        key = str(session.key)
        group.queue.given(key, session.tokens, self._now_ns)
        group.held[key] = group.held.get(key, 0) + session.tokens
        group.sessions += 1
        group.replica.in_flight += 1
        server.advance(self._now_s)
        server.begin(session, self._now_s)
        self._settle(group, server)

    def _drain(self, group: Group) -> None:
        """Begin those who wait, the next by the fair queue first, while there is room."""
        while len(group.queue) and group.sessions < group.room:
            session = group.queue.take(
                lambda _: self._best(group) is not None, group.held, self._now_ns
            )
            if session is None or (server := self._best(group)) is None:
                break
            group.replica.in_flight -= 1
            self._begin(group, server, session)
        group.tell()

    # -- events ------------------------------------------------------------------------------------

    def _next_event(self) -> None:
        self._now_s, _, what, index, version = heappop(self._events)
        if what == self.STEP:
            server = self._servers[index]
            if server.version == version:
                self._step(server)
        elif what in (self.PAUSE, self.RESUME):
            self._pause(self._groups[index], what == self.PAUSE)
        elif what == self.NODE:
            self._lose_node(index)
        else:
            self._change(self._servers[index], what)

    def _step(self, server: Server) -> None:
        group = self._groups[server.group]
        server.advance(self._now_s)
        self._settle(group, server)
        self._drain(group)

    def _leave(self, group: Group, session: Session) -> None:
        group.sessions -= 1
        group.replica.in_flight -= 1
        group.held[str(session.key)] -= session.tokens

    def _settle(self, group: Group, server: Server) -> None:
        """End the step of a server if it is over and plan the next one; note how many sessions the
        coordinator has to handle, and when the server will be heard of next."""
        ended = not server.passes
        for session in server.finish() if ended else ():
            self._leave(group, session)
            self._done.append((session, self._now_s))
        more = len(server.decoding) - server.handled
        server.handled += more
        group.decoding += more
        group.router.decoding += more
        if ended and server.sessions:
            server.plan()
            server.pass_s *= self._slowness(group, server)
        server.version += 1
        if (when_s := server.ends_s) < NEVER:
            self._plan_event(when_s, self.STEP, server.index, server.version)

    def _slowness(self, group: Group, server: Server) -> float:
        """Return the factor by which its coordinator and its router lengthen the passes of a
        server."""
        if not server.handled:
            return 1.0
        host_s, chunk_s = server.profile.host_s, self._plan.chunk_s
        pass_s, router = server.pass_s, group.router
        beside_s = max(0.0, pass_s - host_s)
        hosted_s = handled_s(host_s, beside_s, group.decoding)
        passed_s = handled_s(chunk_s, pass_s, router.decoding)
        slow = (beside_s + hosted_s + max(0.0, passed_s - chunk_s)) / pass_s
        group.most_busy = max(group.most_busy, group.decoding * host_s / (pass_s * slow))
        router.most_busy = max(router.most_busy, router.decoding * chunk_s / (pass_s * slow))
        return slow

    def _plan_event(self, when_s: float, what: int, index: int, version: int = 0) -> None:
        heappush(self._events, (when_s, next(self._order), what, index, version))

    @property
    def _now_ns(self) -> int:
        return int(self._now_s * NS)

    # -- failures ----------------------------------------------------------------------------------

    def _draw_failures(self, seconds: float) -> None:
        """Draw what fails while requests come, and when."""
        draw = self._random.exponential
        for kind, what in enumerate(self._kinds):
            own = [server for server in self._servers if server.kind == kind]
            for hours, event in ((what.worker_h, self.FAIL), (what.gpu_h, self.GPU)):
                if hours:
                    for server, at_s in zip(own, draw(hours * HOUR_S, len(own)), strict=True):
                        self._within(seconds, float(at_s), event, server.index)
            if what.node_h:
                for first in own[:: what.per_node]:
                    self._within(seconds, float(draw(what.node_h * HOUR_S)), self.NODE, first.index)
        if self._plan.coordinator_h:
            times = draw(self._plan.coordinator_h * HOUR_S, len(self._groups))
            for index, at_s in enumerate(times):
                self._within(seconds, float(at_s), self.PAUSE, index)

    def _within(self, seconds: float, at_s: float, what: int, index: int) -> None:
        if at_s < seconds:
            self._plan_event(at_s, what, index)

    def _change(self, server: Server, what: int) -> None:
        """A worker is lost or there again, or its GPU is."""
        kind = self._kinds[server.kind]
        if what == self.FAIL:
            self.failures["worker"] += 1
            self._lose(server, kind.worker_back_s)
            return
        group = self._groups[server.group]
        server.advance(self._now_s)
        if what == self.REPAIR:
            server.up = True
        else:
            lost = what == self.GPU
            self.failures["gpu"] += lost
            server.profile = kind.alone if lost else kind.profile
            if lost:
                self._plan_event(self._now_s + kind.gpu_back_s, self.GPU_BACK, server.index)
        self._settle(group, server)
        self._drain(group)

    def _lose_node(self, first: int) -> None:
        """The servers of a kind that share a node are lost at once."""
        kind = self._kinds[self._servers[first].kind]
        self.failures["node"] += 1
        for server in self._servers[first].node:
            self._lose(server, kind.node_back_s)

    def _lose(self, server: Server, back_s: float) -> None:
        """A server is gone; its sessions go on elsewhere."""
        if not server.up:
            return
        group = self._groups[server.group]
        server.advance(self._now_s)
        gone = server.evict()
        server.up = False
        self._settle(group, server)
        self._plan_event(self._now_s + back_s, self.REPAIR, server.index)
        for session in gone:
            self._leave(group, session)
            self._place(session)

    def _pause(self, group: Group, lost: bool) -> None:
        """A coordinator is lost, and its sessions stand still until another one has read its
        journal; or that one is there."""
        self.failures["coordinator"] += lost
        group.replica.ready = not lost
        for server in group.servers:
            server.advance(self._now_s)
            server.paused = lost
            self._settle(group, server)
        if lost:
            index = group.servers[0].group
            self._plan_event(self._now_s + self._plan.coordinator_back_s, self.RESUME, index)
            return
        missing, self._missing = self._missing, []
        for session in missing:
            self._place(session)
        self._drain(group)

    def _told(self, router_busy: float, window: tuple[float, float]) -> Played:
        """Return what became of it."""
        before, after = self._counted
        busy_s, tokens = (
            [late[what] - early[what] for early, late in zip(before, after, strict=True)]
            for what in (0, 1)
        )
        return Played(
            self._done,
            self._refused,
            window[1] - window[0],
            busy_s,
            tokens,
            min(1.0, router_busy + max(router.most_busy for router in self._routers)),
            max(group.most_busy for group in self._groups),
            self.failures,
        )
