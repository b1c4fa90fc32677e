"""Workers without a model: they follow the protocol to the letter over a scripted language, in which the next token is a function of the log.

They stand in where a test is about the coordinator. `ScriptedTarget` is the oracle too: `continuation` writes what a target alone would.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.links import Link
from dovetail.protocol.messages import (
    Close,
    Closed,
    Command,
    Draft,
    Drafted,
    Drain,
    Event,
    Failed,
    Fingerprint,
    Hello,
    Limits,
    Open,
    Opened,
    Probe,
    Probed,
    Verified,
    VerifiedItem,
    Verify,
    VocabularyFacts,
    Welcome,
)
from dovetail.protocol.noise import mix
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest

VOCABULARY = 97
END = 0


def tokenizer_bytes(words: int = VOCABULARY, prefix: str = "w") -> bytes:
    """A word-level tokenizer: token i is the word "wi", separated by spaces; token 0 is the special "<end>"."""
    vocabulary = {"<end>": END, **{f"{prefix}{i}": i for i in range(1, words)}}
    added = [{"id": END, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": f"{prefix}1"}
    content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    return json.dumps({"truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None, **content}).encode()


def hello(role: str, *, epoch: int, tokenizer: bytes | None = None, **changes: object) -> Hello:
    """A worker's introduction; with `vocabulary=None`, that of a draft without a model."""
    tokenizer = tokenizer or tokenizer_bytes()
    facts = VocabularyFacts(digest=vocabulary_digest(read_vocabulary(tokenizer)), size=VOCABULARY, end=(END,))
    fields: dict[str, object] = {
        "epoch": epoch,
        "roles": (role,),
        "name": role,
        "host": "here",
        "pid": 1,
        "model": f"scripted-{role}",
        "fingerprint": Fingerprint(checkpoint="0" * 64, weights="fp32", kernels="scripted") if role == "target" else None,
        "limits": Limits(context=512),
        "vocabulary": facts,
        "tokenizer": Array(dtype="uint8", shape=(len(tokenizer),), data=tokenizer) if changes.get("vocabulary", facts) is not None else None,
    }
    return Hello.model_validate({**fields, **changes})


def choice(log: Sequence[int]) -> int:
    """The next token of the scripted language; END about every fortieth time."""
    state = mix(log[-1] + (log[len(log) // 2] << 20) + (len(log) << 40))
    return END if state % 41 == 3 else 1 + state % (VOCABULARY - 1)


def continuation(prompt: Sequence[int], most: int) -> list[int]:
    """What the target alone writes."""
    log = list(prompt)
    while len(log) - len(prompt) < most:
        log.append(choice(log))
        if log[-1] == END:
            break
    return log[len(prompt) :]


@dataclass
class ScriptedWorker:
    """Takes what has arrived and answers it, when told to `step`."""

    link: Link
    role: str
    epoch: int
    coordinator_epoch: int = -1
    logs: dict[int, list[int]] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    seen: list[Command] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    repeat: int = 1
    """How often each answer is sent: a faulty network is played by 2."""
    drained: bool = False

    def register(self, **changes: object) -> None:
        self.link.send(encode(hello(self.role, epoch=self.epoch, **changes)))  # type: ignore[arg-type]

    def step(self) -> int:
        """Handle everything that has arrived; how much that was."""
        handled = 0
        while (frames := self.link.receive(0)) is not None:
            command = COMMAND.decode(frames)
            self.seen.append(command)
            handled += 1
            for event in self.handle(command):
                for _ in range(self.repeat):
                    self.link.send(encode(event))
        return handled

    def handle(self, command: Command) -> list[Event]:
        match command:
            case Welcome():
                self.coordinator_epoch = command.epoch
            case Failed():
                self.failures.append(command)
            case Probe():
                clock_ns = time.monotonic_ns()
                return [Probed(epoch=self.epoch, sent_ns=command.sent_ns, clock_ns=clock_ns, busy_ns=0, stale=0, sessions=len(self.logs), rss_bytes=0)]
            case Drain():
                self.drained = True
            case Close():
                self.logs.pop(command.session, None)
                return [Closed(epoch=self.epoch, session=command.session)]
            case _:
                return self.work(command)
        return []

    def work(self, command: Command) -> list[Event]:
        raise AssertionError(f"a {self.role} worker is not asked to {command.type}")


class ScriptedTarget(ScriptedWorker):
    def work(self, command: Command) -> list[Event]:
        if isinstance(command, Open):
            log = self.logs[command.session] = list(command.prompt)
            self.rounds[command.session] = 0
            log.append(choice(log))
            return [Opened(epoch=self.epoch, session=command.session, bonus=log[-1], margin=1.0, spans=(("prefill", time.monotonic_ns(), 1000),))]
        assert isinstance(command, Verify)
        items = []
        for item in command.items:
            log = self.logs[item.session]
            assert item.prefix == len(log)
            assert item.round == self.rounds[item.session] + 1
            self.rounds[item.session] = item.round
            accepted, bonus = walk(log, item.tree)
            log += [*(item.tokens[n] for n in accepted), bonus]
            items.append(VerifiedItem(session=item.session, round=item.round, accepted=tuple(accepted), bonus=bonus, margins=(1.0,) * (len(accepted) + 1)))
        return [Verified(epoch=self.epoch, items=tuple(items), spans=(("verify", time.monotonic_ns(), 1000),))]


class ScriptedDraft(ScriptedWorker):
    """Proposes two continuations at every level, of which one is right until `wrong_after` levels down."""

    wrong_after = 3
    last: dict[int, Drafted]

    def work(self, command: Command) -> list[Event]:
        self.last = getattr(self, "last", {})
        if isinstance(command, Open):
            self.logs[command.session] = list(command.prompt)
            self.last.pop(command.session, None)
            return [Opened(epoch=self.epoch, session=command.session)]
        assert isinstance(command, Draft)
        log = self.logs[command.session]
        log += [*(self.last[command.session].tokens[n] for n in command.accepted), command.bonus]
        assert command.prefix == len(log)
        drafted = self.propose(command, log)
        self.last[command.session] = drafted
        return [drafted]

    def propose(self, command: Draft, log: list[int]) -> Drafted:
        tokens, parents, path, parent = [], [], list(log), ROOT
        for depth in range(min(command.max_depth, command.max_nodes // 2)):
            right = choice(path)
            guess = right if depth < self.wrong_after else 1 + right % (VOCABULARY - 1)
            other = 1 + (guess + 5) % (VOCABULARY - 1)
            tokens += [other, guess] if other != guess else [1 + (guess + 7) % (VOCABULARY - 1), guess]
            parents += [parent, parent]
            parent = len(tokens) - 1
            path.append(guess)
        scores = tuple(-float(i) for i in range(len(tokens)))
        return Drafted(
            epoch=self.epoch,
            session=command.session,
            round=command.round,
            tokens=tuple(tokens),
            parents=tuple(parents),
            scores=scores,
            grown=len(tokens),
            hit=False,
        )


def walk(log: Sequence[int], tree: TokenTree) -> tuple[list[int], int]:
    """Follow the scripted language down the tree."""
    path, accepted, node = list(log), [], ROOT
    while True:
        token = choice(path)
        child = tree.children.get(node, {}).get(token)
        if child is None:
            return accepted, token
        accepted.append(child)
        path.append(token)
        node = child
