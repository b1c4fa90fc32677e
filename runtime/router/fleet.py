"""The replicas behind a router, with their reports twice a second."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from dovetail.runtime.router.choice import Replica, ReplicaLoad, agree_on_rates
from dovetail.runtime.router.upstream import Broken, Upstream

log = logging.getLogger("dovetail.router")

LOOK_EVERY_S = 0.5
ANSWER_S = 2.0  # seconds within which a replica must report
LOAD = TypeAdapter(ReplicaLoad)  # parses a replica's report, ignoring fields of later versions


class Fleet:
    """Replicas by their URLs."""

    def __init__(self, listed: Callable[[], Sequence[str]], upstream: Upstream) -> None:
        """`listed` returns the URLs of the replicas to use at present."""
        self._listed, self._upstream = listed, upstream
        self._all: dict[str, Replica] = {}

    @property
    def replicas(self) -> Sequence[Replica]:
        return [*self._all.values()]

    async def run(self) -> None:
        """Poll the replicas for ever."""
        while True:
            try:
                await self.look()
            except Exception:  # an internal error, which may not recur
                log.exception("the replicas could not be polled")
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Read a changed list and each replica's report; unlisted replicas only finish their
        requests."""
        urls = self._listed()
        for url in urls:
            if self._all.setdefault(url, Replica(url)).draining:
                self._all[url].draining = False
        for replica in self.replicas:
            replica.draining = replica.url not in urls
            if replica.draining and not replica.in_flight:
                del self._all[replica.url]
                self._upstream.close(replica.url)
                log.info("the replica %s was removed", replica.url)
        await asyncio.gather(*(self._ask(replica) for replica in self.replicas))
        agree_on_rates(self.replicas, time.monotonic())

    def lost(self, replica: Replica, why: str) -> None:
        """Do not use a replica until it answers again."""
        if replica.ready:
            log.warning("the replica %s gets no requests: %s", replica.url, why)
        replica.ready = False
        self._upstream.close(replica.url)

    async def _ask(self, replica: Replica) -> None:
        """Query a replica's state; its running requests include ours."""
        asked = replica.in_flight - replica.sent
        try:
            async with asyncio.timeout(ANSWER_S):
                status, content = await self._upstream.get(replica.url, b"/readyz")
            told = json.loads(content)
            load = LOAD.validate_python(told["load"]) if told["load"] else None
        except (Broken, TimeoutError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.lost(replica, str(error) or "it does not answer")
            return
        if load is not None:
            replica.told(replace(load, in_flight=asked + replica.sent), time.monotonic())
        if status == 200 and not replica.ready:
            log.info("the replica %s gets requests", replica.url)
        elif status != 200 and replica.ready:
            log.warning("the replica %s gets no requests: it is not ready", replica.url)
        replica.ready = status == 200
