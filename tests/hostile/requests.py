"""Requests over HTTP that mean harm or nothing: values that cannot be, bodies that are none, paths
that lead elsewhere. Each is refused with 4xx, and why.

`Wrong.param` begins what the error names. After each of them the server answers as ever, and no
session is left.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostile.loaded import Tried
from support.scripted import VOCABULARY, continuation
from support.web import CHAT, Api

CHATS, TEXTS, MODELS, TOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
)
TALK: Mapping[str, Any] = {"messages": [{"role": "user", "content": "w5 w6"}]}
MOST_S = 2.0


@dataclass(frozen=True)
class Wrong:
    """A request that is refused."""

    name: str
    body: Any = None
    """Fields beside those of a good one, or bytes as they are."""
    path: str = CHATS
    status: int = 400
    param: str | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        good: Mapping[str, Any] = TALK if self.path == CHATS else {"prompt": "w5"}
        return json.dumps({**good, **(self.body or {})}).encode()


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


WRONG = (
    Wrong(
        "temperature NaN", b'{"messages": [{"role": "user", "content": "w5"}], "temperature": NaN}'
    ),
    Wrong(
        "temperature 1e999",
        b'{"messages": [{"role": "user", "content": "w5"}], "temperature": 1e999}',
        param="temperature",
    ),
    Wrong("temperature -1", {"temperature": -1}, param="temperature"),
    Wrong("top_p 0", {"top_p": 0}, param="top_p"),
    Wrong("n of 10^9", {"n": 10**9}, param="n"),
    Wrong("n of -1", {"n": -1}, param="n"),
    Wrong("max_tokens of 400 digits", {"max_tokens": 10**399}, param="max_tokens"),
    Wrong(
        "max_tokens of 5000 digits",
        b'{"messages": [{"role": "user", "content": "w5"}], "max_tokens": ' + b"9" * 5000 + b"}",
    ),
    Wrong("logprobs -1", {"logprobs": -1}, param="logprobs"),
    Wrong("top_logprobs of 10^6", {"logprobs": True, "top_logprobs": 10**6}, param="top_logprobs"),
    Wrong("a seed of 2^70", {"seed": 1 << 70}, param="seed"),
    Wrong("100,000 stop strings", {"stop": ["a"] * 100_000}, param="stop"),
    Wrong("a stop string of 1 MB", {"stop": "a" * 10**6}, param="stop"),
    Wrong("an empty stop string", {"stop": ["w5", ""]}, param="stop"),
    Wrong(
        "a lone surrogate in a stop string",
        b'{"messages": [{"role": "user", "content": "w5"}], "stop": "\\ud800"}',
        param="stop",
    ),
    Wrong(
        "a lone surrogate in the conversation",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        param="messages",
    ),
    Wrong("a lone surrogate in a prompt", b'{"prompt": "\\udfff w5"}', TEXTS, param="prompt"),
    Wrong(
        "100,000 biases",
        {"logit_bias": {str(token): 1 for token in range(100_000)}},
        param="logit_bias",
    ),
    Wrong("a bias of 10^308", {"logit_bias": {"5": 1e308}}, param="logit_bias"),
    Wrong(
        "a bias of a token that there is not",
        {"logit_bias": {str(VOCABULARY): 1}},
        param="logit_bias",
    ),
    Wrong("a bias of a path", {"logit_bias": {"../../etc/passwd": 1}}, param="logit_bias"),
    Wrong("a conversation of 1 MB", chat("w5 " * 300_000), param="messages"),
    Wrong(
        "100,000 turns", {"messages": [{"role": "user", "content": "w"}] * 50_000}, param="messages"
    ),
    Wrong("turns within turns", {"messages": [[[[]]]]}, param="messages[0]"),
    Wrong("a turn that is a number", {"messages": [5]}, param="messages[0]"),
    Wrong(
        "a role that there is not",
        {"messages": [{"role": "root", "content": "w5"}]},
        param="messages[0].role",
    ),
    Wrong(
        "an image of a file",
        chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
        param="messages[0].content[0].type",
    ),
    Wrong(
        "a chat template of its own", {"chat_template": "{{ ''.__class__ }}"}, param="chat_template"
    ),
    Wrong(
        "a tool",
        {"tools": [{"type": "function", "function": {"name": "os.system"}}]},
        param="tools",
    ),
    Wrong(
        "a JSON schema",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        param="response_format",
    ),
    Wrong("token ids below 0", {"prompt": [-1]}, TEXTS, param="prompt"),
    Wrong("token ids beyond the vocabulary", {"prompt": [VOCABULARY]}, TEXTS, param="prompt"),
    Wrong("a token id of 2^70", {"prompt": [1 << 70]}, TEXTS, param="prompt"),
    Wrong("a prompt of 100,000 token ids", {"prompt": [5] * 100_000}, TEXTS, param="prompt"),
    Wrong("a prompt of every type", {"prompt": ["w5", 5, None, [5]]}, TEXTS, param="prompt"),
    Wrong("no prompt", b"{}", TEXTS, param="prompt"),
    Wrong("a model that is a path", {"model": "../../etc/passwd"}, status=404, param="model"),
    Wrong(
        "a model with a line in it",
        {"model": 'demo"} 1\nforged_metric 1'},
        status=404,
        param="model",
    ),
    Wrong(
        "an option of our own of another type",
        {"dovetail": {"speculate": [[]]}},
        param="dovetail.speculate",
    ),
    Wrong("no body", b""),
    Wrong("a body that is no JSON", b"{"),
    Wrong("a body that is a list", b"[]"),
    Wrong("a body that is not UTF-8", b'{"prompt": "\xff"}', TEXTS),
    Wrong("a body nested 100,000 deep", b"[" * 100_000),
    Wrong("a field nested 10,000 deep", b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    Wrong("a body of 3 MiB", b" " * (3 << 20), status=413),
    Wrong(
        "a body of another type",
        b"messages=w5",
        headers={"content-type": "application/x-www-form-urlencoded"},
    ),
    Wrong(
        "a path out of the house", path="/v1/models/../../../etc/passwd", status=404, method="GET"
    ),
    Wrong(
        "the same, encoded",
        path="/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        status=404,
        method="GET",
    ),
    Wrong("a path that there is not", path="/admin", status=404),
    Wrong("a method that there is not", path=CHATS, status=405, method="DELETE"),
    Wrong("tokens of nothing", b"{}", TOKENIZE),
)


def try_request(server: Api, wrong: Wrong) -> Tried:
    """Passed: refused as it should be, at once, and the next one is answered as ever."""
    began_s = server.cpu_s()
    reply = server.client.request(
        wrong.method,
        wrong.path,
        content=wrong.content,
        headers={"content-type": "application/json", **wrong.headers},
    )
    seconds = server.cpu_s() - began_s
    error = (
        reply.json().get("error", {})
        if reply.headers["content-type"].startswith("application/json")
        else {}
    )
    refused = (
        reply.status_code == wrong.status
        and bool(error.get("message"))
        and str(error.get("param") or "").startswith(wrong.param or "")
    )
    well = server.chat(max_tokens=4)["usage"]["completion_tokens"] == len(continuation(CHAT, 4))
    got = (
        f"{reply.status_code} {error.get('param') or ''}: "
        f"{error.get('message') or reply.text[:200]}"
    )
    return Tried(
        "request",
        wrong.name,
        " ".join(got.split())[:300],
        seconds,
        0.0,
        refused and well and seconds < MOST_S,
    )
