"""Replays a recording with the present session logic, and compares the actions. Every step is
repeated with its recorded arguments; the resulting actions, the commands to workers and the
messages to the client are compared with the recorded ones. The first difference ends the replay,
since later events answered other commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import COMMAND, EVENT, REPLY, Dialect, encode
from dovetail.protocol.errors import DecodeError, UserError
from dovetail.protocol.messages import (
    Command,
    Draft,
    Drafts,
    Emitted,
    Event,
    Feed,
    Finished,
    Open,
    PromptScored,
    Recorded,
    Refeed,
    Reply,
    Verified,
    VerifiedItem,
    Verify,
)
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine.faults import one_line, reraise_exits
from dovetail.runtime.record.recorder import MAX_WORDS, STEPS, outline
from dovetail.runtime.record.recording import Entry, From, Joined, Recording, Said, Step
from dovetail.runtime.session.actions import Action, Ask, Emit, Note, Score
from dovetail.runtime.session.draft_sync import DraftSync, Joining, features_of_items
from dovetail.runtime.session.request import TOKEN_BYTES, Base, Request
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.metrics import Accounts, RoundTimes
from dovetail.runtime.text.tokenizer import open_detokenizer


def own_part(command: Verify | Drafts, session: int) -> Verify | Draft:
    """Return this session's part of a pass over several sessions, or of orders for several."""
    if isinstance(command, Drafts):
        orders = command.split()
        return next((order for order in orders if order.session == session), orders[0])
    return _own_part(command, session)


def _own_part(verify: Verify, session: int) -> Verify:
    first = 0
    for item in verify.items:
        rows = 1 + len(item.tokens)
        if item.session == session:
            drawn = {
                name: _rows(getattr(verify, name), first, first + rows)
                for name in ("candidates", "probabilities")
            }
            return verify.model_copy(update={"items": (item,), "reads": (), **drawn})
        first += rows
    return verify


def own_verdicts(event: Event, session: int) -> Sequence[tuple[VerifiedItem, Array | None]]:
    """Return this session's verdicts of a pass, with features if their count is right."""
    if not isinstance(event, Verified):
        return []
    every = zip(event.items, features_of_items(event), strict=True)
    return [(item, features) for item, features in every if item.session == session]


def _rows(array: Array | None, start: int, stop: int) -> Array | None:
    return None if array is None else array.rows(start, stop)


def is_sent_as(asked: Command, sent: Command) -> bool:
    """Return whether a command is the requested one, with all or, except under rejection sampling,
    a prefix of its tree. A log may be read in parts."""
    if isinstance(sent, Open | Refeed):
        return asked == sent.model_copy(update={"read": None})
    if isinstance(asked, Verify) and isinstance(sent, Verify) and asked.candidates is None:
        (item,), nodes = asked.items, len(sent.items[0].tokens)
        asked = asked.model_copy(
            update={
                "items": (
                    item.model_copy(
                        update={"tokens": item.tokens[:nodes], "parents": item.parents[:nodes]}
                    ),
                )
            }
        )
    return asked == sent


Asked = Open | Feed | Refeed | Draft | Verify
"""A session's commands to a worker. Close may also come from the coordinator."""
TOLD: tuple[tuple[type[Action], type[Reply], Sequence[str]], ...] = (
    (Emit, Emitted, ("tokens", "text", "logprobs")),
    (Score, PromptScored, ("logprobs",)),
    (Note, Recorded, ("record",)),
)
"""Messages to a client for an action, and their fields."""
MOST_WORDS = 300  # characters of one side of a difference


@dataclass(frozen=True)
class ReplayDifference:
    """The place where the present session logic differs from the recorded one."""

    entry: int  # number of the entry in the file, from 0 on
    at_s: float  # seconds since the session began
    where: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return (
            f"entry {self.entry} ({self.at_s:.6f} s), {self.where}: recorded "
            f"{self.recorded}, now {self.now}"
        )


class _Differs(Exception):
    """Ends a replay; contains descriptions of the recorded and the present value."""


@dataclass(frozen=True)
class Taken:
    """A step as recorded by this release, with all resulting commands and actions."""

    step: Step
    actions: Sequence[Action]


@dataclass
class Replay:
    """One recording and the session that repeats its steps."""

    recording: Recording
    taken: list[Taken] = field(default_factory=list)  # steps so far, including the one that differs
    commands: int = 0  # commands that have been compared
    difference: ReplayDifference | None = None
    _place: int = 0
    _in_hand: Said | None = None  # the last received message
    _asked: list[Ask] = field(default_factory=list)
    """Commands without a recorded message: the session may have ended, or the worker was lost."""
    _told: list[Reply] = field(default_factory=list)
    """The recorded messages to the client, without the last."""

    def __post_init__(self) -> None:
        self.session = _session(self.recording)

    def play(self) -> ReplayDifference | None:
        """Return the first difference; raise `UserError` if the recording is inconsistent."""
        try:
            for place, entry in enumerate(self.recording.entries):
                self._place = place
                self._take(entry)
            self._compare_told()
        except _Differs as differs:
            at_ns = getattr(self.recording.entries[self._place], "at", 0)
            self.difference = ReplayDifference(1 + self._place, at_ns / 1e9, *differs.args)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UserError(
                f"{self.recording.path} is damaged: its entry {1 + self._place} cannot be replayed "
                f"({one_line(error)})"
            ) from error
        return self.difference

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, Step):
            self._step(entry)
        elif isinstance(entry, Said) and entry.type == "in":
            self._in_hand = entry
        elif isinstance(entry, Said):
            self._sent(entry)

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        """Repeat a step."""
        if step.name not in STEPS:
            raise UserError(
                f"{self.recording.path} has a step {step.name[:64]!r} that this release does not "
                "know: use the one that wrote it"
            )
        raised, actions = None, list[Action]()
        method, arguments = getattr(self.session, step.name), self._arguments(step)
        try:
            actions = method(*arguments)
        except BaseException as error:
            reraise_exits(error)
            raised = (type(error).__name__, str(error)[:MAX_WORDS])
        today = step.model_copy(update={"actions": tuple(map(whole, actions)), "raised": raised})
        self.taken.append(Taken(today, actions))
        self._compare(step, actions, raised)
        self._asked += [
            action
            for action in actions
            if isinstance(action, Ask) and isinstance(action.command, Asked)
        ]

    def _where(self, step: Step) -> str:
        return f"step {step.name} of round {self.session.round}"

    def _compare(
        self, step: Step, actions: Sequence[Action], raised: tuple[str, str] | None
    ) -> None:
        """Compare actions with the recorded ones, including whole commands if recorded."""
        then = [action[:3] if action[:1] == ("ask",) else action for action in step.actions]
        now = [outline(action) for action in actions]
        if (then, step.raised) != (now, raised):
            raise _Differs(self._where(step), _words(then, step.raised), _words(now, raised))
        for whole, action in zip(step.actions, actions, strict=True):
            if isinstance(action, Ask) and len(whole) > 3:
                self._compare_commands(
                    self._where(step), _decoded(COMMAND, whole[3]), action.command
                )

    def _arguments(self, step: Step) -> Sequence[Any]:
        """Return the arguments of the method."""
        plain = step.arguments
        match step.name:
            case "prefilled" | "refed" | "scored" | "drafted":
                return [self._event()]
            case "opened":
                return [self._event(), plain[1], *map(_times, plain[2:])]
            case "verified":
                item, features = self._verdict(plain[0])
                return [item, features, *map(_times, plain[2:])]
            case "recovered":
                return [plain[0], *(_base(base and From(**base)) for base in plain[1:])]
            case "next_round":
                plan, joined = plain[0] and Plan(**plain[0]), plain[1] and Joined(**plain[1])
                return [plan, joined and Joining(joined.reads, _base(joined.base)), *plain[2:]]
            case _:
                return plain

    def _event(self) -> Event:
        if self._in_hand is None:
            raise UserError(
                f"{self.recording.path} has a step before any message: it is not a recording of a "
                "session"
            )
        event: Event = _decoded(EVENT, self._in_hand.frames)
        return event

    def _verdict(self, round: int) -> tuple[VerifiedItem, Array | None]:
        """Return the item of this session and round in the current message, and its features."""
        event = self._event()
        found = next(
            (pair for pair in own_verdicts(event, self.session.number) if pair[0].round == round),
            None,
        )
        if found is None:
            raise UserError(
                f"{self.recording.path} lacks the verdict of round {round}: it is not a recording "
                "of a session"
            )
        return found

    # -- messages ----------------------------------------------------------------------------------

    def _sent(self, said: Said) -> None:
        """Compare a recorded message with the present command."""
        peer = self.recording.peers[said.peer]
        if peer.roles == ("client",):
            reply = _decoded(REPLY, said.frames)
            if isinstance(reply, Finished):
                self._compare_result(reply)
            else:
                self._told.append(reply)
            return
        command = _decoded(COMMAND, said.frames)
        if not isinstance(command, Asked | Drafts):
            return
        where = f"{command.type} of {peer.words}"
        then = (
            own_part(command, self.session.number)
            if isinstance(command, Verify | Drafts)
            else command
        )
        asked = [
            ask for ask in self._asked if ask.role in peer.roles and type(ask.command) is type(then)
        ]
        if not asked:
            raise _Differs(where, "a command", "none")
        place = next(
            (place for place, ask in enumerate(asked) if is_sent_as(ask.command, then)), None
        )
        if place is None:
            self._compare_commands(where, then, asked[-1].command)
        for ask in asked[: (place or 0) + 1]:  # earlier ones were withdrawn
            self._asked.remove(ask)
        self.commands += 1

    def _compare_commands(self, where: str, then: Command, now: Command) -> None:
        """Compare a command with the recorded one."""
        if is_sent_as(now, then):
            return
        name = next(
            (
                name
                for name in type(now).model_fields
                if getattr(then, name, None) != getattr(now, name)
            ),
            "type",
        )
        raise _Differs(
            f"{where}, {name}", short(getattr(then, name, None)), short(getattr(now, name))
        )

    def _compare_told(self) -> None:
        """Compare messages to the client, which may be merged; the last may be missing."""
        actions = [action for taken in self.taken for action in taken.actions]
        for kind, told_as, names in TOLD:
            for name in names:
                then = _joined(
                    name, [message for message in self._told if isinstance(message, told_as)]
                )
                now = _joined(name, [action for action in actions if isinstance(action, kind)])
                if then != now[: len(then)]:
                    raise _Differs(f"{name} sent to the client", short(then), short(now))

    def _compare_result(self, finished: Finished) -> None:
        now = self.session.result(finished.result.rounds, finished.result.finish_reason)
        for name in (
            *("token_ids", "text", "prompt_tokens", "seed", "fingerprint", "fingerprints", "moves"),
            *("reused_tokens", "rounds", "accepted_tokens"),
        ):
            if (then := getattr(finished.result, name)) != getattr(now, name):
                raise _Differs(f"{name} of the result", short(then), short(getattr(now, name)))
        if finished.margins != tuple(self.session.margins):
            raise _Differs(
                "margins of the result", short(finished.margins), short(tuple(self.session.margins))
            )


def _session(recording: Recording) -> Session:
    """Return the initial session."""
    begin, wanted = recording.begin, recording.begin.request
    fields: dict[str, Any] = {
        name: getattr(wanted, name) for name in type(wanted).model_fields if name != "prompt"
    }
    tokens = memoryview(wanted.prompt[: len(wanted.prompt) // TOKEN_BYTES * TOKEN_BYTES]).cast("I")
    session = Session(
        number=begin.session,
        epoch=begin.epoch,
        request=Request(prompt=tuple(tokens), **fields),
        detokenizer=open_detokenizer(recording.tokenizer, tokens),
        accounts=Accounts(0),
        fingerprint=begin.fingerprint,
        draft_sync=None
        if begin.draft is None
        else DraftSync(begin.draft.tokens, reads=begin.draft.reads, base=_base(begin.draft.base)),
        target_base=_base(begin.target_base),
        tokens=[*begin.tokens],
        margins=[*begin.margins],
        logprobs=[*begin.logprobs],
    )
    session.told_scores(begin.scores_told)
    return session


def whole(action: Action) -> tuple[Any, ...]:
    """Return the recorded form of an action with its whole command."""
    fields = outline(action)
    return (*fields, tuple(encode(action.command))) if isinstance(action, Ask) else fields


def _decoded(dialect: Dialect[Any], frames: Sequence[bytes]) -> Any:
    try:
        return dialect.decode(frames)
    except DecodeError as error:
        raise UserError(
            f"a message of the recording cannot be read: {error}; use the release that wrote it"
        ) from None


def _base(base: From | None) -> Base | None:
    return None if base is None else Base(base.session, base.tokens, base.shared)


def _times(times: Mapping[str, int] | None) -> RoundTimes | None:
    return None if times is None else RoundTimes(**times)


def _joined(name: str, pieces: Sequence[Any]) -> Any:
    """Return one field of several messages, concatenated."""
    parts = [getattr(piece, name) for piece in pieces]
    return (
        "".join(parts)
        if name == "text"
        else tuple(
            part
            for several in parts
            for part in (several if isinstance(several, tuple) else (several,))
        )
    )


def _words(actions: Sequence[Sequence[Any]], raised: Sequence[str] | None) -> str:
    if raised is not None:
        return f"{raised[0]}: {raised[1]}"[:MOST_WORDS]
    return short(", ".join(" ".join(map(str, action)) for action in actions) or "nothing")


def short(value: object) -> str:
    """Describe a value, truncated."""
    words = str(value)
    return (
        words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}... ({len(words)} characters)"
    )
