"""Requests of a client to the coordinator, and its replies."""

from typing import Annotated, Literal

from pydantic import Field

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages.parts import (
    MAX_MEMO,
    MAX_MOVES,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TURNS,
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
from dovetail.protocol.settings import Frozen, Sampling, TreeSettings


class Told(Frozen):
    """The part of a reply that its client has already received, and that is not sent again."""

    tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    characters: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Characters of the text."""
    scores: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Tokens of the prompt whose log-probabilities it has received."""
    fingerprint: Name = ""
    """The fingerprint of the target that computed these tokens; empty: it is not known, or several
    targets of different fingerprints did."""

    def after(self, reply: "Emitted | PromptScored") -> "Told":
        """Return what a client has received, including this reply."""
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
    """A client wants a completion of one of: token ids, plain text, or chat turns (user first,
    alternating)."""

    type: Literal["submit"] = "submit"
    request: Count
    tokens: Tokens | None = None
    text: Text | None = None
    turns: Annotated[tuple[Text, ...], Field(max_length=MAX_TURNS, fail_fast=True)] | None = None
    sampling: Sampling
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    """0: the prompt is read, and nothing is committed."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...],
        Field(max_length=MAX_STOPS, fail_fast=True),
    ] = ()
    seed: Count | None = None
    sample: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """Which of several replies to the same prompt; each has its own noise."""
    owner: Name = ""
    """The owner, by which the sender distinguishes its users: rows of an ended session are used for
    its owner's requests alone."""
    end: Ends | None = None
    """Ids that end the reply; None: the target's."""
    vocabulary: Name = ""
    """Digest of the vocabulary that `tokens` are of; the request fails where the target's is
    another. Empty: not checked."""
    logprobs: Top | None = None
    """Each token comes with its TokenLogprobs, with this many alternatives. None: without."""
    scored: bool = False
    """True: those of the prompt come first, as PromptScored; `logprobs` must be given."""
    tree: TreeSettings
    speculate: bool = True
    """False: the target alone, even where a draft worker is there."""
    trace: bool = False
    """True: the result comes with the spans of all processes."""
    record: bool = False
    """True: every round comes as a Recorded."""
    ahead: bool | None = None
    """True if the draft keeps growing the tree while the target verifies; None: if the two share no
    device, or if measurements show that it pays."""
    ticket: Name = ""
    """An unguessable name, under which a coordinator with a journal keeps the reply. A Submit with
    the ticket of a known reply continues that one, whatever its other fields. Empty: the reply ends
    with its coordinator, or its client."""
    memo: Annotated[bytes, Field(max_length=MAX_MEMO)] = b""
    """Kept with the ticket for whoever recalls it; the coordinator does not read it."""
    told: Told = NOTHING_TOLD
    """The part of the reply that the client has, from an earlier Submit with this ticket."""
    again: bool = False
    """True if an earlier coordinator had it, so that this one waits for a target if none is here
    yet."""


class Recall(Message):
    """A client asks for the memo of a ticket: answered by Recalled, or Failed with "ticket" if the
    journal does not know it, or not as this owner's."""

    type: Literal["recall"] = "recall"
    request: Count
    ticket: Name
    owner: Name = ""
    """The owner that the Submit named."""


class Recalled(Message):
    """The memo of a ticket."""

    type: Literal["recalled"] = "recalled"
    request: Count
    memo: Annotated[bytes, Field(max_length=MAX_MEMO)]


class Cancel(Message):
    type: Literal["cancel"] = "cancel"
    request: Count


class Status(Message):
    """A client asks for the coordinator's state."""

    type: Literal["status"] = "status"


class Look(Message):
    """A client requests the events since its last request: answered by Seen. A coordinator keeps a
    bounded number of events, so poll often. A client on another machine gets the tokens of its own
    requests alone.
    """

    type: Literal["look"] = "look"
    request: Count
    after: Count = 0
    """The `next` of the last Seen; 0: whatever is still there."""
    spans: bool = False
    """Spans too; workers record fine ones until some seconds after the last such request."""


class Describe(Message):
    """A client asks what the target is, so that it can read and write its tokens itself."""

    type: Literal["describe"] = "describe"


class Stop(Message):
    """A client asks the coordinator to finish what runs, drain its workers and end."""

    type: Literal["stop"] = "stop"


class Swap(Message):
    """A client asks for a worker on standby to be tried and put in place, and for another one to be
    let go, whose sessions move over where they can.

    The workers are named by their epochs. Answered by Progressed*, and Swapped or Failed.
    """

    type: Literal["swap"] = "swap"
    request: Count
    newcomer: Count
    old: Count | None = None
    """The worker that it replaces; None: it joins the present ones."""


class Dismiss(Message):
    """A client asks for a worker, named by its epoch, to be let go: answered by Progressed*, and
    Dismissed or Failed."""

    type: Literal["dismiss"] = "dismiss"
    request: Count
    worker: Count
    last: bool = False
    """True: also where there is no other target, so that requests are refused from then on."""


class Emitted(Message):
    """Tokens that were committed for a request, and the text that they complete: not more of it
    than will stay, so without the beginning of a stop string."""

    type: Literal["emitted"] = "emitted"
    request: Count
    tokens: Tokens
    drafted: Annotated[tuple[bool, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """For each token, True if the draft had proposed it."""
    text: Text
    logprobs: Annotated[
        tuple[TokenLogprobs, ...], Field(max_length=MAX_TOKENS, fail_fast=True)
    ] = ()
    """The log-probabilities of each token, where they were asked for."""
    fingerprint: Name = ""
    """The fingerprint of the target that computed them; empty: it is that of the tokens before, or
    is not known."""


class PromptScored(Message):
    """The target's log-probabilities of tokens of the prompt, where those were asked for: in order,
    before the first Emitted."""

    type: Literal["prompt_scored"] = "prompt_scored"
    request: Count
    start: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Position of the first of them."""
    logprobs: ScoredTokens


class Progressed(Message):
    """The progress of a Swap or Dismiss, in words."""

    type: Literal["progressed"] = "progressed"
    request: Count
    text: Name


class Swapped(Message):
    """The newcomer is in place, and the other one has been let go."""

    type: Literal["swapped"] = "swapped"
    request: Count
    moved: Count
    """Sessions that went over; `stayed`: that ended where they were."""
    stayed: Count
    longest_pause_s: float
    """The longest that any client of a session waited for its next token meanwhile."""


class Dismissed(Message):
    """The worker has been let go. Its fields are those of Swapped."""

    type: Literal["dismissed"] = "dismissed"
    request: Count
    moved: Count
    stayed: Count
    longest_pause_s: float


class Described(Message):
    """The target that a request would be decoded with."""

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


class Recorded(Message):
    """A round of a request that asked for records, after the Emitted of its tokens."""

    type: Literal["recorded"] = "recorded"
    request: Count
    record: RoundRecord


class DraftFailure(Frozen):
    """The first failure of a request's draft; whatever was drafted behind it, no token is
    another."""

    draft: Name
    """Name of the worker."""
    error: Name
    round: Count
    """The round in which it failed; 0: before the first."""
    after_s: Annotated[float, Field(ge=0.0)]
    """Since the request came."""


class Result(Frozen):
    """One request's result: the fields of `--json`. Seconds unless the name has another unit;
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
    """Nodes that were neither offered nor kept when the root moved."""
    verified_rows: Count = 0
    """Rows of all passes of the target, roots included."""
    plain_rounds: Count = 0
    """Rounds that were verified without a tree."""
    control_rounds: Count = 0
    """Rounds without a draft, among the plain ones, that were made to measure the target's pass
    over a single row."""
    predicted_tokens_per_s: float | None = None
    """The rate that the cost model expected of these rounds before each began; None where it knows
    too little."""
    reused_tokens: Count = 0
    """Prompt tokens that the target had read in an earlier session, and did not read again."""
    moves: Count = 0
    """How often the session continued on another target."""
    fingerprints: Annotated[tuple[Name, ...], Field(max_length=MAX_MOVES, fail_fast=True)] = ()
    """The fingerprints of the targets that served it, in order, where they were not all the same;
    `fingerprint` is the last one's."""
    placement: Name = ""
    """Which of the target's layers were where, in words, of the last one that served it; a device's
    name: all of them there."""
    prefill: Name = "local"
    """Who read the prompt: local, those that compute the model; or a device through which the
    weights streamed."""
    draft_failure: DraftFailure | None = None
    """None: its draft never failed."""


class Finished(Message):
    type: Literal["finished"] = "finished"
    request: Count
    result: Result
    margins: Annotated[tuple[float, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """For every completion token, the distance of the target's choice to its runner-up."""
    spans: Annotated[tuple[SeenSpan, ...], Field(max_length=1 << 16, fail_fast=True)] = ()
    """Spans of all processes, if the request asked for a trace."""
