"""A coordinator in a process of its own, over real sockets: what only those let through, or stop.

Messages of two hundred thousand frames, frames beyond the limit, peers without a key or with a
strange one, connections that say nothing or something else. Beside them two workers and a client
decode; the text that the target alone would write is the oracle, and memory is that of the
coordinator's process.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter

import zmq

from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.codec import MAX_FRAME_BYTES
from dovetail.protocol.errors import LinkError
from dovetail.protocol.keys import coordinator_public, generate_keys, load_own_key
from dovetail.protocol.links import Link, open_link
from dovetail.protocol.links.sockets import MAX_MESSAGE_BYTES
from dovetail.protocol.messages import Failed, Finished
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.client import Client
from hostile import messages
from hostile.found import Found
from hostile.messages import Knowledge, hostile
from support.patience import PATIENCE_S
from support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker, continuation

MOST_FRAMES = 200_000
TOKENS = 40
MAY_GROW_MIB = 4 * (MAX_MESSAGE_BYTES >> 20)
"""The memory that the largest message may take while it is read: libzmq's buffers, the copy that is
ours, and those of the next one."""


class Healthy:
    """Two scripted workers and a client of the coordinator at an address."""

    def __init__(self, connect: Callable[[str], Link], opened: ExitStack) -> None:
        self._workers: list[ScriptedWorker] = [
            ScriptedTarget(connect("target"), "target", 100),
            ScriptedDraft(connect("draft"), "draft", 101),
        ]
        for worker in self._workers:
            opened.callback(worker.link.close)
            worker.register()
        self._wait(lambda: all(worker.coordinator_epoch != -1 for worker in self._workers))
        self._client = opened.enter_context(Client(connect("client")))
        self._prompt = 0

    def step(self) -> None:
        for worker in self._workers:
            worker.step()

    def check(self) -> bool:
        """Return whether a request is answered as the target alone would."""
        self._prompt = 1 + self._prompt % 90
        prompt = (self._prompt, 9)
        request = self._client.submit(
            tokens=prompt,
            max_tokens=TOKENS,
            seed=1,
            tree=TreeSettings(policy="dynamic", insist=True),
        )
        ends: list[Finished | Failed] = []

        def ended() -> bool:
            reply = self._client.receive(0.0)
            if isinstance(reply, Finished | Failed):
                ends.append(reply)
            return bool(ends)

        self._wait(ended)
        (end,) = ends
        return (
            isinstance(end, Finished)
            and end.request == request
            and list(end.result.token_ids) == continuation(prompt, TOKENS)
        )

    def dropped(self) -> int:
        """Messages and handshakes that the coordinator has refused, or found stale."""
        state = self._client.status()
        return state.refused + state.stale

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = perf_counter() + PATIENCE_S
        while not condition():
            self.step()
            if perf_counter() > deadline:
                raise TimeoutError("the healthy peers are not answered")


@contextmanager
def attacker(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, **options: object
) -> Iterator["zmq.Socket[bytes]"]:
    """A socket that keeps no rules."""
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    for name, value in options.items():
        setattr(peer, name, value)
    peer.connect(address)
    try:
        yield peer
    finally:
        peer.close()


def siege_wire(count: int, seed: int, step: Callable[[int], None]) -> Found:
    """Hostile messages of strangers over ipc, the largest of them by far among them."""
    found, rng = Found("coordinator over ipc", may_grow_mib=MAY_GROW_MIB), Random(seed)
    stream = hostile(rng, messages.INBOUND, Knowledge())
    with ExitStack() as opened, Supervisor() as supervisor:
        child = supervisor.start("coordinator", ["coordinator", "--listen=ipc"], reads=True)
        address = supervisor.await_address(child)
        healthy = Healthy(lambda role: open_link(address, role=role), opened)
        found.look(0.0, child.peak_rss_bytes())
        context = opened.enter_context(zmq.Context())
        began = perf_counter()
        while found.messages < count:
            with attacker(context, address) as peer:
                for _, frames in islice(stream, min(500, count - found.messages)):
                    _send(peer, frames or [b""], healthy)
                    found.messages += 1
                if found.messages % 5000 == 500:
                    _send(peer, [b"x"] * MOST_FRAMES, healthy)
                    _send(peer, [bytes(MAX_FRAME_BYTES)] * 2, healthy)
                    _send(peer, [bytes(MAX_FRAME_BYTES + 4096)], healthy)
                    found.messages += 3
                _check_until_quiet(healthy, found)
            found.look(1.0, child.peak_rss_bytes())
            step(found.messages)
        found.seconds = perf_counter() - began
        supervisor.check()
    return found


def siege_handshakes(count: int, folder: Path, step: Callable[[int], None]) -> Found:
    """Connections over tcp by who may not connect: without keys, with keys of another deployment,
    with bytes that mean nothing, with none at all."""
    found = Found("coordinator over tcp")
    generate_keys(folder / "ours")
    generate_keys(folder / "theirs")
    with ExitStack() as opened, Supervisor() as supervisor:
        arguments = ["coordinator", "--listen=tcp://127.0.0.1:*", f"--keys={folder / 'ours'}"]
        child = supervisor.start("coordinator", arguments, reads=True)
        address = supervisor.await_address(child)
        healthy = Healthy(lambda role: open_link(address, keys=folder / "ours", role=role), opened)
        found.look(0.0, child.peak_rss_bytes())
        context = opened.enter_context(zmq.Context())
        theirs = _curve(folder)
        began = perf_counter()
        while found.messages < count:
            with ExitStack() as connections:
                for _ in range(min(10, count - found.messages)):
                    for options in ({}, theirs):
                        peer = connections.enter_context(attacker(context, address, **options))
                        with suppress(
                            zmq.Again
                        ):  # it has been turned away already, and does not try again
                            peer.send(b"hello", zmq.NOBLOCK)
                    for said in (
                        b"",
                        b"GET / HTTP/1.1\r\n\r\n",
                        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE",
                    ):
                        _say(address, said, connections)
                    found.messages += 5
                _check_until_quiet(healthy, found)
            found.look(1.0, child.peak_rss_bytes())
            step(found.messages)
        found.seconds = perf_counter() - began
        supervisor.check()
    return found


def _curve(folder: Path) -> dict[str, object]:
    """The options of a peer that knows the coordinator, and has a key of its own that nobody
    does."""
    own = load_own_key(folder / "theirs", "target")
    return {
        "curve_serverkey": coordinator_public(folder / "ours").encode(),
        "curve_publickey": own.public.encode(),
        "curve_secretkey": own.secret.encode(),
    }


def _say(address: str, said: bytes, connections: ExitStack) -> None:
    """Raw bytes on a connection that stays open for a while."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = connections.enter_context(socket.create_connection((host, int(port))))
    with suppress(OSError):
        connection.sendall(said)


def _send(peer: "zmq.Socket[bytes]", frames: list[bytes], healthy: Healthy) -> None:
    """Send as soon as the queue has room; meanwhile the healthy ones work."""
    while True:
        try:
            peer.send_multipart(frames, zmq.NOBLOCK)
            return
        except zmq.Again:
            healthy.step()


def _check_until_quiet(healthy: Healthy, found: Found) -> None:
    """Have requests answered until the coordinator has handled all that was sent, and drops nothing
    any more."""
    try:
        before = -1
        while before != found.refused:
            before = found.refused
            began = perf_counter()
            found.asked += 1
            found.disturbed += not healthy.check()
            found.slowest_s = max(found.slowest_s or 0.0, perf_counter() - began)
            found.refused = healthy.dropped()
    except (LinkError, TimeoutError) as error:
        found.disturbed += 1
        found.faults.append(str(error))
