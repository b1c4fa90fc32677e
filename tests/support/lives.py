"""A client, its workers, and one coordinator after the other over one journal: the coordinator can
be killed behind any step."""

from pathlib import Path
from typing import Any

from dovetail.protocol.codec import REPLY
from dovetail.protocol.messages import (
    Emitted,
    Failed,
    Finished,
    PromptScored,
    Submit,
    TokenLogprobs,
    Told,
)
from dovetail.protocol.settings import CoordinatorSettings, Sampling
from dovetail.runtime.journal.database import Database
from dovetail.runtime.journal.entries import Entry
from dovetail.runtime.journal.journal import Journal
from support.houses import DYNAMIC, PROMPT, House
from support.scripted import ROOMY, ScriptedTarget, ScriptedWorker, hello

TICKET = "reply/0"
MOST = 60
LONG_PROMPT = tuple(range(5, 45))


class Lives:
    """A client, its workers, and one coordinator after the other over the same journal."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.options = {"limits": ROOMY, **options}
        self.settings = self.options.pop("settings", CoordinatorSettings())
        self.journal = Journal(Database(folder))
        self.house = House(journal=self.journal, settings=self.settings, **self.options)
        self.tokens: list[int] = []
        self.text = self.fingerprint = ""
        self.logprobs: list[TokenLogprobs] = []
        self.scores: list[TokenLogprobs] = []
        self.end: Finished | Failed | None = None

    def ask(self, *, again: bool = False, **changes: Any) -> None:
        """Send the Submit, the first time or once more."""
        fields = {"tokens": PROMPT, "max_tokens": MOST, "seed": 1, "ticket": TICKET, **changes}
        told = Told(
            tokens=len(self.tokens),
            characters=len(self.text),
            scores=len(self.scores),
            fingerprint=self.fingerprint,
        )
        client = self.house.client
        fields |= {"told": told, "again": again, "tree": DYNAMIC}
        fields.setdefault("sampling", Sampling())
        client._send(Submit(epoch=client.epoch, request=1, **fields))

    def take(self, reply: Any) -> None:
        match reply:
            case Emitted():
                assert self.end is None
                self.fingerprint = reply.fingerprint or self.fingerprint
                self.tokens += reply.tokens
                self.text += reply.text
                self.logprobs += reply.logprobs
            case PromptScored():
                assert reply.start == 1 + len(self.scores)
                self.scores += reply.logprobs
            case Finished() | Failed():
                self.end = reply

    def steps(self, count: int) -> None:
        """Let the coordinator and the workers handle what has arrived, in turns."""
        for turn in range(count):
            if turn % 2 == 0:
                self.house.coordinator.pump()
            elif self.house.workers:
                self.house.workers[turn // 2 % len(self.house.workers)].step()
        self.drain()

    def drain(self) -> None:
        """Hear what the link holds, without letting anybody work."""
        link = self.house.client._link
        while (frames := link.take()) is not None:
            self.take(REPLY.decode(frames))

    def run(self) -> None:
        self.house.run()
        self.house.later_ns += 10**9
        self.house.coordinator.tick()
        self.house.run()
        self.drain()

    def killed(self, *, unwritten: bool = True) -> None:
        """The coordinator is killed; `unwritten`: what it has noted and not written is lost."""
        if unwritten:
            self.journal._rows.clear()
        self.drain()
        self.journal._base.close()

    def starts(self, *, workers: bool = True) -> None:
        """Another coordinator begins over the same journal, and everybody comes to it."""
        old = self.house
        self.journal = Journal(Database(self.folder))
        self.house = House(journal=self.journal, settings=self.settings, draft=False, target=False)
        if workers:
            self.join(old)

    def join_another(self) -> None:
        """A target of another fingerprint comes."""
        own = hello("target", epoch=5).fingerprint
        assert own is not None
        other = own.model_copy(update={"weights": "int8"})
        self.house.add(ScriptedTarget, "target", fingerprint=other)

    def join(self, old: House) -> None:
        """The workers of another coordinator come to this one, with what they hold."""
        for worker in old.workers:
            self.comes(worker)
        self.house.run()

    def comes(self, worker: ScriptedWorker) -> None:
        """A worker comes to this coordinator, with what it holds of the one that it has served."""
        served, worker.epoch = worker.coordinator_epoch, worker.epoch + 1000
        held = worker.suspend()
        worker.link = self.house.hub.connect()
        reads = {"reads": old_reads} if (old_reads := self.options.get("reads")) else {}
        head = {**reads, "vocabulary": None} if worker.role == "draft" and reads else {}
        worker.register(limits=worker.limits, served=served if held else None, held=held, **head)
        self.house.workers.append(worker)


def undisturbed(folder: Path, **asked: Any) -> Lives:
    lives = Lives(folder, **asked.pop("house", {}))
    lives.ask(**asked)
    lives.run()
    assert isinstance(lives.end, Finished)
    return lives


def every(journal: Journal) -> dict[str, Entry]:
    """Return all entries by their tickets."""
    found = {ticket: journal._find(ticket) for ticket in journal._known()}
    return {ticket: entry for ticket, entry in found.items() if entry is not None}
