"""A target, a draft and a client that know the wire from its description (`protocol/README.md`)
alone and import nothing of dovetail: pyzmq, msgpack and the standard library.

    python plain.py ROLE ADDRESS VERSION [KEYS]

The target counts: the token after t is t + 1, and the vocabulary has 64 words. The draft proposes a
chain of which the third node is wrong. The client asks for a completion and prints its tokens and
how many of them were drafted.
"""

import hashlib
import json
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

WORDS = 64
PROMPT = [5, 6, 7]
REPLY = 12
WRONG = 2
"""The node of a chain at which the draft errs."""


def tokenizer() -> bytes:
    """A word-level tokenizer.json: token i is the word "wi"."""
    words = {f"w{i}": i for i in range(WORDS)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    split = {"type": "WhitespaceSplit"}
    return json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model}).encode()


def vocabulary() -> dict[str, Any]:
    digest = hashlib.sha256(b"".join(b"%d\0w%d\0" % (i, i) for i in range(WORDS)))
    return {"digest": digest.hexdigest(), "size": WORDS, "end": [], "begin": None, "template": ""}


class Wire:
    """A connection to a coordinator: maps out, maps in."""

    def __init__(self, role: str, address: str, version: str, keys: str | None) -> None:
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 2000)
        if keys is None:
            address += ".w" if role != "client" else ""
        else:
            own, other = (
                json.loads((Path(keys) / name).read_text())
                for name in (f"{role}.key", "coordinator.pub")
            )
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, other["public"].encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own["public"].encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, own["secret"].encode())
        if keys is not None or role != "client":
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1200)
            self.socket.setsockopt(zmq.HEARTBEAT_TTL, 1200)
        self.socket.connect(address)
        self.epoch = secrets.randbits(62)
        self.version = [int(part) for part in version.split(".")]

    def send(self, kind: str, *frames: bytes, **fields: Any) -> None:
        body = {"type": kind, "epoch": self.epoch, **fields}
        self.socket.send_multipart([msgpack.packb(body), *frames])

    def receive(self) -> dict[str, Any]:
        body: dict[str, Any] = msgpack.unpackb(self.socket.recv_multipart()[0])
        return body

    def introduce(self, role: str, *frames: bytes, **fields: Any) -> int:
        """Say Hello; the coordinator's epoch."""
        self.send(
            "hello",
            *frames,
            version=self.version,
            roles=[role],
            name=f"plain-{role}",
            host=socket.gethostname(),
            pid=os.getpid(),
            **fields,
        )
        answer = self.receive()
        if answer["type"] != "welcome":
            raise SystemExit(f"refused: {answer['text']}")
        return int(answer["epoch"])


def work(wire: Wire, role: str, epoch: int) -> None:
    """Answer commands until Drain."""
    logs: dict[int, list[int]] = {}
    proposed: dict[int, list[int]] = {}
    while (command := wire.receive())["type"] != "drain":
        kind = command["type"]
        if command["epoch"] != epoch or kind in ("observe", "engage"):
            continue
        if kind == "probe":
            wire.send(
                "probed",
                sent_ns=command["sent_ns"],
                clock_ns=time.monotonic_ns(),
                busy_ns=0,
                stale=0,
                sessions=len(logs),
                rss_bytes=0,
            )
        elif kind == "close":
            logs.pop(command["session"], None)
            wire.send("closed", session=command["session"])
        elif kind == "open":
            log = logs[command["session"]] = list(command["prompt"])
            about = {"session": command["session"], "round": command["round"]}
            if role == "target":
                log.append((log[-1] + 1) % WORDS)
                wire.send("opened", **about, bonus=log[-1], margin=1.0)
            else:
                proposed[command["session"]] = []
                wire.send("opened", **about)
        elif kind == "draft":
            log, nodes = logs[command["session"]], proposed[command["session"]]
            log += [*(nodes[i] for i in command["accepted"]), command["bonus"], *command["more"]]
            assert len(log) == command["prefix"]
            count = min(4, command["max_nodes"], command["max_depth"])
            chain = [(log[-1] + 1 + i + (i == WRONG)) % WORDS for i in range(count)]
            proposed[command["session"]] = chain
            wire.send(
                "drafted",
                session=command["session"],
                round=command["round"],
                tokens=chain,
                parents=list(range(-1, count - 1)),
                scores=[-0.1 * (i + 1) for i in range(count)],
                grown=count,
                hit=False,
                passes=[[1, 1000]] * count,
            )
        elif kind == "verify":
            wire.send("verified", items=[verdict(logs, item) for item in command["items"]])
        else:
            raise SystemExit(f"a {role} is not asked to {kind}")


def verdict(logs: dict[int, list[int]], item: dict[str, Any]) -> dict[str, Any]:
    """Follow the target's own choices down the tree."""
    log = logs[item["session"]]
    assert len(log) == item["prefix"]
    accepted: list[int] = []
    above = -1
    while True:
        choice = (log[-1] + 1) % WORDS
        log.append(choice)
        below = [
            node
            for node, (token, parent) in enumerate(
                zip(item["tokens"], item["parents"], strict=True)
            )
            if parent == above and token == choice
        ]
        if not below:
            break
        above = below[0]
        accepted.append(above)
    return {
        "session": item["session"],
        "round": item["round"],
        "accepted": accepted,
        "bonus": log[-1],
        "margins": [1.0] * (len(accepted) + 1),
    }


def ask(wire: Wire) -> None:
    """Submit a request and print what comes."""
    wire.send(
        "submit",
        request=1,
        tokens=PROMPT,
        sampling={},
        max_tokens=REPLY,
        tree={"policy": "dynamic", "gamma": 4, "depth": 4, "width": 1, "insist": True},
        seed=0,
    )
    tokens: list[int] = []
    drafted = 0
    while (reply := wire.receive())["type"] == "emitted":
        tokens += reply["tokens"]
        drafted += sum(reply["drafted"])
    if reply["type"] != "finished":
        raise SystemExit(f"failed: {reply['text']}")
    text = reply["result"]["text"]
    print(json.dumps({"tokens": tokens, "drafted": drafted, "text": text}))


def main(role: str, address: str, version: str, keys: str | None = None) -> None:
    wire = Wire(role, address, version, keys)
    if role == "client":
        wire.introduce(role)
        ask(wire)
        return
    limits = {"context": 256, "nodes": 64, "sessions": 4, "kept": 0}
    if role == "draft":
        epoch = wire.introduce(role, limits=limits)
    else:
        data = tokenizer()
        epoch = wire.introduce(
            role,
            data,
            limits=limits,
            fingerprint={"checkpoint": "counting", "weights": "none", "kernels": "plain"},
            vocabulary=vocabulary(),
            tokenizer={"dtype": "uint8", "shape": [len(data)]},
        )
    print("ready", flush=True)
    work(wire, role, epoch)


if __name__ == "__main__":
    main(*sys.argv[1:])
