"""Decides which replica gets a request: the one predicted to finish it first. Pure.

A replica that has prefilled the beginning of a conversation has it in its prefix cache and prefills
only new tokens, so it is chosen unless its sessions slow it down by more than the prefill elsewhere
takes. Prefixes are stored as hashes of blocks of text, each including everything before it and the
API key, since caches are shared only between requests of one key. Evictions on replicas are
unknown: after one, the guess is wrong and the prompt is prefilled again. The prediction includes
prompts that a replica still has to prefill, and requests waiting there."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dovetail.protocol.calibration import Seconds
from dovetail.protocol.messages.parts import Count

BLOCK = 64  # characters of a block
CHARACTERS = 4.0  # approximate characters per token
MOST_BLOCKS = 1 << 16  # most stored blocks of a replica: a million tokens
USUAL_TOKENS = 256  # the assumed tokens of a reply, if the request allows more
USUAL_S, USUAL_FURTHER = 0.02, 0.5
"""Seconds per token alone, and for each further session, before any report."""
READING = 0.05  # prefill time of a token relative to decoding, if not reported
ALIKE = 0.02  # relative difference of equal predictions, among which the idlest replica is chosen
BUSY = 4  # sessions at which rates are compared
EQUAL = 0.25  # replicas whose rates differ by less count as equal, because of noise
AGE_S = 300.0
"""Seconds after which a replica's rate expires, so that one that was slow is tried again with one
request."""
NEVER = float("-inf")
BESIDE_STREAMS = 2.0  # assumed slowdown of prefill by streams; 1.5 was worse in a simulated fleet


@dataclass(frozen=True)
class Wanted:
    """The properties of a request that determine the choice."""

    blocks: Sequence[int]  # hashes of its blocks, each with everything before it
    prompt_tokens: float
    reply_tokens: float
    samples: int = 1


class Rate(NamedTuple):
    """Seconds per token of a single session, and those that each further session adds."""

    alone_s: float
    further_s: float

    @property
    def busy_s(self) -> float:
        """Return the seconds per token of `BUSY` sessions."""
        return self.alone_s + (BUSY - 1) * self.further_s


UNKNOWN = Rate(USUAL_S, USUAL_FURTHER * USUAL_S)  # the rate of replicas before any has reported


@dataclass(frozen=True)
class ReplicaLoad:
    """The last report of a replica; see `dovetail.runtime.telemetry.picture`."""

    epoch: str = ""
    sessions: Count = 0
    queued: Count = 0
    seconds_per_token: Seconds | None = None
    further_seconds_per_token: Seconds | None = None
    reading_seconds_per_token: Seconds | None = None
    targets: Count = 1  # targets that work in parallel
    in_flight: int = 0  # requests of this router that may have been running there at that time


class Noted(NamedTuple):
    """The changes that a choice made to its replica, undone if that refuses the request."""

    reading_s: float  # seconds of reading it
    known: int  # its blocks that were already prefilled


NOTHING = Noted(0.0, 0)


@dataclass
class Replica:
    """One service, as the router knows it."""

    url: str
    ready: bool = False
    draining: bool = False  # True if it gets no further requests
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    rate: Rate = UNKNOWN  # the rate set by `agree_on_rates`
    rated_s: float = 0.0
    """When its rate last changed, on the clock of `told`; every round changes it."""
    in_flight: int = 0  # requests of this router that run there
    sent: int = 0  # requests that this router has sent there
    chosen_s: float = NEVER  # when it was last chosen
    unread_s: float = 0.0
    """Seconds of prefill that it had left then, including the chosen request's."""
    noted: Noted = NOTHING  # the changes made by its last choice
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Hashes of the blocks that it has prefilled, the oldest first."""

    def told(self, load: ReplicaLoad, now_s: float = 0.0) -> None:
        """Handle its report; a restarted coordinator has an empty cache."""
        if load.epoch != self.load.epoch:
            self.known.clear()
            self.unread_s = 0.0
        if _rate(load) != _rate(self.load):
            self.rated_s = now_s
        self.load = load

    @property
    def running(self) -> int:
        """The number of requests there, including those of other clients."""
        others = self.load.sessions + self.load.queued - self.load.in_flight
        return self.in_flight + max(0, others)

    @property
    def queued(self) -> int:
        """The number of waiting requests there; if any waited, including all sent since."""
        return self.load.queued and self.load.queued + max(0, self.in_flight - self.load.in_flight)

    def reads_on_s(self, now_s: float) -> float:
        """Return how many more seconds it needs for the prompts sent to it."""
        return max(0.0, self.unread_s - (now_s - self.chosen_s))

    def refused(self, blocks: Sequence[int], noted: Noted) -> None:
        """Undo what a choice has noted: the replica has not prefilled the request."""
        self.unread_s = max(0.0, self.unread_s - noted.reading_s)
        for block in blocks[noted.known :]:
            self.known.pop(block, None)

    def has_read(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, counted from the first, it has prefilled."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if blocks[middle - 1] in self.known else (low, middle - 1)
        return low

    def reads(self, blocks: Sequence[int]) -> None:
        """Add the blocks that it prefills; the first ones are dropped last."""
        for block in reversed(blocks):
            self.known[block] = None
            self.known.move_to_end(block)
        while len(self.known) > MOST_BLOCKS:
            self.known.popitem(last=False)


def wanted(body: Any, key: bytes) -> Wanted:
    """Read the parts of a request's JSON that the choice needs; its replica reports errors in
    it."""
    fields = body if isinstance(body, Mapping) else {}
    text = _text(fields)
    blocks, before = [], hash(key)
    for end in range(BLOCK, len(text) + 1, BLOCK):
        before = hash((before, text[end - BLOCK : end]))
        blocks.append(before)
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    most = limit if isinstance(limit, int) and limit > 0 else USUAL_TOKENS
    samples = fields.get("n")
    return Wanted(
        blocks,
        len(text) / CHARACTERS,
        float(min(most, USUAL_TOKENS)),
        samples if isinstance(samples, int) and 0 < samples < 1 << 10 else 1,
    )


def choose(replicas: Iterable[Replica], request: Wanted, now_s: float) -> Replica | None:
    """Return the replica predicted to finish first, and count the request there; None: none."""
    there = [replica for replica in replicas if replica.ready and not replica.draining]
    if not there:
        return None
    predicted = [_predicted(replica, request, now_s) for replica in there]
    limit = min(expected.finish_s for expected in predicted) * (1.0 + ALIKE)
    best, expected = min(
        (
            (replica, expected)
            for replica, expected in zip(there, predicted, strict=True)
            if expected.finish_s <= limit
        ),
        key=lambda one: (one[0].running, one[0].chosen_s),
    )
    slower = BESIDE_STREAMS if best.running else 1.0
    reading_s = slower * expected.reading_s / max(1, best.load.targets)
    best.noted = Noted(reading_s, best.has_read(request.blocks))
    best.unread_s, best.chosen_s = best.reads_on_s(now_s) + reading_s, now_s
    best.reads(request.blocks)
    return best


class Predicted(NamedTuple):
    """The seconds that a replica takes for a request."""

    finish_s: float  # until it is done
    reading_s: float  # seconds of prefill


def _predicted(replica: Replica, request: Wanted, now_s: float) -> Predicted:
    """Return a request's seconds on a replica: waiting, earlier prefills, its own prefill, and
    decoding at the rate with one more session."""
    load, queued, rate = replica.load, replica.queued, replica.rate
    beside = load.sessions if queued else replica.running
    token_s = rate.alone_s + rate.further_s * (beside + request.samples - 1)
    place_s = queued and (queued + 1) * USUAL_TOKENS * token_s / max(1, load.sessions)
    unread = request.prompt_tokens - replica.has_read(request.blocks) * BLOCK / CHARACTERS
    reading_s = max(0.0, unread) * (load.reading_seconds_per_token or READING * rate.alone_s)
    before_s = place_s + replica.reads_on_s(now_s)
    return Predicted(before_s + reading_s + request.reply_tokens * token_s, reading_s)


def agree_on_rates(replicas: Sequence[Replica], now_s: float = 0.0) -> None:
    """Set each rate to the mean of similar replicas; without a recent report, of all of them."""
    told = sorted(
        (
            (rate, one)
            for one in replicas
            if now_s - one.rated_s < AGE_S and (rate := _rate(one.load)) is not None
        ),
        key=lambda told: told[0].busy_s,
    )
    usual = _mean([rate for rate, _ in told]) if told else UNKNOWN
    for replica in replicas:
        replica.rate = usual
    while told:
        limit_s = told[0][0].busy_s * (1.0 + EQUAL)
        near = [one for one in told if one[0].busy_s <= limit_s]
        mean = _mean([rate for rate, _ in near])
        for _, replica in near:
            replica.rate = mean
        told = told[len(near) :]


def _rate(load: ReplicaLoad) -> Rate | None:
    """Return the rate reported by a replica; None if there is none yet."""
    alone_s, further_s = load.seconds_per_token, load.further_seconds_per_token
    if not alone_s:
        return None
    return Rate(alone_s, USUAL_FURTHER * alone_s if further_s is None else further_s)


def _mean(rates: Sequence[Rate]) -> Rate:
    return Rate(*(sum(part) / len(rates) for part in zip(*rates, strict=True)))


def _text(fields: Mapping[Any, Any]) -> str:
    """Return the beginning of a request's text, in the order of its prefill."""
    messages = fields.get("messages", fields.get("input"))
    if isinstance(messages, list):
        system = {"role": "system", "content": fields.get("system", fields.get("instructions"))}
        return "\0".join(part for message in (system, *messages) for part in _parts(message))
    prompt = fields.get("prompt", messages)
    if isinstance(prompt, list):
        first = prompt[0] if prompt else ""
        return first if isinstance(first, str) else " ".join(map(str, prompt))
    return prompt if isinstance(prompt, str) else ""


def _parts(message: Any) -> Iterable[str]:
    """Yield the role and the texts of a message."""
    if not isinstance(message, Mapping):
        return
    yield str(message.get("role"))
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text
