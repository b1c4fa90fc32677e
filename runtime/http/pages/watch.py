"""The state that the dashboard and `dovetail top` poll over HTTP. The coordinator is queried at
most twice a second however many pages are open, and every few seconds while none is, so that the
history is complete.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.responses import Response

from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.exposition import KeyUse
from dovetail.runtime.http.gateway import Gateway
from dovetail.runtime.http.pages.site import HEADERS, POLICIES, policy
from dovetail.runtime.telemetry.live_stats import LiveStats
from dovetail.runtime.telemetry.picture import label

Shown = Literal["full", "anonymous", "off"]

EVERY_S = 1.0  # seconds between two requests of a page
FRESH_S = 0.5  # seconds for which an answer is cached
UNSEEN_S = 5.0  # seconds between two queries of the coordinator while no page is open
MOST_LOOKS = 8  # the most messages read for one update; the next request reads the rest
STATE_PATH = "/dashboard/state"


class Watch:
    """Queries the coordinator for all viewers."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        shown: Shown,
        name: Callable[[RequestTarget], str],
        called: Callable[[str], str],
        about: Mapping[str, Any],
        used: Mapping[str, KeyUse],
    ) -> None:
        """`name`: the served name of a target; `called` returns the name of a worker's model;
        `about`: facts about this server; `used`: the tokens of each API key."""
        self._gateway, self._shown, self._name, self._about = gateway, shown, name, about
        self._used = used
        self._called = called
        self._live_stats = LiveStats()
        self._heard_s = float("-inf")
        self._hearing = asyncio.Lock()

    async def picture(self, session: int | None) -> bytes:
        """Return the whole state as JSON; raise `ApiError` without a coordinator."""
        async with self._hearing:
            if asyncio.get_running_loop().time() - self._heard_s >= FRESH_S:
                await self._hear()
        target = await self._target()
        spell = None if target is None or self._shown != "full" else partial(_spelt, target)
        seen = self._live_stats.view(spell=spell, session=session, called=self._called)
        model = "" if target is None else self._name(target)
        told = {
            "server": self._about,
            "every_s": EVERY_S,
            "shown": self._shown,
            "model": model,
            "keys": [{"key": key, **vars(use)} for key, use in self._used.items()],
            **seen,
        }
        return json.dumps(told, separators=(",", ":")).encode()

    async def keep(self) -> None:
        """Query the coordinator while nobody else does, until cancelled."""
        while True:
            await asyncio.sleep(UNSEEN_S)
            async with self._hearing:
                if asyncio.get_running_loop().time() - self._heard_s >= UNSEEN_S / 2:
                    with suppress(ApiError):  # there is no coordinator now
                        await self._hear()

    async def _hear(self) -> None:
        for _ in range(MOST_LOOKS):
            if not self._live_stats.see(await self._gateway.look(self._live_stats.next)):
                break
        self._live_stats.hear(await self._gateway.status())
        self._heard_s = asyncio.get_running_loop().time()

    async def _target(self) -> RequestTarget | None:
        try:
            return await self._gateway.target()
        except ApiError:
            return None


def _spelt(target: RequestTarget, token: int) -> str:
    return label(target.text.piece(token))


def add_state(app: FastAPI, watch: Watch) -> None:
    """Add the route of the dashboard's state, which is not part of the API."""

    @app.get(STATE_PATH, include_in_schema=False)
    async def state(session: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None) -> Response:
        """Return the state of the page, with this session's tree or the newest one's."""
        return Response(
            await watch.picture(session),
            headers={
                **HEADERS,
                "content-security-policy": policy(POLICIES["dashboard"]),
                "content-type": "application/json",
                "cache-control": "no-store",
            },
        )
