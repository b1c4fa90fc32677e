"""Keys: what is written, what is refused, and how a live hub judges them."""

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from dovetail.protocol import keys
from dovetail.protocol.errors import KeysError, LinkClosed, PeerGone
from dovetail.protocol.keys import ROLES, PeerKey
from dovetail.protocol.links import open_hub, open_link
from dovetail.protocol.links.handshakes import AllowedPeers
from support.patience import PATIENCE_S
from support.wires import Wire, readable, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fresh keys."""
    keys.generate_keys(tmp_path / "keys")
    return tmp_path / "keys"


def only(folder: Path, target: Path, *names: str) -> Path:
    """A copy of some key files, as one carries them to another machine."""
    target.mkdir(mode=0o700)
    for name in names:
        shutil.copy2(folder / name, target / name)
    return target


# -- files -----------------------------------------------------------------------------------------


def test_a_new_deployment_has_a_pair_for_the_coordinator_and_each_role(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{half}" for name in ("coordinator", *ROLES) for half in ("key", "pub")
    }
    own = [keys.load_own_key(folder, name) for name in ("coordinator", *ROLES)]
    assert len({key.secret for key in own} | {key.public for key in own}) == 2 * len(own)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_what_was_written(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        keys.generate_keys(tmp_path / "deep" / "keys")
        keys.generate_peer(tmp_path / "deep" / "keys", "gpu-box", ["draft"])
        keys.rotate(tmp_path / "deep" / "keys", "gpu-box")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "deep" / "keys").stat().st_mode) == 0o700
    assert {
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "keys").iterdir()
    } == {0o600}


def test_keys_are_never_written_over(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeysError, match="holds keys already"):
        keys.generate_keys(folder)
    with pytest.raises(KeysError, match="has a key named 'draft' already"):
        keys.generate_peer(folder, "draft", ["draft"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    (folder / "draft.key").chmod(mode)
    with pytest.raises(KeysError, match=rf"draft\.key has mode {mode:04o}.*chmod 600"):
        keys.load_own_key(folder, "draft")
    (folder / "coordinator.key").chmod(mode)
    with pytest.raises(KeysError, match=r"coordinator\.key has mode"):
        open_hub("tcp://127.0.0.1:*", keys=folder)


def test_roles_that_others_can_change_are_refused(folder: Path) -> None:
    (folder / "draft.pub").chmod(0o666)
    with pytest.raises(KeysError, match=r"draft\.pub has mode 0666"):
        AllowedPeers(folder)
    (folder / "draft.pub").chmod(0o644)
    folder.chmod(0o777)
    with pytest.raises(KeysError, match="others can write to the folder of keys"):
        AllowedPeers(folder)


def test_a_missing_folder_or_file_is_named_with_the_remedy(folder: Path) -> None:
    with pytest.raises(
        KeysError, match=r"no folder of keys .*nowhere: make one with `dovetail keygen`"
    ):
        keys.load_own_key(folder / "nowhere", "draft")
    (folder / "draft.key").unlink()
    with pytest.raises(KeysError, match=r"draft\.key: No such file or directory; make keys"):
        keys.load_own_key(folder, "draft")
    (folder / "coordinator.pub").unlink()
    with pytest.raises(KeysError, match=r"coordinator\.pub"):
        keys.coordinator_public(folder)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"name": "draft", "roles": ["draft"], "public": "short", "secret": "short"}',
        "[" * 100_000,
        '{"name": "draft", "roles": ["king"]}',
    ],
)
def test_a_damaged_file_is_refused(folder: Path, content: str) -> None:
    (folder / "draft.key").write_text(content)
    (folder / "draft.pub").write_text(content)
    for read in (lambda: keys.load_own_key(folder, "draft"), lambda: AllowedPeers(folder)):
        with pytest.raises(KeysError, match=r"draft\.(key|pub)"):
            read()


@pytest.mark.parametrize("public", ["x" * 40, "\u00e9" * 40, "~" * 40, "#" * 40])
def test_a_public_key_that_is_none_is_refused(folder: Path, public: str) -> None:
    content = json.loads((folder / "draft.key").read_text())
    (folder / "draft.key").write_text(json.dumps({**content, "public": public}))
    with pytest.raises(KeysError, match=r"draft\.key"):
        keys.load_own_key(folder, "draft")


def test_a_file_under_another_name_is_refused(folder: Path) -> None:
    shutil.copy2(folder / "draft.key", folder / "target.key")
    with pytest.raises(KeysError, match="holds the key 'draft'"):
        keys.load_own_key(folder, "target")


@pytest.mark.parametrize(
    "name", ["", "Draft", "../draft", "a/b", "a b", ".hidden", "x" * 65, "coördinator"]
)
def test_a_name_that_is_no_file_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(KeysError, match="cannot name a key"):
        keys.generate_peer(folder, name, ["draft"])
    for change in (keys.rotate, keys.revoke):
        with pytest.raises(KeysError, match="has no key named"):
            change(folder, name)


@pytest.mark.parametrize("roles", [[], ["king"], ["draft", "coordinator"]])
def test_a_peer_needs_roles_that_there_are(folder: Path, roles: list[str]) -> None:
    with pytest.raises(KeysError, match="a key needs roles among draft, target, client"):
        keys.generate_peer(folder, "box", roles)


def test_rotating_keeps_the_roles_and_replaces_both_halves(folder: Path) -> None:
    keys.generate_peer(folder, "box", ["draft", "target"])
    before = keys.load_own_key(folder, "box")
    keys.rotate(folder, "box")
    after = keys.load_own_key(folder, "box")
    assert after.roles == before.roles == ("draft", "target")
    assert {after.public, after.secret}.isdisjoint({before.public, before.secret})
    peers = AllowedPeers(folder)
    assert peers.find(before.public) is None
    assert peers.find(after.public) == PeerKey("box", ("draft", "target"), after.public)


def test_the_coordinator_is_rotated_but_not_revoked(folder: Path) -> None:
    before = keys.coordinator_public(folder)
    keys.rotate(folder, "coordinator")
    assert keys.coordinator_public(folder) != before
    with pytest.raises(KeysError, match="cannot be revoked"):
        keys.revoke(folder, "coordinator")


def test_revoking_removes_both_halves(folder: Path) -> None:
    keys.revoke(folder, "draft")
    assert not list(folder.glob("draft.*"))
    with pytest.raises(
        KeysError, match="has no key named 'draft'; it has client, coordinator, operator, target"
    ):
        keys.revoke(folder, "draft")


def test_secrets_are_in_no_repr(folder: Path) -> None:
    own = keys.load_own_key(folder, "draft")
    assert own.secret not in repr(own)


def test_the_allowed_peers_follow_the_folder(folder: Path) -> None:
    peers = AllowedPeers(folder)
    keys.generate_peer(folder, "late", ["draft"])
    late = keys.load_own_key(folder, "late")
    assert peers.find(late.public) == PeerKey("late", ("draft",), late.public)
    content = json.loads((folder / "late.pub").read_text())
    (folder / "late.pub").write_text(json.dumps({**content, "roles": ["client"]}))
    assert peers.find(late.public) == PeerKey("late", ("client",), late.public)
    (folder / "late.pub").write_text("damaged")
    assert peers.find(late.public) is None
    keys.revoke(folder, "late")
    assert peers.find(late.public) is None
    assert peers.find(keys.coordinator_public(folder)) is None


def test_a_role_is_taken_with_the_key_of_its_name_or_the_only_one_that_may(
    folder: Path, tmp_path: Path
) -> None:
    assert keys.own_key_for(folder, "target").name == "target"
    keys.generate_peer(folder, "box", ["draft", "target"])
    assert keys.own_key_for(folder, "target").name == "target"
    one = only(folder, tmp_path / "one", "box.key", "coordinator.pub")
    assert keys.own_key_for(one, "draft").name == keys.own_key_for(one, "target").name == "box"
    with pytest.raises(KeysError, match=r"must hold the key of a client, and holds no client\.key"):
        keys.own_key_for(one, "client")
    keys.generate_peer(folder, "other", ["draft"])
    shutil.copy2(folder / "other.key", one / "other.key")
    with pytest.raises(KeysError, match="several keys for it: box, other"):
        keys.own_key_for(one, "draft")


def test_a_machine_with_an_operators_key_is_a_clients_too_and_no_other_key_is_an_operators(
    folder: Path, tmp_path: Path
) -> None:
    desk = only(folder, tmp_path / "desk", "operator.key", "coordinator.pub")
    assert {keys.own_key_for(desk, role).name for role in ("client", "operator")} == {"operator"}
    with pytest.raises(KeysError, match=r"no draft\.key"):
        keys.own_key_for(desk, "draft")
    with pytest.raises(KeysError, match=r"no operator\.key.*--role operator"):
        keys.own_key_for(
            only(folder, tmp_path / "other", "client.key", "coordinator.pub"), "operator"
        )


# -- a live hub ------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_the_hub_knows_a_peer_by_its_key(tcp_wire: Wire, role: str) -> None:
    peer = tcp_wire.greet(tcp_wire.dial(role))
    user = tcp_wire.hub.user(peer)
    assert user is not None
    assert (user.name, user.roles) == (role, (role,))


def test_the_roles_are_those_that_the_coordinator_gives_whatever_the_peer_says(
    tcp_wire: Wire, tmp_path: Path
) -> None:
    assert tcp_wire.keys is not None
    elsewhere = only(tcp_wire.keys, tmp_path / "elsewhere", "draft.key", "coordinator.pub")
    content = json.loads((elsewhere / "draft.key").read_text())
    (elsewhere / "draft.key").write_text(
        json.dumps({**content, "roles": ["draft", "target", "client"]})
    )
    with contextlib.closing(open_link(tcp_wire.hub.address, keys=elsewhere, role="target")) as link:
        user = tcp_wire.hub.user(tcp_wire.greet(link))
    assert user is not None
    assert user.roles == ("draft",)


def test_a_machine_needs_its_own_key_and_the_coordinators_public_one_only(
    tcp_wire: Wire, tmp_path: Path
) -> None:
    assert tcp_wire.keys is not None
    with contextlib.closing(
        open_link(
            tcp_wire.hub.address,
            keys=only(tcp_wire.keys, tmp_path / "w", "draft.key", "coordinator.pub"),
            role="draft",
        )
    ) as link:
        tcp_wire.greet(link)
    coordinator = only(tcp_wire.keys, tmp_path / "c", "coordinator.key", "draft.pub")
    with (
        contextlib.closing(open_hub("tcp://127.0.0.1:*", keys=coordinator)) as hub,
        contextlib.closing(open_link(hub.address, keys=tcp_wire.keys, role="draft")),
    ):
        pass


def test_an_unknown_key_is_refused_and_counted(tcp_wire: Wire, tmp_path: Path) -> None:
    assert tcp_wire.keys is not None
    keys.generate_keys(tmp_path / "stranger")
    shutil.copy2(tcp_wire.keys / "coordinator.pub", tmp_path / "stranger" / "coordinator.pub")
    with pytest.raises(
        LinkClosed, match=f"the coordinator at {tcp_wire.hub.address} refuses the key 'draft'"
    ):
        open_link(tcp_wire.hub.address, keys=tmp_path / "stranger", role="draft")
    until(lambda: tcp_wire.hub.refused() == 1, lambda: readable(tcp_wire.hub.monitor_fileno()))
    tcp_wire.greet(tcp_wire.dial())


def test_a_coordinator_of_another_key_is_not_believed(tcp_wire: Wire, tmp_path: Path) -> None:
    keys.generate_keys(tmp_path / "other")
    refusal, timeout_s = "no coordinator answers", 0.3
    while "no coordinator answers" in refusal:  # nothing has answered on a machine that is busy
        with pytest.raises(LinkClosed) as closed:
            open_link(
                tcp_wire.hub.address, keys=tmp_path / "other", role="draft", timeout_s=timeout_s
            )
        refusal, timeout_s = str(closed.value), 4 * timeout_s
    assert f"the peer at {tcp_wire.hub.address} breaks off the connection: " in refusal
    assert "coordinator.pub" in refusal


def test_a_peer_without_keys_is_refused(tcp_wire: Wire) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        with stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_SUCCEEDED
        ) as monitor:
            stranger.connect(tcp_wire.hub.address)
            stranger.send(b"hello")
            assert monitor.poll(1e3 * PATIENCE_S)
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            stranger.disable_monitor()
    assert tcp_wire.hub.receive() is None


def test_a_revoked_peer_is_cut_off_at_once_and_others_are_not(tcp_wire: Wire) -> None:
    assert tcp_wire.keys is not None
    link, other = tcp_wire.dial("draft"), tcp_wire.dial("target")
    peer, stays = tcp_wire.greet(link), tcp_wire.greet(other)
    waiting = tcp_wire.dial("draft")
    keys.revoke(tcp_wire.keys, "draft")
    user = tcp_wire.hub.user(peer)
    assert user is not None
    assert user.roles == ()
    with pytest.raises(PeerGone, match="revoked"):
        tcp_wire.hub.send(peer, [b"x"])
    refused = tcp_wire.hub.refused()
    link.send([b"secret?"])
    waiting.send([b"may I?"])
    other.send([b"still here"])
    assert tcp_wire.arrived() == (stays, [b"still here"])
    until(
        lambda: tcp_wire.hub.receive() is None and tcp_wire.hub.refused() == refused + 2,
        lambda: readable(tcp_wire.hub.fileno()),
    )
    with pytest.raises(KeysError):
        tcp_wire.dial("draft")


def test_a_revoked_key_cannot_connect_again(tcp_wire: Wire, tmp_path: Path) -> None:
    assert tcp_wire.keys is not None
    kept = only(tcp_wire.keys, tmp_path / "kept", "draft.key", "coordinator.pub")
    tcp_wire.greet(tcp_wire.dial("draft"))
    keys.revoke(tcp_wire.keys, "draft")
    with pytest.raises(LinkClosed, match="refuses the key 'draft'"):
        open_link(tcp_wire.hub.address, keys=kept, role="draft")


def test_a_rotated_key_replaces_the_old_one_without_a_restart(
    tcp_wire: Wire, tmp_path: Path
) -> None:
    assert tcp_wire.keys is not None
    kept = only(tcp_wire.keys, tmp_path / "kept", "draft.key", "coordinator.pub")
    keys.rotate(tcp_wire.keys, "draft")
    tcp_wire.greet(tcp_wire.dial("draft"))
    with pytest.raises(LinkClosed, match="refuses the key 'draft'"):
        open_link(tcp_wire.hub.address, keys=kept, role="draft")
