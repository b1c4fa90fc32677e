"""The limits on who may ask, and how much: keys, host names, bodies, heads, slow clients and too
many of them."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from dovetail.protocol.messages import MAX_ENDS, Open, VocabularyFacts
from dovetail.runtime.http import orders
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.bodies import CompletionBody
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.serving.guard import host_name, is_local, is_loopback
from hostile.requests import WRONG, Wrong, try_request
from support.patience import PATIENCE_S
from support.scripted import ScriptedTarget
from support.web import Api, Backend, api, backend

KEYS = "fedcba9876543210", "0123456789abcdef"
PROMPTS = dict(zip(KEYS, ("w5 w6", "w7 w8"), strict=True))
MANY = 6


def ask(server: Api, key: str) -> int:
    body = {"prompt": PROMPTS[key], "max_tokens": 12, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    return server.client.post("/v1/completions", json=body, headers=headers).status_code


def test_a_key_that_asks_for_little_does_not_wait_for_one_that_asks_for_much(
    tmp_path: Path,
) -> None:
    path, first, second = tmp_path / "keys", *KEYS
    path.write_text("\n".join(KEYS), encoding="utf-8")
    path.chmod(0o600)
    with backend(target=False, draft=False) as house:
        target = house.add(ScriptedTarget, "target", limits={"context": 512, "sessions": 1})
        house.held = True
        with (
            api(house.address, f"--http.api_key_file={path}") as server,
            ThreadPoolExecutor(MANY + 1) as threads,
        ):
            many = [threads.submit(ask, server, first) for _ in range(MANY)]
            house.until(lambda: len(house.coordinator._shared.queue) == MANY - 1)
            one = threads.submit(ask, server, second)
            house.until(lambda: len(house.coordinator._shared.queue) == MANY)
            metrics = server.client.get("/metrics").text
            lengths = [line for line in metrics.splitlines() if "dovetail_queue_length{" in line]
            assert sorted(float(line.split()[-1]) for line in lengths) == [1, MANY - 1]
            assert not any(key in metrics for key in KEYS)
            house.held = False
            assert {request.result(PATIENCE_S) for request in (*many, one)} == {200}
    begun = [command.prompt for command in target.seen if isinstance(command, Open)]
    others = begun[0]
    place = next(place for place, prompt in enumerate(begun) if prompt != others)
    assert len(begun) == MANY + 1
    assert place <= 2, "behind the one that ran, and at most one that had waited for longer"


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_request_that_cannot_be_is_refused_by_name(server: Api, wrong: Wrong) -> None:
    tried = try_request(server, wrong)
    assert tried.passed, tried


def test_what_clients_say_makes_no_metric_and_no_label(server: Api, house: Backend) -> None:
    before = names_of(server)
    for name in ('demo"} 1\nforged_metric 1', "a" * 500, "\u202e"):
        server.client.post(
            "/v1/completions",
            json={"prompt": "w5", "model": name, "user": name},
            headers={"x-request-id": "1"},
        )
        server.client.get(f"/v1/models/{'a' * 200}", headers={"x-request-id": "2"})
    assert names_of(server) == before
    house.until_idle()


def names_of(server: Api) -> list[str]:
    """Metrics and their labels, without their values."""
    return [line.rpartition(" ")[0] for line in server.client.get("/metrics").text.splitlines()]


KEY = "0123456789abcdef"
CHATS = "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def keyed(house: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that wants a key, and lets few in."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"fedcba9876543210\n{KEY}\n", encoding="utf-8")
    path.chmod(0o600)
    with api(
        house.address,
        f"--http.api_key_file={path}",
        "--http.body=4KiB",
        "--http.connections=8",
        "--http.receive_s=1",
    ) as started:
        yield started


def dial(server: Api) -> contextlib.AbstractContextManager[socket.socket]:
    connection = socket.create_connection(server.address)
    connection.settimeout(PATIENCE_S)
    return connection


def closed(connection: socket.socket) -> bytes:
    """Return what is said until the other end closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            said += part
    return said


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
    ],
)
def test_nobody_is_served_without_the_key(keyed: Api, header: dict[str, str]) -> None:
    refused = keyed.client.post(CHATS, json={}, headers=header)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert keyed.client.get("/openapi.json", headers=header).status_code == 401


def test_every_key_of_the_file_opens(keyed: Api) -> None:
    for key in (KEY, "fedcba9876543210"):
        assert (
            keyed.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
            == 200
        )


def test_a_supervisor_and_a_local_scraper_need_no_key_but_a_proxys_client_does(keyed: Api) -> None:
    assert keyed.client.get("/health").status_code == 200
    assert keyed.client.get("/readyz").status_code == 200
    assert keyed.client.get("/metrics").status_code == 200
    assert keyed.client.get("/metrics", headers={"x-forwarded-for": "127.0.0.1"}).status_code == 401


def test_without_a_key_only_local_names_are_answered(server: Api) -> None:
    assert server.client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert server.client.get("/v1/models", headers={"host": "localhost:8000"}).status_code == 200


def test_other_origins_are_told_nothing(server: Api) -> None:
    reply = server.client.get("/v1/models", headers={"origin": "http://evil.example"})
    assert not any(name.startswith("access-control") for name in reply.headers)
    body = b'{"messages": [{"role": "user", "content": "w5"}]}'
    refused = server.client.post(CHATS, content=body, headers={"content-type": "text/plain"})
    assert refused.status_code == 400
    assert "Content-Type: application/json" in refused.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused_while_it_arrives(keyed: Api, announced: bool) -> None:
    body = b"x" * 10_000
    content = body if announced else iter([body[:3000], body[3000:]])
    refused = keyed.client.post(
        CHATS,
        content=content,
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
    )
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(("key", "status"), [(KEY, b"413"), ("wrong", b"401")])
def test_a_client_that_is_still_sending_hears_why_it_is_refused(
    keyed: Api, key: str, status: bytes
) -> None:
    with dial(keyed) as connection:
        connection.sendall(
            HEAD + f"authorization: Bearer {key}\r\ncontent-length: {20 << 20}\r\n\r\n".encode()
        )
        connection.sendall(b"x" * (20 << 20))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status)


def test_a_table_of_nonsense_is_refused_at_once(server: Api) -> None:
    biases = {f"a{number}": 1 for number in range(120_000)}
    began_s = server.cpu_s()
    refused = server.refusal(
        CHATS, {"messages": [{"role": "user", "content": "w5"}], "logit_bias": biases}
    )
    assert refused["param"] == "logit_bias"
    assert server.cpu_s() - began_s < 3


def test_a_head_that_is_too_large_is_refused(server: Api) -> None:
    with dial(server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: " + b"b" * 70_000 + b"\r\n\r\n"
        )
        assert closed(connection).startswith(b"HTTP/1.1 431 ")
    assert server.client.get("/health").status_code == 200


def test_what_is_no_http_is_answered_and_closed(server: Api) -> None:
    with dial(server) as connection:
        connection.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
        assert closed(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/comp", HEAD, HEAD + b'content-length: 100\r\n\r\n{"pro']
)
def test_a_request_that_does_not_arrive_is_cut_off(keyed: Api, begun: bytes) -> None:
    with dial(keyed) as connection:
        connection.sendall(
            begun.replace(
                b"content-length", f"authorization: Bearer {KEY}\r\ncontent-length".encode()
            )
        )
        assert closed(connection) == b""


def drip(connection: socket.socket) -> None:
    """Send a header a byte at a time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        connection.sendall(b"x")
        time.sleep(0.05)


def test_a_request_that_drips_is_cut_off(keyed: Api) -> None:
    with dial(keyed) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\na: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(connection)


def test_a_connection_too_many_is_refused_and_the_others_are_served(keyed: Api) -> None:
    with contextlib.ExitStack() as stack:
        alive = httpx.Client(base_url=keyed.url, trust_env=False)
        stack.callback(alive.close)
        keyed.client.close()
        keyed.client = httpx.Client(base_url=keyed.url, timeout=PATIENCE_S, trust_env=False)
        assert alive.get("/health").status_code == 200
        for _ in range(7):
            stack.enter_context(dial(keyed))
        with dial(keyed) as refused:
            assert closed(refused).startswith(b"HTTP/1.1 503 ")
        assert alive.get("/health").status_code == 200


def test_a_client_that_reads_nothing_is_cut_off(house: Backend) -> None:
    """It asks for far more than the kernel keeps for it."""
    body = b'{"prompt": [%s], "max_tokens": 0, "echo": true, "logprobs": 20}' % b",".join(
        b"%d" % (1 + i % 90) for i in range(500)
    )
    with api(house.address, "--http.receive_s=1") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(server.address)
        for _ in range(8):
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        deadline = time.monotonic() + PATIENCE_S
        while server.metric("dovetail_http_connections") > 1:
            assert time.monotonic() < deadline, "it was not cut off"
            time.sleep(0.1)
        house.until_idle()


def test_a_stream_that_nobody_reads_ends_in_words_which_the_log_and_the_metrics_say_too(
    house: Backend,
) -> None:
    body = json.dumps(
        {
            "prompt": [5, 6],
            "max_tokens": 100,
            "n": 16,
            "stream": True,
            "logprobs": 20,
            "ignore_eos": True,
        }
    ).encode()
    with api(house.address, "--http.receive_s=2") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(server.address)
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        deadline = time.monotonic() + PATIENCE_S
        while not server.metric("dovetail_http_let_go_total"):
            assert time.monotonic() < deadline, "it was not let go"
            time.sleep(0.05)
        house.until_idle()
        said = b""
        while not said.endswith(b"0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, f"closed after {said[-200:]!r}"
            said += part
    last = said.rpartition(b"data: ")[2]
    error = json.loads(last.partition(b"\n")[0])["error"]
    assert error["code"] == "client_too_slow"
    assert "has read nothing for 2 s" in error["message"]
    assert b"[DONE]" not in said


def test_the_servers_files_are_few_again_when_its_clients_have_gone(server: Api) -> None:
    folder = Path(f"/proc/{server.process.pid}/fd")
    before = len([*folder.iterdir()])
    connections = [socket.create_connection(server.address) for _ in range(200)]
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + PATIENCE_S
    while len([*folder.iterdir()]) > before + 1:
        assert time.monotonic() < deadline, (
            f"{len([*folder.iterdir()])} files are open, {before} were"
        )
        time.sleep(0.05)


def test_addresses_and_names_are_told_apart() -> None:
    assert [
        is_loopback(address)
        for address in ("127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "localhost", "")
    ] == [True, True, True, False, False, False]
    assert [
        host_name(header)
        for header in (b"localhost:8000", b"[::1]:80", b"127.0.0.1", b"Evil.Example:1")
    ] == ["localhost", "::1", "127.0.0.1", "evil.example"]
    assert is_local({"client": ("127.0.0.1", 5)}, {})
    assert not is_local({"client": ("127.0.0.1", 5)}, {b"forwarded": b"for=1.2.3.4"})
    assert not is_local({"client": None}, {})


def test_more_ends_of_a_reply_than_a_request_can_hold_are_refused_and_not_cut() -> None:
    facts = VocabularyFacts(digest="x", size=1000, end=tuple(range(40)))
    target = cast("RequestTarget", SimpleNamespace(described=SimpleNamespace(vocabulary=facts)))
    few, many = (
        CompletionBody(prompt="x", stop_token_ids=list(range(100, 100 + count)))
        for count in (24, 25)
    )
    assert len(orders._end(few, target) or ()) == MAX_ENDS
    with pytest.raises(ApiError, match="65 tokens would end the reply, 40 of them the target's"):
        orders._end(many, target)
