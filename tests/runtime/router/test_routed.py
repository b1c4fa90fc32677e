"""The router between clients and replicas, over real sockets; the replicas are scripted."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dovetail.runtime.http.serving.guard import Guard
from dovetail.runtime.router.app import Fleet, Router
from dovetail.runtime.router.upstream import Upstream

COMMENT = b": no token yet\n\n"
READY = {"ready": True, "load": None}
PIECES = (b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")
Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter, dict[bytes, bytes]], Awaitable[None]]


class Scripted:
    """A replica that answers /readyz, and completions as it is told to."""

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.asked: list[tuple[bytes, dict[bytes, bytes], bytes]] = []
        self.left = asyncio.Event()
        self.url = ""
        self.state: Any = READY
        self.tells = asyncio.Event()  # cleared, it holds back what /readyz answers
        self.tells.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                head: dict[bytes, bytes] = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    head[name.strip().lower()] = value.strip()
                body = await reader.readexactly(int(head.get(b"content-length", b"0")))
                if b"/readyz" in line:
                    content = json.dumps(self.state).encode()
                    await self.tells.wait()
                    plain(writer, 200, content)
                    continue
                self.asked.append((line.split()[1], head, body))
                await self.behave(reader, writer, head)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nx-own: 1\r\n\r\n" % (status, len(body)))
    writer.write(body)


async def streams(_: Any, writer: asyncio.StreamWriter, __: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    for piece in PIECES:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def hangs_up(_: Any, writer: asyncio.StreamWriter, __: Any) -> None:
    writer.close()


async def breaks_off(_: Any, writer: asyncio.StreamWriter, __: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
    await writer.drain()
    writer.close()


async def begins(_: Any, writer: asyncio.StreamWriter, __: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(COMMENT), COMMENT))
    await writer.drain()
    writer.close()


async def full(_: Any, writer: asyncio.StreamWriter, __: Any) -> None:
    plain(writer, 429, b'{"error": "the queue is full"}')


class Routed:
    """A router over some replicas, asked as its server asks it."""

    def __init__(self, router: Router, fleet: Fleet, replicas: list[Scripted]) -> None:
        self.router, self.fleet, self.replicas = router, fleet, replicas
        self.method = ""
        self.app = Guard(router, keys=(), most_body_bytes=1 << 20, only_local_names=True)

    async def ask(
        self, body: bytes = b"{}", path: str = "/v1/completions", **headers: str
    ) -> tuple[int, dict[bytes, bytes], list[bytes], bool]:
        """Status, headers, pieces of the body, and whether it came to its end."""
        sent: list[Any] = []
        waiting = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        given = [(b"host", b"localhost"), *((k.encode(), v.encode()) for k, v in headers.items())]
        await self.app(self.scope(path, given), receive, send)
        pieces = [message["body"] for message in sent[1:] if message["body"]]
        return (
            sent[0]["status"],
            dict(sent[0]["headers"]),
            pieces,
            not sent[-1].get("more_body", False),
        )

    def scope(self, path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
        return {
            "type": "http",
            "method": self.method or ("POST" if path.endswith("completions") else "GET"),
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
        }


@asynccontextmanager
async def routed(*behaviours: Behave) -> AsyncIterator[Routed]:
    replicas, servers = [Scripted(behave) for behave in behaviours], []
    for replica in replicas:
        server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
        servers.append(server)
        replica.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream, urls = Upstream(), [replica.url for replica in replicas]
    fleet = Fleet(lambda: [replica.url for replica in replicas], upstream)
    await fleet.look()
    try:
        yield Routed(Router(fleet, upstream), fleet, replicas)
    finally:
        for server, url in zip(servers, urls, strict=True):
            server.close()
            upstream.close(url)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await test()

    asyncio.run(bounded())


def test_a_stream_is_passed_on_byte_for_byte_with_the_clients_key() -> None:
    async def test() -> None:
        async with routed(streams) as there:
            for _ in range(3):  # the second and third on a connection that was kept
                status, headers, pieces, ended = await there.ask(
                    b'{"prompt": "Hi"}', authorization="Bearer secret", connection="close"
                )
                assert (status, b"".join(pieces), ended) == (200, b"".join(PIECES), True)
                assert headers == {b"content-type": b"text/event-stream"}
            path, head, body = there.replicas[0].asked[-1]
            assert (path, body) == (b"/v1/completions", b'{"prompt": "Hi"}')
            assert head[b"authorization"] == b"Bearer secret"
            assert head[b"x-forwarded-for"] == b"127.0.0.1"
            assert head[b"host"].decode() in there.replicas[0].url
            assert b"connection" not in head
            assert [replica.in_flight for replica in there.fleet.replicas] == [0]

    run(test)


@pytest.mark.parametrize("behave", [hangs_up, full])
def test_what_fails_before_a_byte_of_the_reply_is_tried_elsewhere(behave: Behave) -> None:
    async def test() -> None:
        async with routed(behave, streams) as there:
            for _ in range(4):
                status, _, pieces, _ = await there.ask()
                assert (status, b"".join(pieces)) == (200, b"".join(PIECES))
                await there.fleet.look()
            assert there.replicas[0].asked
            assert there.router.counts["retries", there.replicas[0].url] >= 1

    run(test)


def test_a_stream_without_a_token_is_retried_on_another_replica() -> None:
    async def test() -> None:
        async with routed(begins, streams) as there:
            status, _, pieces, ended = await there.ask()
            assert (status, b"".join(pieces), ended) == (200, COMMENT + b"".join(PIECES), True)
        async with routed(begins, full) as there:
            status, _, pieces, ended = await there.ask()
            assert (status, ended) == (200, True)
            assert pieces == [COMMENT, b'data: {"error": "the queue is full"}\n\n']

    run(test)


def test_a_compressed_request_is_routed_by_its_text_and_forwarded_uncompressed() -> None:
    async def test() -> None:
        body = json.dumps({"prompt": "a" * 200}).encode()
        async with routed(streams) as there:
            headers = {"content-encoding": "gzip", "content-length": "1"}
            assert (await there.ask(gzip.compress(body), **headers))[0] == 200
            (_, head, sent) = there.replicas[0].asked[0]
            assert sent == body
            assert b"content-encoding" not in head
            assert len(there.fleet.replicas[0].known) == 3

    run(test)


def test_the_router_answers_a_wrong_path_or_method_with_the_right_one() -> None:
    async def test() -> None:
        async with routed(streams) as there:
            status, _, pieces, _ = await there.ask(path="/v1/v1/chat/completions")
            assert status == 404
            assert b"not served here: /v1/chat/completions is" in pieces[0]
            there.method = "DELETE"
            status, head, _, _ = await there.ask(path="/health")
            assert (status, head[b"allow"]) == (405, b"GET, HEAD, OPTIONS")
            there.method = "HEAD"
            assert (await there.ask(path="/health"))[0] == 200

    run(test)


def test_what_breaks_off_later_has_no_end_and_is_tried_nowhere_else() -> None:
    async def test() -> None:
        async with routed(breaks_off, breaks_off) as there:
            status, _, pieces, ended = await there.ask()
            assert (status, pieces, ended) == (200, [b"first"], False)
            assert sum(len(replica.asked) for replica in there.replicas) == 1
            assert sum(there.router.counts["broken", r.url] for r in there.replicas) == 1

    run(test)


def test_a_refusal_of_all_is_passed_on_and_without_any_the_answer_is_503() -> None:
    async def test() -> None:
        async with routed(full, full) as there:
            status, headers, pieces, _ = await there.ask()
            assert (status, pieces) == (429, [b'{"error": "the queue is full"}'])
            assert headers[b"x-own"] == b"1"
            assert sum(len(replica.asked) for replica in there.replicas) == 2
        async with routed(hangs_up) as there:
            status, headers, pieces, _ = await there.ask()
            assert status == 503
            assert b"no replica answered this request (1 tried)" in pieces[0]
            assert headers[b"retry-after"] == b"1"
        async with routed() as there:
            assert b"this router has no replica" in (await there.ask())[2][0]

    run(test)


def test_a_client_that_leaves_is_told_to_the_replica() -> None:
    async def test() -> None:
        left, begun = asyncio.Event(), asyncio.Event()

        async def waits(reader: Any, writer: asyncio.StreamWriter, _: Any) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            begun.set()
            with suppress(ConnectionError):
                assert await reader.read(1) == b""
            left.set()

        async with routed(waits) as there:
            given = [{"type": "http.request", "body": b"{}", "more_body": False}]

            async def receive() -> Any:
                if given:
                    return given.pop()
                await begun.wait()
                return {"type": "http.disconnect"}

            async def send(_: Any) -> None:
                pass

            headers = [(b"host", b"localhost")]
            await there.app(there.scope("/v1/completions", headers), receive, send)
            await left.wait()
            assert [replica.in_flight for replica in there.fleet.replicas] == [0]
            assert not there.router.counts["broken", there.replicas[0].url]

    run(test)


def test_a_replica_that_is_listed_no_more_gets_nothing_and_is_forgotten() -> None:
    async def test() -> None:
        async with routed(streams, streams) as there:
            gone = there.replicas.pop(0)
            there.fleet.replicas[0].in_flight = 1
            await there.fleet.look()
            for _ in range(3):
                assert (await there.ask())[0] == 200
            assert not gone.asked
            assert [replica.draining for replica in there.fleet.replicas] == [True, False]
            there.fleet.replicas[0].in_flight = 0
            await there.fleet.look()
            assert [replica.url for replica in there.fleet.replicas] == [there.replicas[0].url]

    run(test)


def test_a_reply_is_asked_for_again_at_whichever_replica_knows_it() -> None:
    async def knows_nothing(_: Any, writer: asyncio.StreamWriter, __: Any) -> None:
        plain(writer, 404, b'{"error": "there is no such reply"}')

    async def test() -> None:
        path = "/v1/chat/completions/chatcmpl-1"
        async with routed(knows_nothing, streams) as there:
            for _ in range(2):
                status, _, pieces, _ = await there.ask(b"", path)
                assert (status, b"".join(pieces)) == (200, b"".join(PIECES))
                event = {"last-event-id": "chatcmpl-1:3.1"}
                status, _, pieces, _ = await there.ask(b"{}", **event)
                assert (status, b"".join(pieces)) == (200, b"".join(PIECES))
            assert (await there.ask(b"", "/v1/models/none"))[0] in (200, 404)
        async with routed(knows_nothing, knows_nothing) as there:
            assert (await there.ask(b"", path))[0] == 404

    run(test)


def test_the_router_says_how_its_replicas_are() -> None:
    async def test() -> None:
        async with routed(streams) as there:
            await there.ask()
            status, _, pieces, _ = await there.ask(path="/readyz")
            (told,) = json.loads(pieces[0])["replicas"]
            assert (status, told["ready"], told["url"]) == (200, True, there.replicas[0].url)
            _, _, pieces, _ = await there.ask(path="/metrics")
            line = f'dovetail_router_requests_total{{replica="{told["url"]}"}} 1'
            assert line in pieces[0].decode()
            assert (await there.ask(path="/"))[0] == 404
            assert (await there.ask(path="/health", host="evil.example"))[0] == 403

    run(test)


@pytest.mark.parametrize(
    "state",
    [
        {"ready": True, "load": {"sessions": "many"}},
        {"ready": True, "load": [1]},
        {"ready": True, "load": {"targets": -1}},
        {"ready": True, "load": {"sessions": 1 << 63}},
        {"ready": True, "load": {"seconds_per_token": -1.0}},
        {"ready": True, "load": {"seconds_per_token": float("nan")}},
        {"ready": True, "load": {"seconds_per_token": 0.1, "further_seconds_per_token": -1.0}},
        {"ready": True, "load": {"reading_seconds_per_token": float("nan")}},
        {"ready": True},
        [1, 2],
    ],
    ids=str,
)
def test_what_is_no_replica_gets_no_requests_and_the_others_get_them(state: Any) -> None:
    async def test() -> None:
        async with routed(streams, streams) as there:
            other, replica = there.replicas
            other.state = state
            await there.fleet.look()
            ready = {seen.url: seen.ready for seen in there.fleet.replicas}
            assert ready == {other.url: False, replica.url: True}
            assert (await there.ask())[0] == 200

    run(test)


def test_a_request_that_ends_while_its_replica_answers_is_not_taken_for_one_of_others() -> None:
    begun, ends = asyncio.Event(), asyncio.Event()

    async def waits(reader: Any, writer: asyncio.StreamWriter, head: dict[bytes, bytes]) -> None:
        begun.set()
        await ends.wait()
        await streams(reader, writer, head)

    async def test() -> None:
        async with routed(waits) as there:
            (scripted,), (replica,) = there.replicas, there.fleet.replicas
            asked = asyncio.create_task(there.ask())
            await begun.wait()
            scripted.state = {"ready": True, "load": {"sessions": 2}}
            scripted.tells.clear()
            looks = asyncio.create_task(there.fleet.look())
            await asyncio.sleep(0.05)
            assert replica.running == 1
            ends.set()
            await asked
            scripted.tells.set()
            await looks
            assert replica.load.sessions == 2
            assert replica.running == 1  # one of others, and none of ours

    run(test)


@pytest.mark.parametrize("behave", [streams, full])
def test_a_replica_that_has_answered_all_reads_nothing_whatever_was_predicted(
    behave: Behave,
) -> None:
    async def test() -> None:
        async with routed(behave) as there:
            (replica,) = there.fleet.replicas
            await there.ask(json.dumps({"prompt": "Once upon a time. " * 10_000}).encode())
            assert replica.reads_on_s(replica.chosen_s) == 0.0

    run(test)


def test_what_only_a_later_version_says_of_its_load_is_left_out() -> None:
    async def test() -> None:
        async with routed(streams) as there:
            there.replicas[0].state = {"ready": True, "load": {"sessions": 3, "mood": "good"}}
            await there.fleet.look()
            (seen,) = there.fleet.replicas
            assert seen.ready
            assert seen.load.sessions == 3

    run(test)
