"""The files of the pages, and the headers that they are served with. They are plain static files
without secrets; the pages ask the user for the API key. The headers forbid content from elsewhere,
inline scripts and MIME sniffing. The files in vendor/ are other projects' (`versions.toml`).
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response

Front = Literal["chat", "dashboard", "off"]

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PARTS = {"chat": ("chat", "shared", "vendor"), "dashboard": ("dashboard", "shared")}
"""Page -> the folders of its files."""
POLICIES = {"chat": "dompurify", "dashboard": "'none'"}
"""Page -> the only policy of Trusted Types that may make HTML of text: the sanitizer's."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True)
class File:
    """A file as it is served."""

    kind: str
    content: bytes
    policy: str
    """Its Content-Security-Policy."""

    @property
    def headers(self) -> dict[str, str]:
        digest = hashlib.sha256(self.content).hexdigest()[:16]
        return {
            **HEADERS,
            "content-security-policy": self.policy,
            "content-type": self.kind,
            "etag": f'"{digest}"',
            "cache-control": "no-cache",
        }


def policy(trusted: str) -> str:
    """Return the Content-Security-Policy of a page; `trusted`: its policy of Trusted Types."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
        "'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types {trusted}"
    )


def page_files(front: Front = "chat", *, dashboard: bool = True) -> dict[str, File]:
    """Return path -> file. `front`: the page at /; `dashboard`: it is at /dashboard."""
    shown = {"/": front} if front != "off" else {}
    shown |= {"/dashboard": "dashboard"} if dashboard else {}
    files: dict[str, File] = {}
    for path, page in shown.items():
        for folder in PARTS[page]:
            for file in sorted((FOLDER / folder).iterdir()):
                if (kind := TYPES.get(file.suffix)) is None:
                    continue
                name = path if file.suffix == ".html" else f"/pages/{folder}/{file.name}"
                files[name] = File(kind, file.read_bytes(), policy(POLICIES[page]))
    return files


def add_pages(app: FastAPI, files: Mapping[str, File]) -> None:
    """Add the routes of the pages' files, which are not part of the API."""
    for path, file in files.items():
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(_serve(file))


def _serve(file: File) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that serves a file, or 304 if it has not changed."""
    headers = file.headers

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers)

    return serve
