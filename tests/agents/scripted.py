"""A server that answers agents by a script, and keeps their requests: it calls a tool that writes a
file, then one that reads it, then ends with a sentence."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agents.catalogue import Call
from agents.dialects import DIALECTS, Dialect, Turn, streamed
from support.replying import QuietHandler, listening

KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "user-agent")
THOUGHT = "The user wants a file."


def turn_of(dialect: Dialect, body: Mapping[str, Any], calls: tuple[Call, ...]) -> Turn:
    """The next reply: the call after those whose results the history has; a request without the
    tool, such as one for a title, gets a sentence."""
    done = dialect.results(dict(body))
    tools = dialect.tools(dict(body))
    if done >= len(calls) or calls[done].tool not in tools:
        return Turn(text="The file notes.txt has one line.", number=done + 1)
    call = calls[done]
    return Turn(
        thought=THOUGHT,
        tool=call.tool,
        arguments=call.arguments,
        call=f"call00{done + 1:03}",
        number=done + 1,
    )


@contextmanager
def scripted(calls: tuple[Call, ...]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL on loopback, and the requests so far."""
    requests: list[dict[str, Any]] = []

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(200, b"")

        def do_GET(self) -> None:
            requests.append({"method": "GET", "path": self.path})
            model = {"id": "dovetail", "object": "model", "created": 1, "owned_by": "dovetail"}
            self._answer(200, json.dumps({"object": "list", "data": [model]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {
                name.lower(): value
                for name, value in self.headers.items()
                if name.lower() in KEPT_HEADERS
            }
            requests.append({"method": "POST", "path": self.path, "headers": headers, "body": body})
            dialect = DIALECTS.get(self.path.partition("?")[0])
            if dialect is None:
                error = {"type": "not_found_error", "message": f"no route {self.path}"}
                self._answer(404, json.dumps({"type": "error", "error": error}).encode())
                return
            turn = turn_of(dialect, body, calls)
            self._answer(200, streamed(dialect, turn), "text/event-stream")

        def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with listening(Handler) as url:
        yield url, requests
