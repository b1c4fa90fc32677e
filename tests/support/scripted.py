"""Workers without a model: they follow the protocol to the letter over a scripted language, in
which the next token is a function of the log.

They stand in where a test is about the coordinator. `ScriptedTarget` is the oracle too:
`continuation` writes what a target alone would. A draft that reads its target checks every row of
features: they say which token they are of, and where it stands. Each worker checks that what it is
asked to keep is no more than it said, and that what a session goes on from are rows that it has, of
tokens that the prompt begins with.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.protocol.arrays import Array, stack
from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.links import Link
from dovetail.protocol.messages import (
    Close,
    Closed,
    Command,
    Draft,
    Drafted,
    Drafts,
    Drain,
    Engage,
    Event,
    Failed,
    Fed,
    Feed,
    Fingerprint,
    HeldSession,
    Hello,
    Limits,
    Observe,
    Open,
    Opened,
    Prefilled,
    Probe,
    Probed,
    Read,
    Reading,
    ReadItem,
    Reads,
    Refed,
    Refeed,
    Scored,
    States,
    TokenLogprobs,
    Verified,
    VerifiedItem,
    Verify,
    VerifyItem,
    VocabularyFacts,
    Welcome,
)
from dovetail.protocol.noise import mix
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest

VOCABULARY = 97
END = 0
STATES = States(width=3, layers=8, checkpoint="c" * 64)
READS = Reads(
    taps=(2, 5),
    width=STATES.width,
    dtype="bfloat16",
    vocabulary_size=VOCABULARY,
    trained_for=STATES.checkpoint,
)
"""The features that a scripted draft may read of the scripted target."""
PART = 2
"""Tokens of a prompt that the scripted target reads at a time."""
ROOMY = Limits(context=512, kept=1 << 16, together=64)
"""The limits of a worker that keeps whatever has ended."""


def tokenizer_bytes(words: int = VOCABULARY, prefix: str = "w") -> bytes:
    """A word-level tokenizer: token i is the word "wi", separated by spaces; token 0 is the special
    "<end>"."""
    vocabulary = {"<end>": END, **{f"{prefix}{i}": i for i in range(1, words)}}
    added = [
        {
            "id": END,
            "content": "<end>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": f"{prefix}1"}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    return json.dumps(
        {
            "truncation": None,
            "padding": None,
            "normalizer": None,
            "post_processor": None,
            "decoder": None,
            **content,
        }
    ).encode()


def hello(role: str, *, epoch: int, tokenizer: bytes | None = None, **changes: object) -> Hello:
    """A worker's introduction; with `vocabulary=None`, that of a draft without a model."""
    tokenizer = tokenizer or tokenizer_bytes()
    facts = VocabularyFacts(
        digest=vocabulary_digest(read_vocabulary(tokenizer)), size=VOCABULARY, end=(END,)
    )
    fields: dict[str, object] = {
        "epoch": epoch,
        "roles": (role,),
        "name": role,
        "host": "here",
        "pid": 1,
        "model": f"scripted-{role}",
        "fingerprint": Fingerprint(checkpoint="0" * 64, weights="fp32", kernels="scripted")
        if role == "target"
        else None,
        "limits": Limits(context=512, together=64),
        "states": STATES if role == "target" else None,
        "vocabulary": facts,
        "tokenizer": Array(dtype="uint8", shape=(len(tokenizer),), data=tokenizer)
        if changes.get("vocabulary", facts) is not None
        else None,
    }
    return Hello.model_validate({**fields, **changes})


def choice(log: Sequence[int]) -> int:
    """The next token of the scripted language; END about every fortieth time."""
    state = mix(log[-1] + (log[len(log) // 2] << 20) + (len(log) << 40))
    return END if state % 41 == 3 else 1 + state % (VOCABULARY - 1)


def continuation(prompt: Sequence[int], most: int) -> list[int]:
    """Return what the target alone writes."""
    log = list(prompt)
    while len(log) - len(prompt) < most:
        log.append(choice(log))
        if log[-1] == END:
            break
    return log[len(prompt) :]


def logprobs(log: Sequence[int], place: int, top: int) -> TokenLogprobs:
    """Return what the scripted target thinks of a token of a log: numbers made of all that is
    before it."""
    seed = mix(
        sum((token + 1) << (at % 40) for at, token in enumerate(log[:place])) + (place << 42)
    )
    best = tuple((1 + (seed + rank) % (VOCABULARY - 1), -rank / 8) for rank in range(top))
    return TokenLogprobs(logprob=-float(mix(seed + log[place]) % 1000) / 64, top=best)


def features(log: Sequence[int], start: int, stop: int, reads: Reads) -> Array:
    """Rows of positions start..stop-1 of a log: each number is made of the token and its
    position."""
    rows = (
        ((131 * token + place) & 0xFFFF).to_bytes(2, "little") * reads.row
        for place, token in enumerate(log[start:stop], start)
    )
    return Array(dtype=reads.dtype, shape=(stop - start, reads.row), data=b"".join(rows))


@dataclass
class ScriptedWorker:
    """Takes what has arrived and answers it, when told to `step`."""

    link: Link
    role: str
    epoch: int
    coordinator_epoch: int = -1
    logs: dict[int, list[int]] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    """The logs of ended sessions that it has rows of; `rows`: how many."""
    rows: dict[int, int] = field(default_factory=dict)
    begun: dict[int, Open | Refeed] = field(default_factory=dict)
    """By session: the command with which a log began to be read in chunks; `done`: the rows of it
    that have been read."""
    done: dict[int, int] = field(default_factory=dict)
    limits: Limits | None = None
    seen: list[Command] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    repeat: int = 1
    """The number of times that each answer is sent; 2 plays a faulty network."""
    drained: bool = False
    standby: bool = False
    fine: bool = False
    """True if it was last asked for fine spans."""

    def register(self, **changes: object) -> None:
        introduction = hello(self.role, epoch=self.epoch, **changes)  # type: ignore[arg-type]
        self.standby = introduction.standby
        self.limits = introduction.limits
        self.link.send(encode(introduction))

    def step(self, most: int = 1 << 30) -> int:
        """Handle at most `most` of the messages that have arrived; return how many."""
        handled = 0
        while handled < most and (frames := self.link.receive(0)) is not None:
            command = COMMAND.decode(frames)
            self.seen += command.split() if isinstance(command, Drafts) else [command]
            handled += 1
            for event in self.handle(command):
                for _ in range(self.repeat):
                    self.link.send(encode(event))
        return handled

    def handle(self, command: Command) -> list[Event]:
        match command:
            case Welcome():
                self.coordinator_epoch = command.epoch
                self.kept = {one: log for one, log in self.kept.items() if one in command.keeps}
            case Failed():
                self.failures.append(command)
            case Probe():
                clock_ns = time.monotonic_ns()
                return [
                    Probed(
                        epoch=self.epoch,
                        sent_ns=command.sent_ns,
                        clock_ns=clock_ns,
                        busy_ns=0,
                        stale=0,
                        sessions=len(self.logs),
                        rss_bytes=0,
                    )
                ]
            case Engage():
                self.standby = False
            case Observe():
                self.fine = command.fine
            case Drain():
                self.drained = True
            case Close():
                self.close(command)
                return [Closed(epoch=self.epoch, session=command.session)]
            case _:
                return self.work(command)
        return []

    def close(self, command: Close) -> None:
        log = self.logs.pop(command.session, None)
        if self.begun.pop(command.session, None) is not None and log is not None:
            assert not command.keep
        if not command.keep:
            self.kept.pop(command.session, None)
        elif log is not None:
            assert self.limits is not None
            self.kept[command.session], self.rows[command.session] = (
                log,
                self.rows_of(command.session, log),
            )
            assert sum(map(len, self.kept.values())) <= self.limits.kept

    def suspend(self) -> tuple[HeldSession, ...]:
        """Close every session, since the coordinator has gone; what is left of these and others."""
        for session, log in self.logs.items():
            begun = session in self.begun
            self.rows[session] = self.done[session] if begun else self.rows_of(session, log)
            if self.rows[session]:
                self.kept[session] = log
        for state in (self.logs, self.begun, self.done, self.rounds):
            state.clear()
        return tuple(HeldSession(session=one, rows=self.rows[one]) for one in self.kept)

    def rows_of(self, session: int, log: Sequence[int]) -> int:
        """The root has none."""
        return len(log) - 1

    def take_over(self, command: Open, *, known: int = 0) -> Failed | None:
        """A session's log begins; what it goes on from is no more, or is shared. `known`: tokens
        behind a row that it was made with."""
        base, kept = command.base, command.kept
        assert command.session not in {*self.logs, *self.kept}, "workers drop it as sent twice"
        assert self.limits is not None
        assert self.limits.shares or not command.shared
        if base is None:
            assert kept == 0
        elif command.shared and base in self.logs:
            log = self.logs[base]
            opening = isinstance(self.begun.get(base), Open)
            rows = self.done[base] if opening else self.rows_of(base, log)
            assert kept < len(command.prompt)
            assert kept <= rows
            assert tuple(log[: kept + known]) == command.prompt[: kept + known]
        elif base not in self.kept:
            return Failed(
                epoch=self.epoch,
                session=command.session,
                round=command.round,
                code="prefix",
                text=f"session {base} is not kept",
            )
        else:
            log = self.kept[base] if command.shared else self.kept.pop(base)
            assert kept < len(command.prompt)
            assert kept <= self.rows[base]
            assert tuple(log[: kept + known]) == command.prompt[: kept + known]
        self.logs[command.session] = list(command.prompt)
        return None

    def work(self, command: Command) -> list[Event]:
        raise AssertionError(f"a {self.role} worker is not asked to {command.type}")

    def begin(self, command: Open | Refeed, done: int) -> list[Event]:
        """A log is read, or its first rows."""
        assert self.limits is not None
        assert command.read is None or self.limits.prompt_rows
        self.begun[command.session], self.done[command.session] = command, done
        return self.read_on(command.session, command.read)

    def read(self, item: ReadItem) -> list[Event]:
        command = self.begun[item.session]
        assert (item.round, item.start) == (command.round, self.done[item.session])
        return self.read_on(item.session, item.rows)

    def read_on(self, session: int, rows: int | None) -> list[Event]:
        """Read so many rows more, or all."""
        command, start = self.begun[session], self.done[session]
        total = len(command.prompt) if isinstance(command, Open) else command.prefix - 1
        stop = total if rows is None else min(total, start + rows)
        self.done[session] = stop
        told = self.tell_rows(command, start, stop)
        if stop == total:
            del self.begun[session]
            return [*told, self.end_reading(command)]
        spans = (("prefill", time.monotonic_ns(), 1000),)
        about: dict[str, Any] = {"epoch": self.epoch, "session": session, "round": command.round}
        return [*told, Reading(**about, done=stop, spans=spans)]

    def tell_rows(self, command: Open | Refeed, start: int, stop: int) -> list[Event]:
        """Return the events of the rows `start` to `stop` - 1 of a log: features, scores."""
        return []

    def end_reading(self, command: Open | Refeed) -> Event:
        raise AssertionError(f"a {self.role} worker reads nothing")


class ScriptedTarget(ScriptedWorker):
    opens: dict[int, Open]
    held_rows: dict[int, int]
    """Rows of features that it holds, by session."""

    def work(self, command: Command) -> list[Event]:
        if isinstance(command, Open):
            return self.open(command)
        if isinstance(command, Refeed):
            return self.refeed(command)
        if isinstance(command, Read):
            return self.read(command.item)
        assert isinstance(command, Verify)
        kinds: dict[tuple[Reads | None, bool], list[VerifyItem]] = {}
        for item in command.items:
            if (begun := self.begun.pop(item.session, None)) is not None:
                assert isinstance(begun, Refeed)
            kinds.setdefault((self.opens[item.session].features, item.hold), []).append(item)
        verdicts = [self.verify(items, reads) for (reads, _), items in kinds.items()]
        return [*verdicts, *(event for item in command.reads for event in self.read(item))]

    def open(self, command: Open) -> list[Event]:
        if (refusal := self.take_over(command)) is not None:
            return [refusal]
        log = self.logs[command.session]
        self.rounds[command.session] = command.round
        self.held_rows = {**getattr(self, "held_rows", {}), command.session: 0}
        self.opens = {**getattr(self, "opens", {}), command.session: command}
        shown_from = command.kept if command.features_from is None else command.features_from
        assert command.kept <= shown_from <= len(log)
        return self.begin(command, command.kept)

    def refeed(self, command: Refeed) -> list[Event]:
        log = self.logs[command.session]
        assert (command.prefix, command.round) == (len(log), self.rounds[command.session] + 1)
        return self.begin(command, 0)

    def tell_rows(self, command: Open | Refeed, start: int, stop: int) -> list[Event]:
        if isinstance(command, Refeed):
            return self.show(command, command.features, max(start, command.start), stop)
        shown_from = command.kept if command.features_from is None else command.features_from
        shown = self.show(command, command.features, max(start, shown_from), stop)
        return [*shown, *self.score(command, start + 1, min(stop + 1, len(command.prompt)))]

    def end_reading(self, command: Open | Refeed) -> Event:
        about: dict[str, Any] = {
            "epoch": self.epoch,
            "session": command.session,
            "round": command.round,
        }
        spans = (("prefill", time.monotonic_ns(), 1000),)
        if isinstance(command, Refeed):
            opened = self.opens[command.session]
            self.opens[command.session] = opened.model_copy(update={"features": command.features})
            self.held_rows[command.session] = 0
            return Refed(**about, spans=spans)
        log = self.logs[command.session]
        log.append(choice(log))
        (said,) = self.say(command, log, 1) or (None,)
        return Opened(**about, bonus=log[-1], margin=1.0, logprobs=said, spans=spans)

    def show(
        self, command: Open | Refeed, reads: Reads | None, start: int, stop: int
    ) -> list[Event]:
        """Features of positions start..stop-1, a part at a time."""
        if reads is None:
            return []
        log = self.logs[command.session]
        about: dict[str, Any] = {
            "epoch": self.epoch,
            "session": command.session,
            "round": command.round,
        }
        return [
            Prefilled(**about, start=at, features=features(log, at, min(at + PART, stop), reads))
            for at in range(start, stop, PART)
        ]

    def score(self, command: Open, first: int, stop: int) -> list[Event]:
        """Return the scores of the tokens `first` to `stop` - 1 of a prompt, in several events."""
        if not command.scored:
            return []
        assert command.base is None
        assert command.logprobs is not None
        prompt, top = command.prompt, command.logprobs
        starts = range(first, stop, PART)
        parts = [
            tuple(logprobs(prompt, place, top) for place in range(start, min(start + PART, stop)))
            for start in starts
        ]
        about: dict[str, Any] = {
            "epoch": self.epoch,
            "session": command.session,
            "round": command.round,
        }
        return [
            Scored(**about, start=start, logprobs=part)
            for start, part in zip(starts, parts, strict=True)
        ]

    def say(self, command: Open, log: Sequence[int], tokens: int) -> tuple[TokenLogprobs, ...]:
        """Return what it thinks of the last so many tokens, if it is asked."""
        if command.logprobs is None:
            return ()
        return tuple(
            logprobs(log, place, command.logprobs) for place in range(len(log) - tokens, len(log))
        )

    def verify(self, asked: Sequence[VerifyItem], reads: Reads | None) -> Verified:
        items, read = [], []
        for item in asked:
            log = self.logs[item.session]
            assert item.prefix == len(log)
            assert item.round == self.rounds[item.session] + 1
            self.rounds[item.session] = item.round
            accepted, bonus = walk(log, item.tree)
            log += [*(item.tokens[n] for n in accepted), bonus]
            tokens = 1 + len(accepted)
            said = self.say(self.opens[item.session], log, tokens)
            path, margins = tuple(accepted), (1.0,) * tokens
            items.append(
                VerifiedItem(
                    session=item.session,
                    round=item.round,
                    accepted=path,
                    bonus=bonus,
                    margins=margins,
                    logprobs=said,
                    held=0 if item.hold else self.held_rows[item.session],
                )
            )
            if reads is not None and item.hold:
                self.held_rows[item.session] += tokens
            elif reads is not None:
                self.held_rows[item.session] = 0
                first = item.prefix - 1 - items[-1].held
                read.append(features(log, first, len(log) - 1, reads))
        return Verified(
            epoch=self.epoch,
            items=tuple(items),
            spans=(("verify", time.monotonic_ns(), 1000),),
            features=stack(read) if read else None,
        )


class ScriptedDraft(ScriptedWorker):
    """Proposes two continuations at every level, of which one is right until `wrong_after` levels
    down."""

    wrong_after = 3
    last: dict[int, Drafted]
    fed: dict[int, int]
    """Rows of features that were read, where the draft reads its target."""
    reads: Reads | None = None

    def register(self, **changes: object) -> None:
        self.reads = changes.get("reads")  # type: ignore[assignment]
        super().register(**changes)

    def work(self, command: Command) -> list[Event]:
        self.last, self.fed = getattr(self, "last", {}), getattr(self, "fed", {})
        if isinstance(command, Open):
            if (refusal := self.take_over(command, known=int(self.reads is not None))) is not None:
                return [refusal]
            assert (command.logprobs, command.scored) == (None, False)
            self.last.pop(command.session, None)
            self.fed[command.session], self.rounds[command.session] = command.kept, command.round
            assert command.features == self.reads
            return self.begin(command, command.kept)
        if isinstance(command, Read):
            return self.read(command.item)
        if isinstance(command, Feed):
            assert command.round == self.rounds[command.session]
            self.read_features(command.session, command.start, command.features)
            return [
                Fed(
                    epoch=self.epoch,
                    session=command.session,
                    round=command.round,
                    start=command.start,
                )
            ]
        if isinstance(command, Drafts):
            return [event for order in command.split() for event in self.work(order)]
        assert isinstance(command, Draft)
        assert command.session not in self.begun
        log, last = self.logs[command.session], self.rounds[command.session]
        assert last < command.round <= last + 1 + len(command.more)
        self.rounds[command.session] = command.round
        log += [
            *(self.last[command.session].tokens[n] for n in command.accepted),
            command.bonus,
            *command.more,
        ]
        assert command.prefix == len(log)
        if self.reads is None:
            assert command.features is None
        else:
            if command.features is not None:
                self.read_features(command.session, self.fed[command.session], command.features)
            assert self.fed[command.session] == len(log) - 1
        drafted = self.propose(command, log)
        self.last[command.session] = drafted
        return [drafted]

    def end_reading(self, command: Open | Refeed) -> Event:
        return Opened(epoch=self.epoch, session=command.session, round=command.round)

    def rows_of(self, session: int, log: Sequence[int]) -> int:
        """Return how many rows it has. If it reads its target, these are the ones that features
        have come for, of tokens with one behind them; else it computes those that are missing."""
        return len(log) if self.reads is None else min(self.fed[session], len(log) - 1)

    def read_features(self, session: int, start: int, rows: Array) -> None:
        assert self.reads is not None
        assert start == self.fed[session]
        self.fed[session] += rows.shape[0]
        assert rows == features(self.logs[session], start, self.fed[session], self.reads)

    def propose(self, command: Draft, log: list[int]) -> Drafted:
        tokens, parents, path, parent = [], [], list(log), ROOT
        for depth in range(min(command.max_depth, command.max_nodes // 2)):
            right = choice(path)
            guess = right if depth < self.wrong_after else 1 + right % (VOCABULARY - 1)
            other = 1 + (guess + 5) % (VOCABULARY - 1)
            tokens += (
                [other, guess] if other != guess else [1 + (guess + 7) % (VOCABULARY - 1), guess]
            )
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


class DrawingDraft(ScriptedDraft):
    """Says what its nodes were drawn from, or forgets to."""

    width: int | None = 4

    def propose(self, command: Draft, log: list[int]) -> Drafted:
        drafted = super().propose(command, log)
        if self.width is None:
            return drafted
        size = (1 + len(drafted.tokens)) * self.width
        shape = (1 + len(drafted.tokens), self.width)
        candidates = Array(dtype="int32", shape=shape, data=bytes([command.round]) * 4 * size)
        return drafted.model_copy(
            update={
                "candidates": candidates,
                "probabilities": Array(dtype="float32", shape=shape, data=bytes(4 * size)),
            }
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
