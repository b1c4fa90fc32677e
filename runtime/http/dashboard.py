"""The dashboard: one page at `/`, and the state that it and `dovetail top` poll over HTTP. The
coordinator is queried only on such a poll, and at most twice a second however many pages are open.
The page is plain static files without secrets; it asks the user for the key. Its headers forbid
content from elsewhere, inline scripts and MIME sniffing.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.gateway import Gateway
from dovetail.runtime.telemetry.live_stats import LiveStats
from dovetail.runtime.telemetry.picture import label

Shown = Literal["full", "anonymous", "off"]

EVERY_S = 1.0  # seconds between two requests of a page
FRESH_S = 0.5  # seconds for which an answer is cached
MOST_LOOKS = 8  # the most messages read for one update; the next request reads the rest
STATE_PATH = "/dashboard/state"
FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def page_files() -> dict[str, tuple[str, bytes]]:
    """Return path -> (content type, content) of all files of the page."""
    found = {
        path.name: (TYPES[path.suffix], path.read_bytes())
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }
    return {
        "/" if name == "index.html" else f"/dashboard/{name}": file for name, file in found.items()
    }


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
    ) -> None:
        """`name`: the served name of a target; `called` returns the name of a worker's model;
        `about`: facts about this server."""
        self._gateway, self._shown, self._name, self._about = gateway, shown, name, about
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
            **seen,
        }
        return json.dumps(told, separators=(",", ":")).encode()

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


def add_dashboard(app: FastAPI, watch: Watch) -> None:
    """Add the routes of the page and of its state, which are not part of the API."""
    for path, (kind, content) in page_files().items():
        about = {"content-type": kind, "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(
            _serve(content, about)
        )

    @app.get(STATE_PATH, include_in_schema=False)
    async def state(session: Annotated[int | None, Query(ge=0, lt=1 << 63)] = None) -> Response:
        """Return the state of the page, with this session's tree or the newest one's."""
        return Response(
            await watch.picture(session),
            headers={**HEADERS, "content-type": "application/json", "cache-control": "no-store"},
        )


def _serve(content: bytes, about: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that serves a file, or 304 if it has not changed."""
    headers = {**HEADERS, **about, "cache-control": "no-cache"}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == about["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return serve
