"""The speaker is known: an identity cannot be stolen, a role is a key's, and no way of listening
does without the judge."""

import ast
import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from dovetail.protocol import keys
from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.links import Link, open_hub, open_link, sockets
from dovetail.protocol.links.handshakes import DOMAIN
from dovetail.protocol.links.sockets import ZmqHub
from dovetail.protocol.messages import Dismissed, Failed, Finished, Hello
from dovetail.protocol.settings import CoordinatorSettings, HttpSettings, TreeSettings
from dovetail.runtime.client import Client
from dovetail.runtime.engine.coordinator import Coordinator
from support.patience import PATIENCE_S
from support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker, continuation, hello
from support.wires import Wire, readable, until

ROOT = Path(__file__).resolve().parents[2]
READY = b"\x05READY"


# -- listening -------------------------------------------------------------------------------------


def test_nothing_listens_beyond_this_machine_by_itself() -> None:
    assert CoordinatorSettings().listen == "ipc"
    assert HttpSettings().host == "127.0.0.1"


def test_the_socket_of_a_hub_over_tcp_demands_the_judge_whatever_its_address(
    tcp_wire: Wire,
) -> None:
    assert isinstance(tcp_wire.hub, ZmqHub)
    raw = tcp_wire.hub._socket
    assert raw.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1
    assert raw.getsockopt(zmq.ZAP_DOMAIN).rstrip(b"\0") == DOMAIN
    assert raw.getsockopt(zmq.MECHANISM) == zmq.CURVE
    assert raw.getsockopt(zmq.CURVE_SERVER) == 1


def test_without_its_judge_a_hub_over_tcp_lets_nobody_in(
    tcp_wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket alone, as if the thread that judges had never been."""
    monkeypatch.setattr(sockets, "start_judge", lambda *_: None)
    with (
        contextlib.closing(open_hub("tcp://127.0.0.1:*", keys=tcp_wire.keys)) as hub,
        pytest.raises(Exception, match=r"breaks off the connection|within"),
    ):
        open_link(hub.address, keys=tcp_wire.keys, role="draft", timeout_s=0.5)


# -- a stolen identity -----------------------------------------------------------------------------


def speak(path: str, identity: bytes) -> socket.socket:
    """A peer that says ZMTP 3.1 by hand, so that it may call itself what no library would."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(PATIENCE_S)
    peer.connect(path)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        greeting += peer.recv(64 - len(greeting))
    fields = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = READY + b"".join(
        struct.pack(">B", len(name)) + name + struct.pack(">I", len(value)) + value
        for name, value in fields
    )
    peer.sendall(struct.pack(">BB", 4, len(body)) + body)
    return peer


def say(peer: socket.socket, message: bytes) -> None:
    """One frame, the last of its message."""
    peer.sendall(struct.pack(">BB", 0, len(message)) + message)


def test_a_peer_that_speaks_by_hand_is_heard(ipc_wire: Wire) -> None:
    """Otherwise the next test would show nothing."""
    with speak(ipc_wire.hub.address.removeprefix("ipc://"), b"anybody") as peer:
        say(peer, b"me")
        assert ipc_wire.arrived() == (b"anybody", [b"me"])


def test_an_identity_that_is_in_use_cannot_be_taken_over(ipc_wire: Wire) -> None:
    link = ipc_wire.dial()
    owner = ipc_wire.greet(link)
    with speak(ipc_wire.hub.address.removeprefix("ipc://"), owner) as thief:
        say(thief, b"stolen")
        with speak(ipc_wire.hub.address.removeprefix("ipc://"), b"later") as later:
            say(later, b"mine too")
            assert ipc_wire.arrived() == (b"later", [b"mine too"])
        link.send([b"mine"])
        assert ipc_wire.arrived() == (owner, [b"mine"])
        ipc_wire.hub.send(owner, [b"secret"])
        assert link.receive(PATIENCE_S) == [b"secret"]
        assert ipc_wire.hub.receive() is None


# -- a role ----------------------------------------------------------------------------------------


class Deployment:
    """A coordinator over tcp with keys, stepped by hand."""

    def __init__(self, wire: Wire, stack: contextlib.ExitStack) -> None:
        self.wire, self._stack = wire, stack
        self.coordinator = Coordinator(wire.hub)
        self.workers: list[ScriptedWorker] = []

    def step(self) -> None:
        self.coordinator.look_around()
        self.coordinator.pump()
        self.coordinator.tick()
        for worker in self.workers:
            worker.step()

    def add(self, kind: type[ScriptedWorker], role: str) -> ScriptedWorker:
        worker = kind(self.wire.dial(role), role, epoch=100 + len(self.workers))
        self.workers.append(worker)
        worker.register()
        until(lambda: worker.coordinator_epoch != -1, self.step)
        return worker

    def peer(self, role: str) -> bytes:
        """The address of the worker of a role."""
        return next(
            peer
            for peer, worker in self.coordinator.registry.workers.items()
            if worker.hello.roles == (role,)
        )

    def client(self, role: str = "client") -> Client:
        link = self.wire.dial(role)
        receive = link.receive
        link.receive = lambda timeout_s: (self.step(), receive(0.01))[1]  # type: ignore[method-assign,assignment]
        return Client(link)

    def answer(self, link: Link) -> object:
        """Return the answer that a peer gets."""
        answers: list[object] = []

        def heard() -> bool:
            if (frames := link.receive(0.0)) is not None:
                answers.append(REPLY.decode(frames))
            return bool(answers)

        until(heard, self.step)
        return answers[0]


@pytest.fixture
def deployment_over_tcp(tcp_wire: Wire) -> Iterator[Deployment]:
    with contextlib.ExitStack() as stack:
        yield Deployment(tcp_wire, stack)


@pytest.mark.parametrize(
    ("key", "role"),
    [
        ("draft", "target"),
        ("client", "target"),
        ("client", "draft"),
        ("target", "draft"),
        ("draft", "client"),
    ],
)
def test_a_key_takes_no_role_that_is_not_its_own(
    deployment_over_tcp: Deployment, key: str, role: str
) -> None:
    link = deployment_over_tcp.wire.dial(key)
    introduction = (
        Hello(epoch=7, roles=("client",), name="me", host="here", pid=1)
        if role == "client"
        else hello(role, epoch=7)
    )
    link.send(encode(introduction))
    answer = deployment_over_tcp.answer(link)
    assert isinstance(answer, Failed)
    assert answer.code == "role"
    assert not deployment_over_tcp.coordinator.registry.workers
    assert not deployment_over_tcp.coordinator.registry.clients


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_worker_whose_key_is_revoked_in_the_middle_costs_its_session_no_token(
    deployment_over_tcp: Deployment, role: str
) -> None:
    """It owes an answer that is never to arrive. A session without its target goes on with the next
    one."""
    house = deployment_over_tcp
    assert house.wire.keys is not None
    keys.generate_peer(house.wire.keys, "other", ["target"])
    workers = {
        "target": house.add(ScriptedTarget, "target"),
        "draft": house.add(ScriptedDraft, "draft"),
    }
    client = house.client()
    request = client.submit(
        tokens=(5, 6, 7), max_tokens=60, seed=1, tree=TreeSettings(policy="dynamic", insist=True)
    )
    until(
        lambda: any(live.session.round > 1 for live in house.coordinator._running.values()),
        house.step,
    )
    house.workers.remove(workers[role])
    until(lambda: bool(house.coordinator.registry.workers[house.peer(role)].turns.owed), house.step)
    keys.revoke(house.wire.keys, role)
    until(
        lambda: all(
            worker.hello.roles != (role,) for worker in house.coordinator.registry.workers.values()
        ),
        house.step,
    )
    if role == "target":
        (house.wire.keys / "other.key").rename(house.wire.keys / "target.key")
        content = json.loads((house.wire.keys / "target.key").read_text())
        (house.wire.keys / "target.key").write_text(json.dumps({**content, "name": "target"}))
        house.add(ScriptedTarget, "target")
    ends: list[Finished] = []

    def ended() -> bool:
        reply = client.receive(0.01)
        if isinstance(reply, Finished):
            ends.append(reply)
        return bool(ends)

    until(ended, house.step)
    assert ends[0].request == request
    assert list(ends[0].result.token_ids) == continuation((5, 6, 7), 60)


def changed(house: Deployment, client: Client) -> object:
    """Return the answer to a client that has asked for a change of workers."""
    answers: list[object] = []

    def answered() -> bool:
        reply = client.receive(0.01)
        answers.extend([reply] if isinstance(reply, Failed | Dismissed) else [])
        return bool(answers)

    until(answered, house.step)
    return answers[0]


def test_over_tcp_only_an_operators_key_changes_workers(deployment_over_tcp: Deployment) -> None:
    house = deployment_over_tcp
    house.add(ScriptedTarget, "target")
    draft = house.add(ScriptedDraft, "draft")
    client, operator = house.client(), house.client("operator")
    for ask in (lambda: client.swap(draft.epoch, None), lambda: client.dismiss(draft.epoch)):
        ask()
        refusal = changed(house, client)
        assert isinstance(refusal, Failed)
        assert refusal.code == "role"
        assert "swapping and draining need an operator key, but 'client' is not one" in refusal.text
    assert len(house.coordinator.registry.workers) == 2
    operator.dismiss(draft.epoch)
    assert isinstance(changed(house, operator), Dismissed)
    assert len(house.coordinator.registry.workers) == 1


def test_over_ipc_whoever_is_let_in_changes_workers(ipc_wire: Wire) -> None:
    with contextlib.ExitStack() as stack:
        house = Deployment(ipc_wire, stack)
        house.add(ScriptedTarget, "target")
        draft, owner = house.add(ScriptedDraft, "draft"), house.client("operator")
        owner.dismiss(draft.epoch)
        assert isinstance(changed(house, owner), Dismissed)


def test_a_stranger_is_neither_heard_nor_answered(tcp_wire: Wire) -> None:
    public, secret = zmq.curve_keypair()
    assert tcp_wire.keys is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = (
            keys.coordinator_public(tcp_wire.keys).encode(),
            public,
            secret,
        )
        stranger.connect(tcp_wire.hub.address)
        stranger.send(encode(Hello(epoch=7, roles=("client",), name="me", host="here", pid=1))[0])
        until(lambda: tcp_wire.hub.refused() > 0, lambda: readable(tcp_wire.hub.monitor_fileno()))
        assert tcp_wire.hub.receive() is None
        assert not stranger.poll(100)


# -- what is written -------------------------------------------------------------------------------


SOURCES = [
    path
    for folder in ("protocol", "runtime", "workers", "launch")
    for path in (ROOT / folder).rglob("*.py")
]
RUNS = {"eval", "exec", "compile", "__import__"}


def test_no_variable_of_the_environment_allows_what_is_not_allowed() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8").lower()
        assert not any(
            word in text
            for word in (
                "allow_insecure",
                "insecure_serialization",
                "allow_pickle=true",
                "trust_request_chat_template",
            )
        ), path


def test_nothing_runs_text_as_code() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in RUNS, f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert ast.unparse(node.value) == "False", path


def test_no_serialiser_that_runs_code_is_imported_by_a_process_of_ours() -> None:
    """`pickle` itself comes with the standard library's own modules; what would use it for messages
    does not."""
    code = (
        "import sys; import dovetail.launch.commands.coordinator; sys.exit(bool({'cloudpickle', "
        "'dill', 'joblib', 'shelve'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_keys_of_the_api_are_compared_in_constant_time() -> None:
    tree = ast.parse(
        (ROOT / "runtime" / "http" / "serving" / "guard.py").read_text(encoding="utf-8")
    )
    (method,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_key"
    ]
    assert "hmac.compare_digest" in ast.unparse(method)
    compared = [ast.unparse(node) for node in ast.walk(method) if isinstance(node, ast.Compare)]
    assert compared == ["scheme.lower() != b'bearer'"]
