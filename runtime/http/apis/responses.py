"""OpenAI's Responses API, without its state: a request becomes a chat, and its reply is written as
items and their events. From OpenAI's reference and the types of openai-python."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from dovetail.protocol.messages import MAX_TURNS
from dovetail.runtime.http.apis.documents import documented
from dovetail.runtime.http.apis.translation import (
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
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.bodies import ChatBody, ReplyLength
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.events import Block, Change
from dovetail.runtime.http.fields import Body
from dovetail.runtime.http.orders import Order
from dovetail.runtime.http.resuming import StreamPlace
from dovetail.runtime.http.service import Service

TEXTS = ("input_text", "output_text", "text")  # types of the parts of a message that are text
STATELESS = "nothing is stored here: send the whole conversation in input"
NAMES: Mapping[str, str] = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
"""Kind of a block -> beginning of the names of its events."""
NO_LOGPROBS: Mapping[str, Sequence[Any]] = {"logprobs": []}
Object = dict[str, Any]


class ResponsesBody(Body):
    """The body of /v1/responses."""

    benign = frozenset(
        {
            *("store", "metadata", "user", "safety_identifier", "service_tier", "include"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            *("client_metadata", "stream_options", "max_tool_calls"),
        }
    )

    model: str | None = Field(None, max_length=512)
    input: str | Annotated[list[Object], Field(min_length=1, max_length=MAX_TURNS)]
    instructions: str | None = None
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Object | None = None
    text: Object | None = None
    max_output_tokens: ReplyLength | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    cache_salt: str | None = Field(None, max_length=512)
    truncation: str | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: str | Object | None = None
    prompt: Object | None = None
    background: bool | None = None

    def chat(self) -> tuple[Object, list[str]]:
        """Return the fields of the chat, and the types of the tools that were left out, which only
        OpenAI's servers run."""
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise unsupported(name, "is not supported", STATELESS)
        if self.truncation not in (None, "disabled"):
            raise unsupported("truncation", "is not supported", "send disabled")
        if self.top_logprobs:
            raise unsupported("top_logprobs", "is not supported", "use /v1/chat/completions")
        first = [] if self.instructions is None else [_message("system", self.instructions)]
        tools, left_out = _tools(self.tools or ())
        return {
            "model": self.model,
            "messages": [*first, *_messages(self.input)],
            "tools": tools or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "response_format": _format(self.text or {}),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "cache_salt": self.cache_salt,
        }, left_out


def _message(role: str, content: Any) -> Object:
    return {"role": role, "content": content}


def _messages(given: str | list[Object]) -> list[Object]:
    """Return the messages of the chat; reasoning and calls join the message of the model."""
    if isinstance(given, str):
        return [_message("user", given)]
    chat: list[Object] = []
    for index, item in enumerate(given):
        at = f"input[{index}]"
        kinds = ("message", "reasoning", "function_call", "function_call_output")
        kind = "message" if "type" not in item and "role" in item else kind_of(item, at, kinds)
        match kind:
            case "message" if item.get("role") == "assistant":
                texts = texts_of(item.get("content"), f"{at}.content", TEXTS)
                _add(chat, content="".join(texts))
            case "message":
                texts = texts_of(item.get("content"), f"{at}.content", TEXTS)
                chat.append(_message(text_of(item, "role", at), content_of(texts)))
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                thought = "".join(texts_of(parts, at, ("reasoning_text", "summary_text")))
                _add(chat, reasoning_content=thought)
            case "function_call":
                names = (text_of(item, "call_id", at), text_of(item, "name", at))
                arguments = text_of(item, "arguments", at)
                _add(chat, tool_calls=[call(*names, arguments)])
            case "function_call_output":
                texts = texts_of(item.get("output"), f"{at}.output", TEXTS)
                number = text_of(item, "call_id", at)
                chat.append({**_message("tool", "".join(texts)), "tool_call_id": number})
    return chat


def _add(chat: list[Object], **fields: Any) -> None:
    """Add to the message of the model with which a conversation ends; begin one if it does not, or
    if reasoning or text would follow a call."""
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    if last is None or ("tool_calls" in last and "tool_calls" not in fields):
        last = _message("assistant", "")
        chat.append(last)
    for name, value in fields.items():
        if value:
            last[name] = last[name] + value if name in last else value


def _tools(tools: Sequence[Object]) -> tuple[list[Object], list[str]]:
    """Return the functions among tools, those of a namespace under `namespace__name`, and the types
    of the others."""
    functions, left_out = [], []
    for index, tool in enumerate(tools):
        match tool.get("type"):
            case "function":
                functions.append(_function(tool, tool.get("name")))
            case "namespace":
                inner = tool.get("tools") or []
                if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                    wrong = "has tools that are no list of objects"
                    raise unsupported(f"tools[{index}]", wrong, "send functions")
                functions += [
                    _function(one, f"{tool.get('name')}__{one.get('name')}")
                    for one in inner
                    if one.get("type", "function") == "function"
                ]
            case str() as kind:
                left_out.append(kind)
            case _:
                raise unsupported(f"tools[{index}]", "has no type", "send function")
    return functions, left_out


def _function(tool: Object, name: Any) -> Object:
    own = (tool.get("description"), tool.get("parameters"))
    return function(name, *own, strict=tool.get("strict"))


def _choice(choice: str | Object | None) -> Any:
    """Return the tool_choice of a chat."""
    if not isinstance(choice, dict):
        return choice
    kind_of(choice, "tool_choice", ("function",))
    name = text_of(choice, "name", "tool_choice")
    return {"type": "function", "function": {"name": name}}


def _format(text: Object) -> Object | None:
    """Return the response_format of a chat."""
    given = text.get("format")
    if given is None:
        return None
    kind = kind_of(given, "text.format", ("text", "json_schema", "json_object"))
    if kind != "json_schema":
        return {"type": kind}
    names = ("name", "description", "schema", "strict")
    schema = {name: given[name] for name in names if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


class ResponsesWriter(BlockWriter):
    """Writes a response with its items."""

    def __init__(
        self,
        order: Order,
        target: RequestTarget,
        model: str,
        places: Sequence[StreamPlace | None] = (),
        *,
        asked: ResponsesBody,
        left_out: Sequence[str],
    ) -> None:
        """`asked`: the request, parts of which a response repeats; `left_out`: types of tools that
        the model does not see."""
        super().__init__(order, target, model, places)
        self._asked, self._left_out = asked, left_out
        self._number = -1

    def opening(self) -> str:
        """Return the first events."""
        begun = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event(kind, response=begun) for kind in kinds)

    def failed(self, error: ApiError) -> bytes:
        """Return the event of a response that failed."""
        failure = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed"), "error": failure}
        return self._event("response.failed", response=response).encode()

    def whole(self) -> Object:
        """Return the response."""
        cut = self._result.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        prompt, cached = self._prompts()
        completion = self._result.completion_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.replies[0].reasoning_tokens},
            "total_tokens": prompt + completion,
        }
        output = [self._item(block, "completed") for block in self._blocks.all]
        if cut and output:
            output[-1]["status"] = "incomplete"
        return {
            **response,
            "output": output,
            "usage": usage,
            "metrics": self._metrics(0, self._result),
        }

    def _response(self, status: str) -> Object:
        asked, sampling = self._asked, self._order.submits[0].sampling
        left_out = {"tools_left_out": ",".join(self._left_out)} if self._left_out else {}
        return {
            "id": f"resp_{self._number_of_order}",
            "object": "response",
            "created_at": self._order.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": left_out,
            "model": self._model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
            "store": False,
            "temperature": sampling.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def _number_of_order(self) -> str:
        return self._order.name.rpartition("-")[2]

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return typed({"type": kind, **fields, "sequence_number": self._number})

    def _id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self._number_of_order}_{block.index}"

    def _item(self, block: Block, status: str) -> Object:
        """Return the item of a block."""
        item = {"id": self._id(block), "status": status}
        if block.call is not None:
            text = block.text if status != "in_progress" else ""
            own = {"call_id": block.call.id, "name": block.call.name, "arguments": text}
            return {**item, "type": "function_call", **own}
        content = [_part(block)] if block.pieces else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _change(self, change: Change) -> str:
        block = change.block
        at = {"output_index": block.index, "item_id": self._id(block)}
        index = {"output_index": block.index}
        part = at if block.call is not None else {**at, "content_index": 0}
        kind, logprobs = NAMES[block.kind], NO_LOGPROBS if block.kind == "text" else {}
        match change.what:
            case "begin":
                empty = Block(block.kind, block.index, block.call)
                item = self._item(empty, "in_progress")
                lines = self._event("response.output_item.added", **index, item=item)
                if block.call is None:
                    lines += self._event("response.content_part.added", **part, part=_part(empty))
                return lines
            case "more":
                return self._event(f"{kind}.delta", **part, delta=change.text, **logprobs)
            case "end":
                if block.call is not None:
                    own = {"name": block.call.name, "arguments": block.text}
                    lines = self._event(f"{kind}.done", **part, **own)
                else:
                    lines = self._event(f"{kind}.done", **part, text=block.text, **logprobs)
                    lines += self._event("response.content_part.done", **part, part=_part(block))
                item = self._item(block, "completed")
                return lines + self._event("response.output_item.done", **index, item=item)

    def _ended(self) -> str:
        response = self.whole()
        return self._event(f"response.{response['status']}", response=response)


def _part(block: Block) -> Object:
    """Return the content of a block of text or reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def add_responses(app: FastAPI, service: Service) -> None:
    """Add the route of the Responses API."""

    @app.post("/v1/responses", **documented("responses"))
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The reply to a conversation, as OpenAI's Responses API has it. Nothing is stored."""
        fields, left_out = body.chat()
        write = partial(ResponsesWriter, asked=body, left_out=left_out)
        return await service.answer(as_body(ChatBody, fields), request, write)
