"""Links over a network that delays, falls silent, breaks off, corrupts: what a link promises holds,
and both ends learn in time that it is no more."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.protocol.errors import LinkClosed, PeerGone
from dovetail.protocol.links import Link, open_link
from support.patience import PATIENCE_S
from support.proxy import Proxy, Weather, proxied
from support.wires import Wire, open_wire, spawn

GONE_S = 60.0
"""Heartbeats find a silent end within 1.5 to 2 s, and a busy machine later; the kernel would in a
quarter of an hour."""

HEARTBEAT_S = 0.7  # an interval between two, and some
HUB = """
import select, sys
from pathlib import Path
from dovetail.protocol.errors import PeerGone
from dovetail.protocol.links import open_hub
hub = open_hub("tcp://127.0.0.1:*", keys=Path(sys.argv[1]))
print("ready", flush=True)
print(hub.address, flush=True)
while not select.select([sys.stdin], [], [], 0.02)[0]:
    hub.disconnects()
    while (message := hub.receive()) is not None:
        try:
            hub.send(*message)
        except PeerGone:
            pass
"""


@pytest.fixture
def proxy(tcp_wire: Wire) -> Iterator[Proxy]:
    with proxied(tcp_wire.hub.address) as proxy:
        yield proxy


@pytest.fixture
def link(tcp_wire: Wire, proxy: Proxy, stack: contextlib.ExitStack) -> Link:
    """A worker's link through the proxy."""
    link = open_link(proxy.address, keys=tcp_wire.keys, role="target")
    stack.callback(link.close)
    return link


def echo(wire: Wire, link: Link, frames: list[bytes]) -> float:
    """Seconds of a message there and back."""
    began = time.monotonic()
    link.send(frames)
    peer, arrived = wire.arrived()
    wire.hub.send(peer, arrived)
    assert link.receive(PATIENCE_S) == frames
    return time.monotonic() - began


def until_closed(link: Link) -> float:
    """Seconds until the link says that its coordinator has gone; whatever arrives before is
    whole."""
    began = time.monotonic()
    with pytest.raises(LinkClosed):
        deque(iter(lambda: link.receive(PATIENCE_S), None), maxlen=0)
    return time.monotonic() - began


def test_what_is_delayed_and_cut_into_pieces_arrives_whole(
    tcp_wire: Wire, proxy: Proxy, link: Link
) -> None:
    proxy.set(
        up=Weather(delay_s=0.02, jitter_s=0.01, slice_bytes=700),
        down=Weather(delay_s=0.02, slice_bytes=900),
    )
    assert echo(tcp_wire, link, [b"", os.urandom(100_000), b"x"]) >= 0.04
    proxy.heal()
    echo(tcp_wire, link, [b"again"])


def test_a_limited_line_takes_as_long_as_it_has_to(
    tcp_wire: Wire, proxy: Proxy, link: Link
) -> None:
    proxy.limit(1e6)
    assert echo(tcp_wire, link, [os.urandom(100_000)]) >= 0.2


def test_many_messages_keep_their_order_on_a_line_that_comes_and_goes(
    tcp_wire: Wire, proxy: Proxy, link: Link
) -> None:
    heard = []
    for number in range(60):
        if number % 20 == 10:
            proxy.silence()
        link.send([b"%d" % number])
        if number % 20 == 15:
            proxy.heal()
        if number % 20 == 19:
            heard += [tcp_wire.arrived()[1] for _ in range(20)]
    assert heard == [[b"%d" % number] for number in range(60)]


@pytest.mark.usefixtures("heartbeats")
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("harm", [Proxy.corrupt, Proxy.repeat])
def test_bytes_that_were_changed_on_the_way_end_the_connection_and_reach_nobody(
    tcp_wire: Wire, proxy: Proxy, link: Link, harm: Callable[..., None], direction: str
) -> None:
    peer = tcp_wire.greet(link)
    harm(proxy, up=direction == "up")
    with contextlib.suppress(LinkClosed):
        link.send([b"from the worker"])
    with contextlib.suppress(PeerGone):
        tcp_wire.hub.send(peer, [b"from the coordinator"])
    assert tcp_wire.departed() == 1
    until_closed(link)
    heard = []
    while (message := tcp_wire.hub.receive()) is not None:
        heard.append(message[1])
    assert all(frames == [b"from the worker"] for frames in heard)


@pytest.mark.slow
def test_a_coordinator_outlives_bytes_that_were_changed_on_the_way(
    deployment: Path, stack: contextlib.ExitStack
) -> None:
    child = spawn(stack, HUB, str(deployment))
    assert child.stdout is not None
    proxy = stack.enter_context(proxied(child.stdout.readline().decode().strip()))
    for _ in range(4):
        with contextlib.closing(open_link(proxy.address, keys=deployment, role="target")) as link:
            proxy.corrupt()
            with contextlib.suppress(LinkClosed):
                link.send([b"changed on the way"])
                link.receive(0.3)
            proxy.cut()
            with contextlib.suppress(LinkClosed):
                link.receive(HEARTBEAT_S)
    with contextlib.closing(open_link(proxy.address, keys=deployment, role="target")) as link:
        link.send([b"here"])
        assert link.receive(PATIENCE_S) == [b"here"]


def test_a_connection_that_is_broken_off_is_missed_without_waiting_for_a_heartbeat_and_the_next_one_works(  # noqa: E501
    deployment: Path, stack: contextlib.ExitStack
) -> None:
    wire = open_wire("tcp", deployment, stack)
    proxy = stack.enter_context(proxied(wire.hub.address))
    link = stack.enter_context(
        contextlib.closing(open_link(proxy.address, keys=deployment, role="target"))
    )
    wire.greet(link)
    assert proxy.cut() == 1
    until_closed(link)
    assert wire.departed() == 1
    with contextlib.closing(open_link(proxy.address, keys=deployment, role="target")) as again:
        echo(wire, again, [b"here"])
    assert proxy.made == 2


def test_a_proxy_that_refuses_lets_nobody_in(tcp_wire: Wire, proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(LinkClosed):
        open_link(proxy.address, keys=tcp_wire.keys, role="target", timeout_s=0.3)
    proxy.heal()
    open_link(proxy.address, keys=tcp_wire.keys, role="target").close()


@pytest.mark.slow
@pytest.mark.usefixtures("heartbeats")
@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_silence_in_either_direction_is_noticed_at_both_ends(
    tcp_wire: Wire, proxy: Proxy, link: Link, direction: str
) -> None:
    tcp_wire.greet(link)
    began = time.monotonic()
    proxy.silence(up=direction != "down", down=direction != "up")
    assert until_closed(link) < GONE_S
    assert tcp_wire.departed() == 1
    assert time.monotonic() - began < GONE_S


@pytest.mark.slow
@pytest.mark.usefixtures("heartbeats")
def test_an_end_that_is_not_told_finds_out_by_itself(
    tcp_wire: Wire, proxy: Proxy, link: Link
) -> None:
    tcp_wire.greet(link)
    assert proxy.half_open() == 1
    assert tcp_wire.departed() == 1
    assert until_closed(link) < GONE_S


def test_a_proxy_carries_unix_sockets_too(
    ipc_wire: Wire, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    tmp_path.chmod(0o700)
    with proxied(f"{ipc_wire.hub.address}.w", listen=f"ipc://{tmp_path / 'c'}.w") as proxy:
        link = open_link(f"ipc://{tmp_path / 'c'}", role="target")
        stack.callback(link.close)
        echo(ipc_wire, link, [b"here"])
        assert proxy.bytes_up > 0
        proxy.cut()
        until_closed(link)
