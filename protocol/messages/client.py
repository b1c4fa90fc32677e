"""Requests of a client to the coordinator, and its replies."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages.parts import (
    MAX_MEMO,
    MAX_MOVES,
    MAX_RELAXED,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TURNS,
    Constraint,
    Count,
    Ends,
    FinishReason,
    Floats,
    Message,
    Name,
    ScoredTokens,
    Text,
    TokenLogprobs,
    Tokens,
    Top,
)
from dovetail.protocol.messages.registration import Limits, VocabularyFacts
from dovetail.protocol.messages.rounds import RoundRecord, SeenSpan
from dovetail.protocol.settings import Frozen, Sampling, TreeSettings, plain


class Told(Frozen):
    """The part of a reply that its client has already received."""

    tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    characters: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Characters of the text."""
    scores: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Prompt tokens whose log-probabilities the client has received."""
    fingerprint: Name = ""
    """The fingerprint of the target that computed these tokens; empty if it is unknown, or if
    several targets with different fingerprints did."""

    def after(self, reply: "Emitted | PromptScored") -> "Told":
        """Return what a client has received including this reply."""
        if isinstance(reply, PromptScored):
            return self.model_copy(update={"scores": self.scores + len(reply.logprobs)})
        told: dict[str, int | str] = {
            "tokens": self.tokens + len(reply.tokens),
            "characters": self.characters + len(reply.text),
        }
        if reply.fingerprint:
            same = not self.tokens or reply.fingerprint == self.fingerprint
            told["fingerprint"] = reply.fingerprint if same else ""
        return self.model_copy(update=told)


NOTHING_TOLD = Told()


class Submit(Message):
    """A client requests a completion of one of: token ids, plain text, or chat turns (user first,
    alternating)."""

    type: Literal["submit"] = "submit"
    request: Count
    tokens: Tokens | None = None
    text: Text | None = None
    turns: Annotated[tuple[Text, ...], Field(max_length=MAX_TURNS, fail_fast=True)] | None = None
    sampling: Annotated[Sampling, AfterValidator(plain)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    """0: the prompt is prefilled, and nothing is committed."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...],
        Field(max_length=MAX_STOPS, fail_fast=True),
    ] = ()
    seed: Count | None = None
    sample: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """Which of several replies to the same prompt; each has its own noise."""
    owner: Name = ""
    """The user on whose behalf the sender requests this: the cache of an ended session is reused
    only for requests of the same owner."""
    salt: Name = ""
    """Further limits this reuse to requests of the same salt."""
    end: Ends | None = None
    """Ids that end the reply; None: the target's."""
    constraint: Constraint | None = None
    """The grammar that the reply follows; None: none. It needs a target with end tokens."""
    vocabulary: Name = ""
    """Digest of the vocabulary of `tokens`; the request fails if the target's differs. Empty: not
    checked."""
    logprobs: Top | None = None
    """Send TokenLogprobs with each token, with this many alternatives. None: do not."""
    scored: bool = False
    """True: send those of the prompt first, as PromptScored; requires `logprobs`."""
    tree: TreeSettings
    speculate: bool = True
    """False: use the target alone, even if there is a draft worker."""
    trace: bool = False
    """True: the result includes the spans of all processes."""
    record: bool = False
    """True: every round is sent as a Recorded."""
    progress: bool = False
    """True: while the prompt is prefilled, its progress is sent as PromptRead."""
    ahead: bool | None = None
    """True if the draft keeps growing the tree while the target verifies; None: if the two share no
    device, or if measurements show that it pays."""
    ticket: Name = ""
    """An unguessable name, under which a coordinator with a journal keeps the reply. A Submit with
    the ticket of a known reply continues that reply, whatever its other fields. Empty: the reply
    ends with its coordinator or its client."""
    memo: Annotated[bytes, Field(max_length=MAX_MEMO)] = b""
    """Kept with the ticket and returned by Recalled; opaque to the coordinator."""
    told: Told = NOTHING_TOLD
    """The part of the reply that the client has received through an earlier Submit with this
    ticket."""
    again: bool = False
    """True if an earlier coordinator had this request; if there is no target yet, it then waits for
    one."""


class Recall(Message):
    """A client requests the memo of a ticket; answered by Recalled, or Failed with "ticket" if the
    journal does not know the ticket, or has it for another owner."""

    type: Literal["recall"] = "recall"
    request: Count
    ticket: Name
    owner: Name = ""
    """The owner named in the Submit."""


class Recalled(Message):
    """The memo of a ticket."""

    type: Literal["recalled"] = "recalled"
    request: Count
    memo: Annotated[bytes, Field(max_length=MAX_MEMO)]


class Forget(Message):
    """A client requests that the coordinator forget an owner's earlier texts, in which look-ups
    search; answered by Forgotten. Requests that are still running are added when they end."""

    type: Literal["forget"] = "forget"
    request: Count
    owner: Name = ""
    """The owner named in the Submit."""


class Forgotten(Message):
    """An owner's earlier texts have been forgotten."""

    type: Literal["forgotten"] = "forgotten"
    request: Count
    found: bool
    """False if there were none, or none are kept."""


class Cancel(Message):
    type: Literal["cancel"] = "cancel"
    request: Count


class Status(Message):
    """A client requests the coordinator's state."""

    type: Literal["status"] = "status"


class Look(Message):
    """A client requests the events since its last request; answered by Seen. A coordinator keeps a
    bounded number of events, so poll often. A client on another machine gets the tokens of its own
    requests only."""

    type: Literal["look"] = "look"
    request: Count
    after: Count = 0
    """The `next` of the last Seen; 0: every event that is kept."""
    spans: bool = False
    """Include spans; workers record fine spans until some seconds after the last such request."""


class Describe(Message):
    """A client requests the target's description, to encode and decode its tokens itself."""

    type: Literal["describe"] = "describe"


class Stop(Message):
    """A client asks the coordinator to finish running requests, drain its workers and end."""

    type: Literal["stop"] = "stop"


class Swap(Message):
    """A client requests that a standby worker be tested and promoted, and that another one be
    dismissed. Its sessions move if possible.

    Workers are named by their epochs. Answered by Progressed*, then Swapped or Failed."""

    type: Literal["swap"] = "swap"
    request: Count
    newcomer: Count
    old: Count | None = None
    """The worker to replace; None: the newcomer is added."""


class Dismiss(Message):
    """A client requests that a worker, named by its epoch, be dismissed; answered by Progressed*,
    then Dismissed or Failed."""

    type: Literal["dismiss"] = "dismiss"
    request: Count
    worker: Count
    last: bool = False
    """True: dismiss it even if it is the only target; requests are refused from then on."""


class Emitted(Message):
    """Tokens committed for a request, and the text that they complete. Text that may still become
    part of a stop string is held back."""

    type: Literal["emitted"] = "emitted"
    request: Count
    tokens: Tokens
    drafted: Annotated[tuple[bool, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """For each token, whether the draft had proposed it."""
    text: Text
    logprobs: Annotated[
        tuple[TokenLogprobs, ...], Field(max_length=MAX_TOKENS, fail_fast=True)
    ] = ()
    """The log-probabilities of each token, if requested."""
    fingerprint: Name = ""
    """The fingerprint of the target that computed the tokens; empty if it is unchanged or
    unknown."""


class PromptScored(Message):
    """The target's log-probabilities of prompt tokens, if requested: in order, before the first
    Emitted."""

    type: Literal["prompt_scored"] = "prompt_scored"
    request: Count
    start: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Position of the first token."""
    logprobs: ScoredTokens


class PromptRead(Message):
    """The progress of a prompt, if requested: the target has prefilled a part of it. Sent at most
    twice a second, before the first Emitted."""

    type: Literal["prompt_read"] = "prompt_read"
    request: Count
    total: Count
    """Tokens of the prompt; `done`: those in the target's cache, `cached` among them from earlier
    requests."""
    cached: Count
    done: Count


class Progressed(Message):
    """The progress of a Swap or Dismiss, as a sentence."""

    type: Literal["progressed"] = "progressed"
    request: Count
    text: Name


class Swapped(Message):
    """The newcomer is in use, and the other worker has been dismissed."""

    type: Literal["swapped"] = "swapped"
    request: Count
    moved: Count
    """Sessions that moved; `stayed`: sessions that finished where they were."""
    stayed: Count
    longest_pause_s: float
    """The longest that any client waited for its next token because of the swap."""


class Dismissed(Message):
    """The worker has been dismissed. The fields are as in Swapped."""

    type: Literal["dismissed"] = "dismissed"
    request: Count
    moved: Count
    stayed: Count
    longest_pause_s: float


class Described(Message):
    """The target that would serve a request."""

    ARRAYS = ("tokenizer", "table")
    type: Literal["described"] = "described"
    model: Name
    fingerprint: Name
    limits: Limits
    vocabulary: VocabularyFacts
    tokenizer: Array
    """The bytes of tokenizer.json."""
    table: Array | None = None
    """The vocabulary as a packed `TokenTable`."""
    grammars: Name = ""
    """As in Hello."""


class Recorded(Message):
    """A round of a request with `record`, sent after the Emitted of its tokens."""

    type: Literal["recorded"] = "recorded"
    request: Count
    record: RoundRecord


class DraftFailure(Frozen):
    """The first failure of a request's draft; the tokens are the same despite it."""

    draft: Name
    """Name of the worker."""
    error: Name
    round: Count
    """The round in which it failed; 0: before the first."""
    after_s: Annotated[float, Field(ge=0.0)]
    """Seconds since the request arrived."""


class Followed(Frozen):
    """How a reply followed its grammar."""

    kind: Name
    engine: Name
    relaxed: Annotated[tuple[Name, ...], Field(max_length=MAX_RELAXED, fail_fast=True)] = ()
    """As in the request."""
    complete: bool
    """True if the reply ended where the grammar allows it; False if it was cut off, such as by
    its maximum length."""


class Result(Frozen):
    """The result of a request: the fields of `--json`. Seconds unless the name has another unit;
    shares 0..1."""

    text: Text
    token_ids: Tokens
    prompt_tokens: Count
    completion_tokens: Count
    finish_reason: FinishReason
    seed: Count
    fingerprint: Name
    rounds: Count
    tau: float | None
    accepted_tokens: Count
    drafted_tokens: Count
    grown_nodes: Count
    acceptance_rate: float | None
    accepted_per_position: Floats
    hit_rate: float | None
    wall_s: float
    time_to_first_token_s: float
    tokens_per_s: float
    prefill_s: float
    draft_exposed_s: float
    verify_s: float
    transport_s: float
    queue_s: float
    coordinator_s: float
    unaccounted_s: float
    bytes_per_round: float
    ahead_nodes: Count = 0
    """Nodes grown while the target verified."""
    wasted_nodes: Count = 0
    """Nodes dropped without being offered when the root moved."""
    verified_rows: Count = 0
    """Rows of all target passes, roots included."""
    plain_rounds: Count = 0
    """Rounds verified without a tree."""
    control_rounds: Count = 0
    """Plain rounds that were inserted to measure the target alone."""
    predicted_tokens_per_s: float | None = None
    """The rate that the cost model predicted for these rounds before each began; None if it knew
    too little."""
    reused_tokens: Count = 0
    """Prompt tokens whose cached rows were reused."""
    reused_from: Literal["", "session", "memory", "disk"] = ""
    """Where these rows came from: an earlier session or stored blocks in memory or on disk."""
    moves: Count = 0
    """How often the session moved to another target."""
    fingerprints: Annotated[tuple[Name, ...], Field(max_length=MAX_MOVES, fail_fast=True)] = ()
    """The fingerprints of the targets that served the request, in order, if they differ;
    `fingerprint` is the last one's."""
    placement: Name = ""
    """Which layers of the last target were on which devices, in words; a device's name: all of
    them."""
    prefill: Name = "local"
    """What prefilled the prompt: local (the devices that hold the model), or a device to which the
    weights were streamed."""
    draft_failure: DraftFailure | None = None
    """None: the draft never failed."""
    constraint: Followed | None = None
    """None: the reply had no grammar."""


class Finished(Message):
    type: Literal["finished"] = "finished"
    request: Count
    result: Result
    margins: Annotated[tuple[float, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """For every completion token, the margin of the target's choice over its runner-up."""
    spans: Annotated[tuple[SeenSpan, ...], Field(max_length=1 << 16, fail_fast=True)] = ()
    """Spans of all processes, if requested by `trace`."""
