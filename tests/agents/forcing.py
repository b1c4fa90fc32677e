"""A proxy before a server that makes any model do an agent's task: it forces the call that the
agent's script has, with arguments chosen from a list, and after the first result a short answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from agents.catalogue import Call
from agents.dialects import DIALECTS, Body, Dialect, Schema, limited
from support.replying import QuietHandler, listening

REPLY_TOKENS = 200
CALL_TOKENS = 512
TIMEOUT_S = 900.0
PASSED_ON = ("content-type", "anthropic-version", "anthropic-beta", "x-api-key", "authorization")
CHOICES = ("apples", "pears", "plums")
"""What the model may write in place of the script's line."""


def narrowed(call: Call, parameters: Schema) -> Schema:
    """The parameters of a tool, so that each argument is the scripted one, or another word of
    `CHOICES` in it."""
    properties = {
        name: {
            **parameters["properties"][name],
            "enum": sorted({value.replace(CHOICES[0], word) for word in CHOICES}),
        }
        for name, value in call.arguments.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def forced(dialect: Dialect, body: Body, call: Call) -> Body:
    """A request whose reply is this call, or after a tool result a short answer."""
    tools = dialect.tools(body)
    if call.tool not in tools:
        return limited(dialect, body, REPLY_TOKENS)
    if dialect.results(body):
        return limited(dialect, dialect.force(body, call.tool, None), REPLY_TOKENS)
    parameters = narrowed(call, tools[call.tool])
    return limited(dialect, dialect.force(body, call.tool, parameters), CALL_TOKENS)


@contextmanager
def forcing(url: str, call: Call) -> Iterator[tuple[str, list[str]]]:
    """Its URL on loopback, and what went wrong: a line for each reply that was an error."""
    trouble: list[str] = []

    class Handler(QuietHandler):
        def do_HEAD(self) -> None:
            self._pass_on(b"")

        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            dialect = DIALECTS.get(self.path.partition("?")[0])
            if dialect is not None:
                body = json.dumps(forced(dialect, json.loads(body), call)).encode()
            self._pass_on(body)

        def _pass_on(self, body: bytes) -> None:
            headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
            with client.stream(self.command, self.path, content=body, headers=headers) as reply:
                if reply.status_code >= 400:
                    trouble.append(f"{self.path}: {reply.status_code} {reply.read().decode()}")
                self.send_response(reply.status_code)
                self.send_header("content-type", reply.headers.get("content-type", "text/plain"))
                self.end_headers()
                for part in reply.iter_bytes():
                    self.wfile.write(part)

    with (
        httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client,
        listening(Handler) as front,
    ):
        yield front, trouble
