"""The bodies of HTTP requests: OpenAI's, with vLLM's additions. `orders.py` turns them into
requests to the coordinator. Unsupported and unknown fields are refused, unless their value has no
effect (`fields.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from dovetail.protocol.messages import (
    MAX_ENDS,
    MAX_GRAMMAR,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOP,
    MAX_TURNS,
)
from dovetail.protocol.settings import MAX_BIASES
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.fields import Body, plain, renamed

MAX_CHOICES = 128  # replies to one request: prompts times n
MAX_TOOLS, MAX_CALLS = 1024, 256
LONGEST_KIND = 40  # characters of an unknown type that an error shows
STOP_CHARACTERS = 1024
MAX_CHOICE_TEXTS = 1000
LARGEST_SEED = (1 << 63) - 1
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Strings = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKENS)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
Length = Annotated[int, Field(ge=-1, le=(1 << 63) - 1)]
"""Tokens of a reply; -1: as many as fit into the context."""
Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]


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


Objects = Annotated[dict[str, Any], AfterValidator(plain)]
Schema = Objects | bool | Annotated[str, Field(max_length=MAX_GRAMMAR)]
Grammar = Annotated[str, Field(max_length=MAX_GRAMMAR)]


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
    cache_salt: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="cached rows of prompts are shared with requests of the same salt only"
    )
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
    response_format: Objects | None = Field(
        None,
        description="type text, json_object (llama.cpp: with a schema), or json_schema with "
        "json_schema.schema",
    )
    structured_outputs: Objects | None = Field(
        None, description="one of json, regex, choice, grammar, json_object; whitespace_pattern"
    )
    guided_json: Schema | None = Field(None, description="the same, as in vLLM before 0.12")
    guided_regex: Grammar | None = None
    guided_choice: (
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_CHOICE_TEXTS)] | None
    ) = None
    guided_grammar: Grammar | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None
    json_schema: Schema | None = Field(None, description="a schema, as in llama-server")
    grammar: Grammar | None = Field(None, description="GBNF or Lark")
    regex: Grammar | None = Field(None, description="as in SGLang, like ebnf")
    ebnf: Grammar | None = None
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


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class CalledFunction(Body):
    """The function of a call in an earlier reply."""

    place = "messages"
    benign = frozenset()

    name: FunctionName
    arguments: str | dict[str, Any] | None = Field(None, description="a JSON object, as a text")


class ToolCall(Body):
    """A call in an earlier reply."""

    place = "messages"
    benign = frozenset({"index", "extra_content"})

    id: str = Field("", max_length=512)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """A message of a conversation: text, whole or in parts. Fields of a reply are allowed."""

    place = "messages"
    benign = frozenset({"refusal", "annotations", "id", "audio", "reasoning_details"})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_TURNS)] | None = (
        Field(description="may be null in an assistant's message with calls or reasoning")
    )
    name: str | None = Field(None, max_length=512)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(
        None, max_length=512, description="the id of the call whose result this is"
    )
    function_call: CalledFunction | None = Field(None, description="as one of tool_calls")
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, message: Any) -> Any:
        if isinstance(message, dict) and message.get("audio"):
            raise ApiError(
                400,
                "a message with audio is not supported: leave it out",
                param="messages",
                code="unsupported_parameter",
            )
        if isinstance(message, dict) and message.get("role") == "assistant":
            return {"content": None, **message}
        return message

    @model_validator(mode="after")
    def _complete(self) -> "ChatMessage":
        calls = bool(self.tool_calls or self.function_call)
        if calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} cannot call tools: leave them out")
        if self.content is None and not (
            self.role == "assistant" and (calls or self.thoughts is not None)
        ):
            raise ValueError("content is missing: send a text")
        return self

    @property
    def thoughts(self) -> str | None:
        """Return the reasoning, under whichever name it was sent."""
        return self.reasoning_content or self.reasoning or self.thinking

    @property
    def calls(self) -> list[ToolCall]:
        """Return the tool calls, in either form."""
        if self.function_call is not None:
            return [ToolCall(function=self.function_call)]
        return self.tool_calls or []


class Function(Body):
    """A function that a reply may call."""

    place = "tools"
    benign = frozenset({"returns", "return", "cache_control"})

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(plain)] | None = Field(
        None, description="JSON schema of the arguments, an object"
    )
    strict: bool | None = Field(
        None, description="true: refuse a schema that cannot be followed exactly"
    )


class Tool(Body):
    """A tool that a reply may call; other types are not supported."""

    place = "tools"
    benign = frozenset({"cache_control", "defer_loading"})

    type: Literal["function"]
    function: Function


class AsSent:
    """Checks a value with a model and keeps it as it was sent, with its order of keys, in which
    templates print it."""

    def __init__(self, model: type[Body]) -> None:
        self._model = model

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def check(value: Any, inner: Any) -> Any:
            inner(value)
            return value

        same = core_schema.plain_serializer_function_ser_schema(lambda value: value)
        model = handler.generate_schema(self._model)
        return core_schema.no_info_wrap_validator_function(check, model, serialization=same)


class OfChoice(Body):
    """A part of tool_choice."""

    place = "tool_choice"
    benign = frozenset()


class NamedFunction(OfChoice):
    """The name of a function."""

    name: FunctionName


class NamedTool(OfChoice):
    """A tool, by the name of its function."""

    type: Literal["function"]
    function: NamedFunction


class ToolSubset(OfChoice):
    """The tools that a reply may call, and whether it must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(OfChoice):
    """The tool to call, or the tools from which to choose."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: ToolSubset | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ToolChoice":
        if (self.function if self.type == "function" else self.allowed_tools) is None:
            raise ValueError(f"{self.type} is missing")
        return self


Tools = Annotated[
    list[Annotated[dict[str, Any], AsSent(Tool)]], Field(fail_fast=True, max_length=MAX_TOOLS)
]


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
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None, description="auto: the model decides, which is the default with tools"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="whether a reply may have several calls, if its format allows it"
    )
    functions: (
        Annotated[
            list[Annotated[dict[str, Any], AsSent(Function)]],
            Field(fail_fast=True, max_length=MAX_TOOLS),
        ]
        | None
    ) = Field(None, description="an older form of tools")
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="an older form of tool_choice"
    )
    thinking_token_budget: Length | None = Field(
        None, description="tokens after which the thought of a reply is ended; -1: no limit"
    )
    enable_thinking: bool | None = Field(
        None, description="as in chat_template_kwargs, for templates that know it"
    )
    reasoning_effort: str | None = Field(
        None,
        pattern=r"^[a-z]{1,16}$",
        description="a value for templates that know it; none: also enable_thinking false",
    )


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
    tools: Tools | None = None
    return_token_strs: bool = False
    add_special: bool = Field(False, description="the same, of `content`")
    parse_special: Literal[True] = True
    with_pieces: bool = Field(False, description="return the text of each token of `content`")


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]
