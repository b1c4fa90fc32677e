"""A worker believes its coordinator no more than it is believed: versions, strikes, epochs, and no
path that comes over the wire."""

import json
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dovetail.protocol.codec import EVENT, encode
from dovetail.protocol.errors import LinkClosed, UserError
from dovetail.protocol.messages import (
    MAX_STRIKES,
    Close,
    Closed,
    Drain,
    Hello,
    Probe,
    Probed,
    Welcome,
)
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.loop import serve
from support.memory_links import memory_links
from support.patience import PATIENCE_S

EPOCH = 77
WATCHED = """
import json, sys
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.messages import Close, Open
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.serving.open_target import open_target_worker
folder, secret = sys.argv[1:]
workers = [
    open_target_worker(TargetSettings(model=folder), name="t", threads=1),
    open_draft_worker(DraftSettings(model=folder, device="cpu"), name="d", threads=1, target=""),
    open_draft_worker(DraftSettings(kind="ngram"), name="n", threads=1, target=""),
]
touched = []
sys.addaudithook(lambda event, arguments: touched.append(str(arguments[0])) if event in ("open", "os.listdir", "os.system", "subprocess.Popen") else None)
for worker in workers:
    worker.hello(1)
    for policy in ("heterospec", "dynamic"):
        tree = TreeSettings(policy=policy, thresholds=secret)
        opening = Open(epoch=1, session=1, key=bytes(16), prompt=(2, 3), capacity=20, vocabulary_size=48, sampling=Sampling(), tree=tree)
        try:
            list(worker.handle(opening))
        except Exception as error:
            print(type(error).__name__, file=sys.stderr)
        list(worker.handle(Close(epoch=1, session=1)))
print(json.dumps([path for path in touched if path == secret or path.startswith("/etc")]))
"""  # noqa: E501


class Dialogue:
    """A worker without a model that serves in a thread, and the other end of its link."""

    def __init__(self) -> None:
        self.hub = memory_links()
        self.link = self.hub.connect()
        self.outcome: list[BaseException | Drain | None] = []
        worker = open_draft_worker(DraftSettings(kind="ngram"), name="lookup", threads=1, target="")
        self.thread = threading.Thread(target=self._serve, args=(worker,))
        self.thread.start()
        hello = self.next()
        assert isinstance(hello, Hello)

    def _serve(self, worker: object) -> None:
        try:
            self.outcome.append(serve(self.link, worker))  # type: ignore[arg-type]
        except (LinkClosed, UserError) as error:
            self.outcome.append(error)

    def next(self) -> object:
        while (received := self.hub.receive()) is None:
            assert select.select([self.hub.fileno()], [], [], 20.0)[0], self.outcome
        self.peer, frames = received
        return EVENT.decode(frames)

    def ended(self) -> BaseException | bool:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.outcome[0]


@pytest.mark.parametrize("version", [(0, 9), (1, 0), (99, 0)])
def test_a_coordinator_of_another_version_is_not_served(version: tuple[int, int]) -> None:
    spoken = Dialogue()
    spoken.hub.send(spoken.peer, encode(Welcome(epoch=EPOCH, version=version)))
    refusal = spoken.ended()
    assert isinstance(refusal, UserError)
    assert f"protocol {version[0]}.{version[1]}" in str(refusal)
    spoken.hub.close()


def test_a_coordinator_that_keeps_breaking_the_protocol_is_hung_up_on() -> None:
    spoken = Dialogue()
    spoken.hub.send(spoken.peer, encode(Welcome(epoch=EPOCH)))
    for _ in range(MAX_STRIKES - 1):
        spoken.hub.send(spoken.peer, [b"\xc1"])
    spoken.hub.send(spoken.peer, encode(Probe(epoch=EPOCH, sent_ns=5)))
    probed = spoken.next()
    assert isinstance(probed, Probed)
    assert probed.stale == MAX_STRIKES - 1
    spoken.hub.send(spoken.peer, [b"\xc1"])
    assert spoken.ended() is None
    spoken.hub.close()


def test_what_is_late_is_no_strike() -> None:
    spoken = Dialogue()
    spoken.hub.send(spoken.peer, encode(Welcome(epoch=EPOCH)))
    for _ in range(4 * MAX_STRIKES):
        spoken.hub.send(spoken.peer, encode(Close(epoch=EPOCH + 1, session=1)))
    spoken.hub.send(spoken.peer, encode(Close(epoch=EPOCH, session=1)))
    assert isinstance(spoken.next(), Closed)
    spoken.hub.close()
    spoken.ended()


def test_no_path_that_comes_over_the_wire_is_opened(llama_folder: Path, tmp_path: Path) -> None:
    """The check runs in a process of its own, since what looks at every file that is opened
    cannot be taken away."""
    secret = tmp_path / "secret"
    secret.write_text("0.5,1.0")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(llama_folder), str(secret)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
