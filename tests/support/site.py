"""An HTTP server in this process that answers what a test tells it to."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


class Script(HTTPServer):
    """Serves the model "tiny", and answers requests with these statuses and bytes in turn, and then
    with the last of them; keeps what it was asked."""

    def __init__(self, *replies: tuple[int, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = replies
        self.asked: list[tuple[str, str, Any]] = []
        self.kind = "application/json"  # the content type of its replies
        self.sampling: dict[str, Any] | None = None
        self.states: dict[str, str] = {}  # of several models, by name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        states = self.server.states.items()
        several: list[Any] = [{"id": name, "status": {"value": state}} for name, state in states]
        models = several or [{"id": "tiny", "sampling": self.server.sampling}]
        self._say(200, json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers.get("authorization", ""), body))
        replies = self.server.replies
        self._say(*replies[min(len(self.server.asked), len(replies)) - 1])

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", self.server.kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The test is quiet."""


@contextmanager
def scripted(status: int, body: bytes, *later: tuple[int, bytes]) -> Iterator[Script]:
    with Script((status, body), *later) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(text: str, tokens: Sequence[tuple[int, str, bool]] = (), **more: Any) -> bytes:
    told = {
        "tokens": [token for token, _, _ in tokens],
        "texts": [spelt for _, spelt, _ in tokens],
        "drafted": [flag for _, _, flag in tokens],
    }
    return event(
        {
            "choices": [
                {"index": 0, "delta": {"content": text}, "finish_reason": None, "dovetail": told}
            ],
            **more,
        }
    )
