"""Anthropic's API: /v1/messages and /v1/messages/count_tokens. A request becomes a chat, and its
reply is written as Anthropic's events. From Anthropic's reference and its SDK's types."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from dovetail.protocol.messages import MAX_STOPS, MAX_TURNS, PromptRead
from dovetail.runtime.http.apis.documents import documented
from dovetail.runtime.http.apis.translation import (
    arguments_of,
    as_body,
    call,
    content_of,
    function,
    kind_of,
    text_of,
    texts_of,
    unsupported,
)
from dovetail.runtime.http.apis.writers import BlockWriter, typed
from dovetail.runtime.http.bodies import ChatBody, ReplyLength, Stop
from dovetail.runtime.http.errors import ANTHROPIC, ApiError, shaped
from dovetail.runtime.http.events import Block, Change
from dovetail.runtime.http.fields import Body
from dovetail.runtime.http.service import Service, json_response

BILLING = "x-anthropic-billing-header:"
"""The beginning of a line of Claude Code's system prompt that is for its maker and differs between
requests, so that the prompt's cache could not be reused."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BLOCKS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a block -> type and field of its deltas."""
Object = dict[str, Any]


class CountBody(Body):
    """The body of /v1/messages/count_tokens."""

    benign = frozenset(
        {
            *("metadata", "service_tier", "context_management", "cache_control", "inference_geo"),
            *("betas", "speed", "diagnostics"),
        }
    )

    model: str | None = Field(None, max_length=512)
    messages: Annotated[list[Object], Field(min_length=1, max_length=MAX_TURNS)]
    system: str | list[Object] | None = None
    tools: list[Object] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None

    def chat(self) -> Object:
        """Return the fields of the chat."""
        output = self.output_config or {}
        schema = output.get("format") or self.output_format
        return {
            "model": self.model,
            "messages": [*_system(self.system), *_messages(self.messages)],
            **_tools(self.tools, self.tool_choice),
            **_thinking(self.thinking),
            "reasoning_effort": output.get("effort"),
            "response_format": None if schema is None else _format(schema),
        }


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: ReplyLength
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None

    def chat(self) -> Object:
        """Return the fields of the chat."""
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        own = {name: getattr(self, name) for name in same}
        own["thinking_token_budget"] = (self.thinking or {}).get("budget_tokens")
        return {**super().chat(), **own, "stop": self.stop_sequences or None}


def _system(system: str | list[Object] | None) -> list[Object]:
    """Return the system prompt as a message, if there is any."""
    texts = [] if system is None else texts_of(system, "system")
    kept = [text for text in texts if text and not text.startswith(BILLING)]
    return [{"role": "system", "content": content_of(kept)}] if kept else []


def _messages(messages: list[Object]) -> list[Object]:
    """Return the messages of the chat."""
    chat: list[Object] = []
    for index, message in enumerate(messages):
        at, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise unsupported(at, f"has the role {role!r}", "send user, assistant or system")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif role == "system":
            chat.append({"role": role, "content": content_of(texts_of(content, f"{at}.content"))})
        elif not isinstance(content, list):
            text = f"{at}.content is neither a string nor a list of blocks"
            raise ApiError(400, text, param="messages")
        elif role == "user":
            chat += _user(content, f"{at}.content")
        else:
            chat.append(_assistant(content, f"{at}.content"))
    if chat and chat[-1]["role"] == "assistant":
        text = "messages ends with the role assistant, but replies cannot be prefilled here: end it"
        raise ApiError(400, f"{text} with the role user", param="messages")
    return chat


def _user(content: list[Any], place: str) -> list[Object]:
    """Return the results of tools and the text of a user's message, in this order."""
    results, texts = [], []
    for index, block in enumerate(content):
        at = f"{place}[{index}]"
        if kind_of(block, at, ("text", "tool_result")) == "text":
            texts.append(text_of(block, "text", at))
            continue
        result = "\n".join(texts_of(block.get("content") or "", f"{at}.content"))
        number = text_of(block, "tool_use_id", at)
        results.append({"role": "tool", "tool_call_id": number, "content": result})
    message = [{"role": "user", "content": content_of(texts)}] if texts or not results else []
    return [*results, *message]


def _assistant(content: list[Any], place: str) -> Object:
    """Return a message of the model: its reasoning, text and calls."""
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        at = f"{place}[{index}]"
        known = ("text", "thinking", "redacted_thinking", "tool_use")
        match kind_of(block, at, known):
            case "text":
                texts.append(text_of(block, "text", at))
            case "thinking":
                thoughts.append(text_of(block, "thinking", at))
            case "tool_use":
                names = (text_of(block, "id", at), text_of(block, "name", at))
                calls.append(call(*names, block.get("input") or {}))
    message: Object = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _tools(tools: list[Object] | None, choice: Object | None) -> Object:
    """Return the fields of a chat about tools."""
    described = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") not in (None, "custom"):
            shown = f"has the type {str(tool['type'])[:40]!r}, which Anthropic's servers run"
            raise unsupported(f"tools[{index}]", shown, "send tools with an input_schema")
        own = (tool.get("name"), tool.get("description"), tool.get("input_schema"))
        described.append(function(*own, strict=tool.get("strict")))
    fields: Object = {"tools": described or None}
    if choice is None:
        return fields
    kind = kind_of(choice, "tool_choice", (*CHOICES, "tool"))
    fields["tool_choice"] = (
        {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}
        if kind == "tool"
        else CHOICES[kind]
    )
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _thinking(thinking: Object | None) -> Object:
    """Return the fields of a chat about reasoning; adaptive is the model's own choice."""
    if thinking is None:
        return {}
    kind = kind_of(thinking, "thinking", ("enabled", "adaptive", "disabled"))
    if kind == "adaptive":
        return {}
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}


def _format(schema: Object) -> Object:
    """Return a schema for the reply as OpenAI's response_format."""
    kind_of(schema, "output_config.format", ("json_schema",))
    named = {"name": "output", "schema": schema.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": named}


class MessagesWriter(BlockWriter):
    """Writes a reply of /v1/messages."""

    def opening(self) -> str:
        """Return the first event, whose numbers of tokens are completed by the last."""
        empty = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return typed({"type": "message_start", "message": {**self._head, **empty, "content": []}})

    def comment(self, read: PromptRead | None) -> bytes:
        """Return an event that clients ignore."""
        return typed({"type": "ping"}).encode()

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return typed(shaped(error, ANTHROPIC)).encode()

    def whole(self) -> Object:
        """Return the message."""
        content = [_block(block) for block in self._blocks.all]
        return {**self._head, **self._end(), "content": content, "usage": self._final_usage()}

    @property
    def _head(self) -> Object:
        name = f"msg_{self._order.name.rpartition('-')[2]}"
        return {"id": name, "type": "message", "role": "assistant", "model": self._model}

    def _change(self, change: Change) -> str:
        block, index = change.block, {"index": change.block.index}
        match change.what:
            case "begin":
                empty = _block(Block(block.kind, block.index, block.call))
                return typed({"type": "content_block_start", **index, "content_block": empty})
            case "more":
                kind, name = BLOCKS[block.kind]
                delta = {"type": kind, name: change.text}
                return typed({"type": "content_block_delta", **index, "delta": delta})
            case "end":
                return typed({"type": "content_block_stop", **index})

    def _ended(self) -> str:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._final_usage()}
        return typed(delta) + typed({"type": "message_stop"})

    def _end(self) -> Object:
        """Return why the reply ended."""
        stop = self.replies[0].stop
        if self._result.finish_reason == "length":
            reason = "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _final_usage(self) -> Object:
        return self._usage(self._result.completion_tokens)

    def _usage(self, completion: int) -> Object:
        prompt, cached = self._prompts()
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": completion,
        }


def _block(block: Block) -> Object:
    """Return a block of a message."""
    if block.call is not None:
        given = {"id": block.call.id, "name": block.call.name, "input": arguments_of(block.text)}
        return {"type": "tool_use", **given}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def add_anthropic(app: FastAPI, service: Service) -> None:
    """Add the routes of Anthropic's API."""

    @app.post("/v1/messages", **documented("messages"))
    async def messages(body: MessagesBody, request: Request) -> Response:
        """The reply to a conversation, as Anthropic's API has it."""
        chat, target = as_body(ChatBody, body.chat()), await service.target(body.model)
        if (await service.support(target)).thoughts is None:
            chat = chat.model_copy(update={"thinking_token_budget": None})
        return await service.answer(chat, request, MessagesWriter)

    @app.post("/v1/messages/count_tokens", **documented("count_tokens"))
    async def count_tokens(body: CountBody, request: Request) -> Response:
        """The number of tokens of a conversation's prompt."""
        prompt = await service.prompt_of(as_body(ChatBody, body.chat()), request)
        return json_response({"input_tokens": len(prompt)})
