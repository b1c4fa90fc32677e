"""The bodies of HTTP requests: OpenAI's, with vLLM's additions. `orders.py` turns them into
requests to the coordinator. Unsupported and unknown fields are refused, unless their value has no
effect (`fields.py`).
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from dovetail.protocol.messages import MAX_ENDS, MAX_STOPS, MAX_TOKENS, MAX_TOP, MAX_TURNS
from dovetail.protocol.settings import MAX_BIASES
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.fields import BENIGN, check_fields, renamed

MAX_CHOICES = 128  # replies to one request: prompts times n
LONGEST_KIND = 40  # characters of an unknown type that an error shows
STOP_CHARACTERS = 1024
LARGEST_SEED = (1 << 63) - 1
DEEPEST = 64  # nesting of values for a chat template: pydantic's serializer fails at 255
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Strings = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
Length = Annotated[int, Field(ge=-1, le=(1 << 63) - 1)]
"""Tokens of a reply; -1: as many as fit into the context."""
Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]


def whole(value: Any, deep: int = 2) -> Any:
    """Convert integral floats (some clients send 10.0) to int, also in lists and lists of lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if deep and isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [whole(one, deep - 1) for one in value]
    return value


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return values that fit into UTF-8 JSON within `DEEPEST` levels; else raise `ValueError`."""
    layer: list[Any] = [values]
    for _ in range(DEEPEST):
        parts = (one.values() if isinstance(one, dict) else one for one in layer)
        layer = [part for found in parts for part in found if isinstance(part, dict | list)]
    if layer:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    try:
        json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # includes UnicodeEncodeError
        text = "NaN, Infinity and lone surrogates are not valid JSON in UTF-8"
        raise ValueError(text) from None
    return values


class Body(BaseModel):
    """A body. Fields without effect are accepted, though the API document does not list them."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )
    place: ClassVar[str] = ""  # the field whose value it is
    benign: ClassVar[frozenset[str]] = BENIGN

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        body = cls._named(body)
        if cls._is_read(body):
            check_fields(body, cls.model_fields, benign=cls.benign, param=cls.place)
        return {name: whole(value) for name, value in body.items()}

    @classmethod
    def _named(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields under our names."""
        return body

    @classmethod
    def _is_read(cls, _body: dict[str, Any]) -> bool:
        """True if unknown fields are the first error to report."""
        return True


class StreamOptions(Body):
    place = "stream_options"
    benign = frozenset({"include_obfuscation"})

    include_usage: bool = Field(
        False, description="a last chunk has the numbers of prompt and reply tokens"
    )
    continuous_usage_stats: bool = Field(False, description="every chunk does")


class Wishes(Body):
    """Dovetail's own fields."""

    place = "dovetail"
    benign = frozenset()

    drafted: bool = Field(
        False, description="each streamed choice marks the tokens that the draft had proposed"
    )
    speculate: bool = Field(True, description="false: the target alone decodes this request")
    event_ids: bool = Field(
        False,
        description="each event of a stream has an id, with which a disconnected client continues: "
        "as the header Last-Event-ID of the same request, or of GET with the response's id",
    )
    fit: bool | None = Field(
        None,
        description="lower a max_tokens that does not fit into the context, and report the value "
        "in metrics.max_tokens of the reply; false: refuse such a request; default: the setting "
        "http.fit",
    )


class Decoding(Body):
    """The fields that both kinds of completions share; defaults are the server's settings."""

    model: str | None = Field(
        None, max_length=512, description="name of the served model, which is the default"
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="replies to each prompt, each with its own noise"
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="served only if it equals n"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_ENDS // 2)] | None
    ) = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-LARGEST_SEED - 1, le=LARGEST_SEED)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = Field(None, description="-1 or 0: all")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100.0, le=100.0)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = Field(None, description="token id -> bias added to its logit")
    return_progress: bool | None = Field(
        None, description="events with `prompt_progress` while the prompt is read, in streams"
    )
    dovetail: Wishes | None = None

    @classmethod
    def _named(cls, body: dict[str, Any]) -> dict[str, Any]:
        return renamed(body)

    @model_validator(mode="before")
    @classmethod
    def _few_biases(cls, body: Any) -> Any:
        biases = body.get("logit_bias") if isinstance(body, dict) else None
        if (
            isinstance(biases, dict) and len(biases) > MAX_BIASES
        ):  # reported before each of them is validated
            raise ApiError(
                400,
                f"logit_bias has {len(biases)} entries: name at most {MAX_BIASES}",
                param="logit_bias",
            )
        return body

    @property
    def copies(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class TextPart(Body):
    """A part of a message; other types are refused."""

    place = "messages"
    benign = frozenset({"cache_control", "annotations"})

    type: Literal["text"]
    text: str

    @classmethod
    def _is_read(cls, body: dict[str, Any]) -> bool:
        return body.get("type") == "text"

    @field_validator("type", mode="before")
    @classmethod
    def _no_other(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "text":
            shown = repr(kind[:LONGEST_KIND])
            raise ValueError(
                f"a part of type {shown} cannot be read, since the model reads text only: send "
                "parts of type 'text'"
            )
        return kind


TemplateValues = Annotated[
    dict[Annotated[str, Field(max_length=64)], Any],
    Field(
        max_length=64, description="values for the target's chat template, such as enable_thinking"
    ),
    AfterValidator(plain),
]


class ChatMessage(Body):
    """A message of a conversation: text, whole or in parts. Fields of a reply are allowed."""

    place = "messages"
    benign = frozenset(
        {
            *("name", "refusal", "annotations", "id", "reasoning", "reasoning_content"),
            *("tool_calls", "function_call", "audio"),
        }
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_TURNS)]

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, message: Any) -> Any:
        if isinstance(message, dict):
            for name in ("tool_calls", "function_call", "audio"):
                if message.get(name):
                    raise ApiError(
                        400,
                        f"a message with {name} is not supported: leave it out",
                        param="messages",
                        code="unsupported_parameter",
                    )
        return message

    @property
    def text(self) -> str | list[str]:
        """Return the content as sent: one text, or the texts of its parts."""
        content = self.content
        return content if isinstance(content, str) else [part.text for part in content]


def _some(length: int) -> int:
    if not length:
        raise ValueError("must be at least 1, or -1 for as many as fit into the context")
    return length


ReplyLength = Annotated[Length, AfterValidator(_some)]


class ChatBody(Decoding):
    """The body of /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_TURNS)
    ]
    max_tokens: ReplyLength | None = None
    max_completion_tokens: ReplyLength | None = None
    logprobs: bool | None = Field(
        None, description="return the natural log-probability of each token"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = Field(
        None, description="number of likeliest alternatives of each token; needs logprobs"
    )
    chat_template_kwargs: TemplateValues | None = None


class CompletionBody(Decoding):
    """The body of /v1/completions."""

    prompt: str | Strings | TokenIds | TokenLists
    max_tokens: Length | None = Field(None, description="-1: to the end; default: 16")
    echo: bool | None = Field(
        None,
        description="return the prompt before the reply, with its log-probabilities if logprobs is "
        "given",
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = Field(
        None, description="log-probabilities of each token and of this many likeliest ones"
    )


class TokenizeBody(Body):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    content: str | None = Field(None, description="a prompt, in llama-server's form")
    messages: (
        Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_TURNS)]
        | None
    ) = None
    add_special_tokens: bool = Field(
        True, description="whether a prompt gets the tokenizer's special tokens around it"
    )
    add_generation_prompt: bool = Field(
        True, description="whether messages are followed by the beginning of a reply"
    )
    chat_template_kwargs: TemplateValues | None = None
    return_token_strs: bool = False
    add_special: bool = Field(False, description="the same, of `content`")
    parse_special: Literal[True] = True
    with_pieces: bool = Field(False, description="return the text of each token of `content`")


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]
