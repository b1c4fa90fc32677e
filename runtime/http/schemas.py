"""The JSON that the API answers with, as models: a test holds real answers to them.

`replies.py` writes answers by hand, for their speed, so that nothing is validated here while a
server runs. A field with a default may be missing.
"""

from typing import Any, Literal

from pydantic import BaseModel, Json
from pydantic.json_schema import SkipJsonSchema

from dovetail.protocol.messages import Result

Finish = Literal["stop", "length"]


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every error."""

    error: ErrorFields


# -- what completions of both kinds have -----------------------------------------------------------


class CachedTokens(BaseModel):
    cached_tokens: int


class PredictedTokens(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens read and written, and how many of the drafted ones were right."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens


class SpeculativeDecoding(BaseModel):
    """Figures of the draft, in vLLM's names."""

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class Metrics(Result):
    """Figures of a reply and of its draft. Seconds unless the name has another unit; shares
    0..1."""

    text: SkipJsonSchema[str] = ""
    token_ids: SkipJsonSchema[tuple[int, ...]] = ()
    max_tokens: int | None = None
    """Present if the request's max_tokens was lowered to what fits into the context."""
    speculative_decoding: SpeculativeDecoding


class Begun(BaseModel):
    """The metrics of a reply's first chunk."""

    seed: int
    max_tokens: int | None = None


class DraftedTokens(BaseModel):
    """The tokens of a chunk, and which of them the draft had proposed."""

    tokens: list[int]
    drafted: list[bool]
    texts: list[str]


class Completion(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str


class Whole(Completion):
    usage: Usage
    metrics: Metrics | None = None  # present if there is one choice


class WholeChoice(BaseModel):
    index: int
    finish_reason: Finish
    metrics: Metrics | None = None  # present if there are several choices


class Chunk(Completion):
    usage: Usage | None = None
    metrics: Metrics | Begun | None = None  # present in the first and the last chunk of a choice


class ChunkChoice(BaseModel):
    index: int
    finish_reason: Finish | None
    dovetail: DraftedTokens | None = None


# -- /v1/chat/completions --------------------------------------------------------------------------


class Score(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenScore(Score):
    top_logprobs: list[Score]


class ChatLogprobs(BaseModel):
    content: list[TokenScore]
    refusal: None = None


class ReplyMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(WholeChoice):
    message: ReplyMessage
    logprobs: ChatLogprobs | None


class ChatReply(Whole):
    """A whole chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(ChunkChoice):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(Chunk):
    """A part of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ChatEvent(BaseModel):
    """A server-sent event of a streamed chat completion. The last one is [DONE], or an error."""

    data: Json[ChatChunk | ErrorReply] | Literal["[DONE]"]


# -- /v1/completions -------------------------------------------------------------------------------


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(WholeChoice):
    text: str
    logprobs: TextLogprobs | None


class TextReply(Whole):
    """A whole text completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunkChoice(ChunkChoice):
    text: str
    logprobs: TextLogprobs | None


class TextChunk(Chunk):
    """A part of a streamed text completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class TextEvent(BaseModel):
    """A server-sent event of a streamed text completion. The last one is [DONE], or an error."""

    data: Json[TextChunk | ErrorReply] | Literal["[DONE]"]


# -- the other routes ------------------------------------------------------------------------------


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    sampling: dict[str, Any]  # the defaults of requests


class Models(BaseModel):
    object: str
    data: list[Model]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class PartFault(BaseModel):
    part: str
    why: str
    since_s: float
    retry_s: float | None


class LoadingReply(BaseModel):
    name: str
    roles: list[str]
    host: str
    pid: int
    model: str
    doing: Literal["checking", "loading"]
    done: int
    total: int
    bytes_per_s: float
    left_s: float | None


class SessionLoad(BaseModel):
    epoch: str
    sessions: int
    queued: int
    seconds_per_token: float | None
    further_seconds_per_token: float | None
    reading_seconds_per_token: float | None


class ReadyReply(BaseModel):
    ready: bool
    status: Literal["ready", "loading", "waiting"]
    degraded: bool
    missing: list[str]
    faults: list[PartFault]
    loading: list[LoadingReply]
    load: SessionLoad | None


class VersionReply(BaseModel):
    version: str


class LoadReply(BaseModel):
    server_load: int
