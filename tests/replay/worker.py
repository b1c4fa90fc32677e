"""Replays a recorded session with a real worker: it gets the recorded commands, and its answers are
compared with the recorded ones. A session that continued on another worker of the role has several
parts, which one worker replays one after the other. Tokens are compared in every case; the margins,
log-probabilities and features that come with them where both workers state the same fingerprint,
since equal fingerprints mean equal bytes. A target's answers depend on its commands alone. What a
draft proposes may also hang on the time that it had and on what it learned before; so where a
proposal differs, what was accepted of the recorded one is told to the worker as its own tree has
it, and the session goes on. Plays the coordinator; knows no sessions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.launch.processes.stack import layout_of, worker_arguments
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.arrays import Array, stack
from dovetail.protocol.errors import UserError
from dovetail.protocol.links import open_hub
from dovetail.protocol.messages import (
    Close,
    Draft,
    Drafted,
    Drain,
    Event,
    Failed,
    Hello,
    Message,
    Open,
    Opened,
    Prefilled,
    Refed,
    Refeed,
    Scored,
    Verified,
)
from dovetail.protocol.tree import ROOT
from dovetail.runtime.record.recording import Recording
from dovetail.runtime.record.replay import Asked, ReplayDifference, own_verdicts, short
from replay.exchanges import LAST, Exchange, Part, Role, missed_its_base, parts_of, round_of
from replay.stage import EPOCH, Stage


@dataclass
class Outcome:
    """The result of a replay by a worker."""

    fingerprint: str = ""  # the fingerprint of the worker that played
    same_fingerprint: bool = False  # true if that is the one of all that played then
    hangs_on: tuple[str, ...] = ()
    """Settings through which a draft's proposals depended on more than the text, so that other
    proposals are not an error."""
    answers: int = 0  # answers that were compared; all are the same if there is no difference
    proposals: int = 0
    same_proposals: int = 0
    tokens: int = 0  # tokens that a target chose, now and in the recording
    difference: ReplayDifference | None = None  # the first one


# -- the worker ------------------------------------------------------------------------------------


class Player(Protocol):
    """A worker that answers."""

    hello: Hello

    def say(self, message: Message) -> None:
        """Send it a message without an answer."""

    def ask(self, command: Asked, session: int) -> Sequence[Event]:
        """Send it a command, and return all answers."""


def replay_to_worker(recording: Recording, role: Role, configuration: Configuration) -> Outcome:
    """Start a worker of this role with these settings and play the session to it."""
    parts = parts_of(recording, role)
    with Supervisor() as supervisor:
        hub = open_hub("ipc")
        try:
            arguments = worker_arguments(
                configuration, role, hub.address, layout_of(configuration.settings)
            )
            supervisor.start(f"{role} worker", arguments)
            stage = Stage(hub, supervisor)
            stage.wait_for_worker()
            outcome = play(recording, parts, role, stage)
            stage.say(Drain(epoch=EPOCH))
        finally:
            hub.close()
    return outcome


def play(recording: Recording, parts: Sequence[Part], role: Role, player: Player) -> Outcome:
    """Have a worker play these parts, until the end, or until the tokens of a target are others:
    after that it was asked for something else."""
    _check_vocabulary(parts, role, player.hello)
    same = all(part.peer.hello.fingerprint == player.hello.fingerprint for part in parts)
    outcome = Outcome(
        str(player.hello.fingerprint or ""),
        same,
        _reasons(recording, parts) if role == "draft" else (),
    )
    _Play(recording, role, player, outcome).play(
        exchange for part in parts for exchange in part.exchanges if not missed_its_base(exchange)
    )
    return outcome


def _check_vocabulary(parts: Sequence[Part], role: Role, hello: Hello) -> None:
    for part in parts:
        then = part.peer.hello
        if (
            hello.vocabulary is not None
            and then.vocabulary is not None
            and hello.vocabulary.digest != then.vocabulary.digest
        ):
            text = (
                f"this {role} worker has a different vocabulary from the recorded one, whose model "
                f"was {then.model!r}"
            )
            raise UserError(f"{text}: name that, as --{role} FOLDER")


def _reasons(recording: Recording, parts: Sequence[Part]) -> tuple[str, ...]:
    """What the proposals depended on besides the text."""
    tree = recording.begin.request.tree
    orders = [
        exchange.command
        for part in parts
        for exchange in part.exchanges
        if isinstance(exchange.command, Draft)
    ]
    found = {
        "tree.insist = false": not (tree.insist or recording.begin.request.sampling.rejects),
        "tree.sharpening = auto": tree.sharpening == "auto",
        "draft.ahead": any(order.ahead for order in orders),
    }
    return tuple(reason for reason, holds in found.items() if holds)


class _Play:
    """One worker plays a role."""

    def __init__(self, recording: Recording, role: Role, player: Player, outcome: Outcome) -> None:
        self._recording, self._role, self._player, self._outcome = recording, role, player, outcome
        self._session = recording.begin.session
        self._recorded: Drafted | None = None  # the last proposal then; `_proposed`: now
        self._proposed: Drafted | None = None

    def play(self, exchanges: Iterable[Exchange]) -> None:
        for exchange in exchanges:
            if isinstance(exchange.command, Open):
                self._player.say(Close(epoch=EPOCH, session=self._session))
            answers = self._player.ask(self._adapted(exchange.command), self._session)
            if not self._compare(exchange, answers):
                return

    # -- what it is asked --------------------------------------------------------------------------

    def _adapted(self, command: Asked) -> Asked:
        """The command for a worker that has neither earlier sessions nor, maybe, the recorded
        proposal."""
        update: dict[str, Any] = {"epoch": EPOCH}
        if isinstance(command, Open) and command.base is not None:
            update |= {"base": None, "kept": 0}
            if command.features is not None:
                update |= self._features_from(command)
        if isinstance(command, Open | Refeed):
            update["read"] = None  # all at once
        if isinstance(command, Draft):
            update |= self._retold(command)
        adapted: Asked = command.model_copy(update=update)
        return adapted

    def _features_from(self, command: Open) -> dict[str, Any]:
        if self._role == "draft":
            text = (
                "the session went on from an earlier one, whose features are not in "
                f"{self._recording.path}"
            )
            raise UserError(
                f"{text}: record with --coordinator.reuse false to play sessions to this draft"
            )
        return {
            "features_from": command.kept
            if command.features_from is None
            else command.features_from
        }

    def _retold(self, command: Draft) -> dict[str, Any]:
        """Return what was accepted of the recorded proposal, as a path in the tree of this worker
        and what goes on behind it."""
        recorded, proposed = self._recorded, self._proposed
        if (
            recorded is None
            or proposed is None
            or recorded.tree == proposed.tree
            or not command.accepted
        ):
            return {}
        tokens = [
            *(recorded.tokens[node] for node in command.accepted),
            command.bonus,
            *command.more,
        ]
        children, path = proposed.tree.children, list[int]()
        while (
            len(path) < len(command.accepted)
            and (child := children.get(path[-1] if path else ROOT, {}).get(tokens[len(path)]))
            is not None
        ):
            path.append(child)
        return {
            "accepted": tuple(path),
            "bonus": tokens[len(path)],
            "more": tuple(tokens[len(path) + 1 :]),
        }

    # -- what it answers ---------------------------------------------------------------------------

    def _compare(self, exchange: Exchange, answers: Sequence[Event]) -> bool:
        """Return whether it makes sense to go on."""
        then, now = exchange.answers[-1:], answers[-1:]
        if isinstance(now[0], Drafted):
            self._recorded, self._proposed = (
                (then[0] if then and isinstance(then[0], Drafted) else None),
                now[0],
            )
        if not then or not isinstance(then[0], LAST):
            return True
        self._outcome.answers += 1
        if type(then[0]) is not type(now[0]) or isinstance(now[0], Failed):
            self._differs(exchange, "the answer", _told(then[0]), _told(now[0]))
            return False
        match now[0]:
            case Drafted():
                self._compare_proposals(exchange, then[0], now[0])
            case Opened() | Verified():
                return self._compare_tokens(exchange, answers)
            case Refed():
                self._compare_parts(exchange, answers)
        return True

    def _compare_proposals(self, exchange: Exchange, then: Any, now: Drafted) -> None:
        self._outcome.proposals += 1
        differing = next(
            (
                name
                for name in ("tokens", "parents", "candidates", "probabilities")
                if getattr(then, name) != getattr(now, name)
            ),
            None,
        )
        self._outcome.same_proposals += differing is None
        if differing is not None:
            self._differs(exchange, differing, getattr(then, differing), getattr(now, differing))

    def _compare_tokens(self, exchange: Exchange, answers: Sequence[Event]) -> bool:
        """True if the target chose the same tokens; margins and features are compared if the bytes
        should be equal."""
        (then, then_features), (now, now_features) = (
            _chosen(several[-1], exchange, self._session) for several in (exchange.answers, answers)
        )
        for name in ("accepted", "bonus"):
            if then[name] != now[name]:
                margins = f", margin {min(then['margins']):.3g}" if then["margins"] else ""
                self._differs(exchange, name, f"{then[name]}{margins}", now[name])
                return False
        self._outcome.tokens += len(then["accepted"]) + (then["bonus"] is not None)
        if self._outcome.same_fingerprint:
            for name in ("margins", "logprobs"):
                if then[name] != now[name]:
                    self._differs(exchange, name, then[name], now[name])
            self._compare_features(exchange, then_features, now_features)
            self._compare_parts(exchange, answers)
        return True

    def _compare_parts(self, exchange: Exchange, answers: Sequence[Event]) -> None:
        """Compare what came before the last answer, in however many parts."""
        if not self._outcome.same_fingerprint:
            return
        then, now = (_features(side) for side in (exchange.answers, answers))
        self._compare_features(exchange, then, now)
        then_said, now_said = (
            [said for event in side if isinstance(event, Scored) for said in event.logprobs]
            for side in (exchange.answers, answers)
        )
        if then_said != now_said:
            self._differs(exchange, "log-probabilities of the prompt", then_said, now_said)

    def _compare_features(self, exchange: Exchange, then: Array | None, now: Array | None) -> None:
        if then == now:
            return
        if then is None or now is None or (then.dtype, then.shape) != (now.dtype, now.shape):
            self._differs(exchange, "features", _shape(then), _shape(now))
            return
        row = len(then.data) // max(1, then.shape[0])
        place = next(
            place
            for place in range(then.shape[0])
            if then.rows(place, place + 1) != now.rows(place, place + 1)
        )
        other = sum(
            a != b
            for a, b in zip(
                then.data[place * row :][:row], now.data[place * row :][:row], strict=True
            )
        )
        self._differs(
            exchange,
            f"features, row {place} of {then.shape[0]}",
            f"{row} bytes",
            f"{other} of them others",
        )

    def _differs(self, exchange: Exchange, what: str, then: object, now: object) -> None:
        if self._outcome.difference is None:
            self._outcome.difference = ReplayDifference(
                exchange.entry, exchange.at_s, f"{exchange.where}, {what}", short(then), short(now)
            )


def _chosen(event: Event, exchange: Exchange, session: int) -> tuple[dict[str, Any], Array | None]:
    """Return what a target chose, from its word on an Open or a Verify, and the features of a
    verdict."""
    if isinstance(event, Opened):
        margins = () if event.margin is None else (event.margin,)
        logprobs = () if event.logprobs is None else (event.logprobs,)
        return {
            "accepted": (),
            "bonus": event.bonus,
            "margins": margins,
            "logprobs": logprobs,
        }, None
    item, features = next(
        pair for pair in own_verdicts(event, session) if pair[0].round == round_of(exchange.command)
    )
    return {
        "accepted": item.accepted,
        "bonus": item.bonus,
        "margins": item.margins,
        "logprobs": item.logprobs,
    }, features


def _features(answers: Sequence[Event]) -> Array | None:
    """Return the features of a prompt as one array."""
    parts = [event.features for event in answers if isinstance(event, Prefilled)]
    return stack(parts) if parts else None


def _shape(array: Array | None) -> str:
    return "none" if array is None else f"{array.dtype} {array.shape}"


def _told(event: Event) -> str:
    return f"{event.type} ({event.code}: {event.text})" if isinstance(event, Failed) else event.type
