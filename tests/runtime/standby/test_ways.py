"""The way to a coordinator that has a standby: both addresses are tried in turn, and the
coordinator's own key is that of its standby."""

from pathlib import Path

import pytest

from dovetail.protocol.errors import KeysError, LinkClosed, UserError
from dovetail.protocol.keys import STANDBY, generate_keys
from dovetail.protocol.links import open_hub, open_link
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S
from dovetail.protocol.links.ways import Way, split_addresses


class Anywhere:
    """Links by address, for those where somebody answers."""

    def __init__(self, *there: str) -> None:
        self.there = there
        self.tried: list[tuple[str, float]] = []

    def __call__(self, address: str, timeout_s: float) -> str:
        self.tried.append((address, timeout_s))
        if address not in self.there:
            raise LinkClosed(f"nobody answers at {address}")
        return address


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ("tcp://a:1,", "no address follows the last comma"),
        ("tcp://a:1, tcp://b:2,", "no address follows the last comma"),
        ("tcp://a:1,tcp://b:2,tcp://a:1", "has tcp://a:1 twice"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(addresses: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        split_addresses(addresses)


@pytest.mark.parametrize(("there", "found"), [("ipc:///x,y/hub", 0), ("tcp://b:1", 1)])
def test_the_first_link_is_to_who_answers_and_the_next_to_the_other_address(
    there: str, found: int
) -> None:
    """A path may have a comma."""
    connect = Anywhere(there)
    way = Way("ipc:///x,y/hub, tcp://b:1", connect)
    assert way.first() == there
    both = connect.there = ("ipc:///x,y/hub", "tcp://b:1")
    assert way.again(1.0) == both[1 - found]
    assert way.again(1.0) == there
    assert {timeout_s for _, timeout_s in connect.tried} == {CONNECT_TIMEOUT_S / 2, 1.0}


def test_where_nobody_answers_every_address_is_named_with_its_reason() -> None:
    said = "at tcp://a:1 or tcp://b:1: nobody answers at tcp://a:1; nobody answers at tcp://b:1$"
    with pytest.raises(LinkClosed, match=said):
        Way("tcp://a:1,tcp://b:1", Anywhere()).first()
    with pytest.raises(LinkClosed, match=r"^nobody answers at tcp://a:1$"):
        Way("tcp://a:1", Anywhere()).first()


def test_a_standby_shows_the_coordinators_own_key_and_whoever_lacks_it_cannot(
    tmp_path: Path,
) -> None:
    generate_keys(tmp_path / "keys")
    hub = open_hub("tcp://127.0.0.1:*", keys=tmp_path / "keys")
    try:
        link = open_link(hub.address, keys=tmp_path / "keys", role=STANDBY)
        link.send([b"follow"])
        while (arrived := hub.receive()) is None:
            pass
        key = hub.user(arrived[0])
        assert key is not None
        assert (key.name, key.roles) == ("coordinator", ("standby",))
        assert not key.may_be(("target",))
        link.close()
        (tmp_path / "keys" / "coordinator.key").unlink()
        with pytest.raises(KeysError, match=r"coordinator\.key"):
            open_link(hub.address, keys=tmp_path / "keys", role=STANDBY)
    finally:
        hub.close()
