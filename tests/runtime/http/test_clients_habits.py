"""HTTP as clients use it: upgrade offers, compressed bodies, HEAD, CORS, integers sent as floats,
paths of other servers, and streams that are silent while a prompt is read."""

import asyncio
import gzip
import json
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from dovetail.launch.files.deployment.containers import READY
from dovetail.protocol.messages import Emitted, Failed
from dovetail.protocol.settings import HttpSettings
from dovetail.runtime.http import service
from dovetail.runtime.http.decoding import Run
from dovetail.runtime.http.fields import DEEPEST
from dovetail.runtime.http.service import Answer
from dovetail.runtime.http.serving.guard import Refused, Unpacking
from support.patience import PATIENCE_S
from support.scripted import continuation
from support.web import Api, Backend, api, events

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "w5 w6"}]
BODY = json.dumps({"prompt": "w5 w6", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAEAABAA\r\n"
WHOLE = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n8\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    BODY[:8],
    len(BODY) - 8,
    BODY[8:],
)
ORIGIN = "https://chat.example"


def exchanged(server: Api, parts: list[bytes], replies: int) -> list[httpx.Response]:
    """Send each part in a segment of its own, and read this number of replies."""
    with socket.create_connection(server.address) as connection:
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = connection.makefile("rb")
        for part in parts:
            connection.sendall(part)
        read = []
        while len(read) < replies:
            status = int(reader.readline().split()[1])
            headers = dict(line.strip().split(b": ", 1) for line in iter(reader.readline, b"\r\n"))
            body = reader.read(int(headers.get(b"content-length", b"0")))
            read.append(httpx.Response(status, content=body))
        return read


# -- offers of another protocol --------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("framed", [WHOLE, CHUNKED], ids=["length", "chunks"])
def test_an_upgrade_offer_is_ignored_and_the_body_is_read(
    server: Api, protocol: bytes, framed: bytes
) -> None:
    request = HEAD + OFFER % protocol + framed
    get = b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + OFFER % protocol + b"\r\n"
    cut = len(request) - len(framed) // 2
    parts = [request[:100], request[100:cut], request[cut:] + request + get + get]
    first, second, *versions = exchanged(server, parts, 4)
    expected = "".join(f" w{token}" for token in continuation((5, 6), 2))
    assert [reply.json()["choices"][0]["text"] for reply in (first, second)] == [expected] * 2
    assert [reply.status_code for reply in versions] == [200, 200]


def test_expect_100_continue_is_answered(server: Api) -> None:
    leave, reply = exchanged(server, [HEAD + b"expect: 100-continue\r\n" + WHOLE], 2)
    assert (leave.status_code, reply.status_code) == (100, 200)


# -- compressed bodies -----------------------------------------------------------------------------


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(BODY)),
        ("X-GZIP", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", bare(BODY)),
        ("identity", BODY),
    ],
    ids=["gzip", "two members", "zlib", "bare", "none"],
)
def test_a_compressed_body_is_read(server: Api, encoding: str, packed: bytes) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    for content in (packed, iter([packed[:1], packed[1:30], packed[30:]])):
        reply = server.client.post(TEXTS, content=content, headers=headers)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("encoding", "content", "status", "words"),
    [
        ("br", BODY, 415, "Content-Encoding 'br' is not supported: use gzip, deflate or none"),
        ("gzip, gzip", BODY, 415, "Content-Encoding 'gzip, gzip' is not supported"),
        ("gzip", BODY, 400, "the body is not valid gzip (Content-Encoding)"),
        ("gzip", gzip.compress(BODY)[:-3], 400, "unexpected end of data"),
        ("deflate", zlib.compress(BODY)[:-6] + b"abcdef", 400, "the body is not valid deflate"),
        ("gzip", gzip.compress(bytes(64 << 20)), 413, "the body has more than"),
        ("deflate", bare(bytes(64 << 20)), 413, "the body has more than"),
    ],
    ids=["brotli", "twice", "none", "cut", "damaged", "bomb", "bare bomb"],
)
def test_a_body_that_is_corrupt_or_too_large_when_decompressed_is_refused(
    server: Api, encoding: str, content: bytes, status: int, words: str
) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    reply = server.client.post(TEXTS, content=content, headers=headers)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]


def test_no_more_is_decompressed_than_the_limit() -> None:
    unpacking = Unpacking(b"gzip", 1000)
    assert len(unpacking.read(gzip.compress(bytes(1000)), last=True)) == 1000
    with pytest.raises(Refused):
        Unpacking(b"gzip", 1000).read(gzip.compress(bytes(1001)), last=True)


# -- methods, paths, origins -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/health", "/readyz", "/v1/models", "/version", "/load", "/metrics", "/", "/openapi.json"],
)
def test_head_has_the_headers_of_get(server: Api, path: str) -> None:
    get, head = server.client.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    for name in ("content-type", "content-length"):
        assert path == "/metrics" or head.headers.get(name) == get.headers.get(name)
    options = server.client.options(path)
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("method", "path", "served"),
    [
        ("POST", "/v1/v1/chat/completions/", CHATS),
        ("POST", "/v1/chat/completion", CHATS),
        ("POST", "/chat", "/api/chat"),
        ("POST", "/v1/v1/responses", "/v1/responses"),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/generate", "/api/generate"),
        ("GET", "/v1/tags", "/api/tags"),
        ("POST", "/v1/tokenize", "/tokenize"),
        ("POST", "/v1/edits", "/openapi.json"),
        ("POST", "/embeddings", "embeddings"),
        ("POST", "/v1/embeddings", "embeddings"),
    ],
)
def test_a_wrong_path_is_answered_with_the_right_one(
    server: Api, method: str, path: str, served: str
) -> None:
    reply = server.client.request(method, path, json={})
    assert reply.status_code == 404
    told = reply.json()["error"]["message"]
    assert told.startswith(f"{method} {path} is not served here: {served} ")


def test_a_wrong_method_is_answered_with_the_allowed_ones(server: Api) -> None:
    for method, path, allow in (
        ("GET", CHATS, "POST, OPTIONS"),
        ("HEAD", TEXTS, "POST, OPTIONS"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
    ):
        reply = server.client.request(method, path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allow)


@pytest.fixture(scope="module")
def shared(house: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that requires a key and allows web pages of one origin."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("0123456789abcdef\n", encoding="utf-8")
    keys.chmod(0o600)
    flags = (f"--http.api_key_file={keys}", f"--http.cors={ORIGIN},null", "--http.fit=false")
    with api(house.address, *flags) as started:
        yield started


def test_pages_of_an_allowed_origin_can_call_the_api_and_read_errors(shared: Api) -> None:
    asks = {"access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"
    leave = shared.client.options(CHATS, headers={"origin": ORIGIN, **asks})
    assert leave.status_code == 200
    assert leave.headers["access-control-allow-origin"] == ORIGIN
    assert leave.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
    assert "POST" in leave.headers["access-control-allow-methods"]
    key = {"authorization": "Bearer 0123456789abcdef"}
    body = {"messages": MESSAGES, "max_tokens": 2}
    for headers, fields, status in (
        (key, body, 200),
        (key, {**body, "stream": True}, 200),
        (key, {**body, "n": 0}, 400),
        ({}, body, 401),
    ):
        reply = shared.client.post(CHATS, json=fields, headers={"origin": ORIGIN, **headers})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        assert reply.headers["access-control-allow-credentials"] == "true"
        assert "Retry-After" in reply.headers["access-control-expose-headers"]
    other = shared.client.post(CHATS, json=body, headers={"origin": "https://evil.example", **key})
    assert "access-control-allow-origin" not in other.headers
    assert shared.client.options(CHATS, headers={"origin": "https://evil.example", **asks}).is_error


def test_a_default_minimum_gives_way_to_a_request_for_a_shorter_reply(house: Backend) -> None:
    with api(house.address, "--sampling.min_tokens=5") as server:
        assert server.chat(max_tokens=2)["usage"]["completion_tokens"] == 2
        asked = {"messages": MESSAGES, "max_tokens": 2, "min_tokens": 5}
        assert server.refusal(CHATS, asked)["param"] == "min_tokens"


def test_with_fit_false_a_length_beyond_the_context_is_refused_unless_the_request_has_fit(
    shared: Api,
) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 600}
    key = {"authorization": "Bearer 0123456789abcdef"}
    refused = shared.client.post(CHATS, json=body, headers=key)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    body["dovetail"] = {"fit": True}
    assert shared.client.post(CHATS, json=body, headers=key).status_code == 200


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "https://a b", "*.example"])
def test_an_invalid_origin_is_refused_in_one_line(origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin: write one such as"):
        HttpSettings(cors=f"{ORIGIN},{origin}")


# -- numbers and JSON ------------------------------------------------------------------------------


def test_integers_may_be_sent_as_floats(server: Api) -> None:
    counts = {"max_tokens": 4.0, "n": 2.0, "seed": 5.0, "top_k": 3e0, "min_tokens": 1.0}
    ids = {"stop_token_ids": [3.0, 4], "top_logprobs": 2.0, "logprobs": True}
    same = {name: int(value) for name, value in counts.items()}
    replies = [server.chat(**counts, **ids), server.chat(**same, **{**ids, "top_logprobs": 2})]
    pointed, plain = ([one["logprobs"] for one in reply["choices"]] for reply in replies)
    assert pointed == plain
    for name in (*counts, "max_completion_tokens"):
        for value in (1.5, True, "1"):
            assert server.refusal(CHATS, {"messages": MESSAGES, name: value})["param"] == name
    tokens = server.ask("/detokenize", tokens=[5.0, 6])
    assert tokens == {"prompt": "w5 w6", "content": "w5 w6"}
    assert server.complete([[5.0, 6.0]], max_tokens=1, logprobs=1.0)["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * 256 + "]" * 256, f"nested more than {DEEPEST} levels deep"),
        ('{"a":' * 100 + "1" + "}" * 100, f"nested more than {DEEPEST} levels deep"),
        ("NaN", "NaN, Infinity and lone surrogates"),
        ("[1e999]", "NaN, Infinity and lone surrogates"),
        ('{"a": "\\ud800"}', "NaN, Infinity and lone surrogates"),
    ],
)
def test_template_values_that_are_not_json_or_nested_too_deeply_are_refused(
    server: Api, value: str, words: str
) -> None:
    text = f'{{"messages": {json.dumps(MESSAGES)}, "chat_template_kwargs": {{"x": {value}}}}}'
    reply = server.client.post(CHATS, content=text, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chat_template_kwargs"
    assert words in reply.json()["error"]["message"]


# -- patience --------------------------------------------------------------------------------------


def test_a_stream_has_its_head_before_its_first_token(house: Backend, server: Api) -> None:
    house.held = True
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    try:
        with server.client.stream("POST", CHATS, json=body) as reply:  # returns with the head
            assert reply.status_code == 200
            house.held = False
            assert [*events(reply)][-1] == "[DONE]"
    finally:
        house.held = False


def test_a_silent_stream_has_comments_before_its_tokens_or_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.0)
    tells: list[Any] = []
    gateway = SimpleNamespace(submit=lambda _, tell: tells.append(tell), cancel=lambda _: None)
    writer = SimpleNamespace(
        replies=[SimpleNamespace(hear=lambda told: told)],
        opening=lambda: "",
        comment=lambda read: b":\n\n",
        failed=lambda error: str(error).encode(),
        lines=lambda _, told: told.text,
    )
    watch = SimpleNamespace(tokens=lambda _: None)

    async def answer() -> None:
        run = Run(gateway)  # type: ignore[arg-type]
        await run.begin(SimpleNamespace(submits=(0,)), 0.0)  # type: ignore[arg-type]
        lines = Answer(run, writer, [watch]).lines()  # type: ignore[arg-type,list-item]
        assert [await anext(lines), await anext(lines)] == [b":\n\n"] * 2
        tells[0](Emitted(epoch=1, request=1, tokens=(5,), drafted=(False,), text="w5"))
        assert [await anext(lines), await anext(lines)] == [b"w5", b":\n\n"]
        writer.replies[0].hear = lambda told: (_ for _ in ()).throw(service.unavailable("lost"))
        tells[0](Failed(epoch=1, code="worker_lost", text="lost"))
        assert await anext(lines) == b"lost"

    asyncio.run(answer())


def test_openai_python_ignores_comments_also_between_events_with_ids() -> None:
    chunk = '{"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}'
    for comment, chunks in (
        (": no token yet\n\n", 1),
        (f"data: {chunk}\nid: a:1\n\n: no token yet\n", 2),
    ):
        text = f"{comment}data: {chunk}\n\ndata: [DONE]\n\n"
        transport = httpx.MockTransport(lambda _, text=text: httpx.Response(200, text=text))
        client = openai.OpenAI(
            base_url="http://x", api_key="x", http_client=httpx.Client(transport=transport)
        )
        stream = client.chat.completions.create(model="m", messages=[], stream=True)
        assert [part.id for part in stream] == ["a"] * chunks


def test_a_health_check_uses_no_proxy(server: Api) -> None:
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-c", READY.format(port=server.address[1])]
    assert subprocess.run(command, env={**os.environ, **proxies}, check=False).returncode == 0
