"""The three APIs that agents speak: the tools and tool results of a request, a forced call, and the
events of a scripted reply."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
Schema = dict[str, Any]
PIECE = 5
"""Characters of arguments in one event: a call arrives in many pieces."""
ANSWER: Schema = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}},
    "required": ["done"],
    "additionalProperties": False,
}
"""An answer that ends: codex and claude-code take one that is cut as an error."""


@dataclass(frozen=True)
class Turn:
    """A scripted reply: a thought, a text, or the call of a tool."""

    text: str = ""
    thought: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] | None = None
    call: str = ""
    """The id of the call."""
    number: int = 1
    """The replies of a session have different ids: claude-code joins those that have the same."""

    @property
    def pieces(self) -> list[str]:
        text = json.dumps(self.arguments or {})
        return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


class Chat:
    """`/v1/chat/completions`."""

    route = "/v1/chat/completions"
    limit = "max_completion_tokens"

    @staticmethod
    def tools(body: Body) -> dict[str, Schema]:
        """The parameters of each tool, by its name."""
        functions = [tool["function"] for tool in body.get("tools") or ()]
        return {one["name"]: one.get("parameters", {}) for one in functions}

    @staticmethod
    def results(body: Body) -> int:
        """How many tool results are in the history."""
        return sum(message["role"] == "tool" for message in body["messages"])

    @staticmethod
    def force(body: Body, tool: str, parameters: Schema | None) -> Body:
        """Let the model call this tool with these parameters; without parameters, let it answer by
        `ANSWER`."""
        if parameters is None:
            schema = {"name": "answer", "schema": ANSWER}
            answer = {"type": "json_schema", "json_schema": schema}
            return {**body, "tool_choice": "none", "response_format": answer}
        function = {"name": tool, "parameters": parameters}
        return {
            **body,
            "tools": [
                {**one, "function": {**one["function"], **function}}
                if one["function"]["name"] == tool
                else one
                for one in body["tools"]
            ],
            "tool_choice": {"type": "function", "function": {"name": tool}},
        }

    @staticmethod
    def stream(turn: Turn) -> Iterator[tuple[str, Any]]:
        """The events of a reply, each a name, which may be empty, and data."""
        deltas: list[Body] = [{"role": "assistant", "content": ""}]
        if turn.thought:
            deltas.append({"reasoning_content": turn.thought})
        if turn.text:
            deltas.append({"content": turn.text})
        if turn.tool:
            head = {"name": turn.tool, "arguments": ""}
            deltas.append(
                {
                    "tool_calls": [
                        {"index": 0, "id": turn.call, "type": "function", "function": head}
                    ]
                }
            )
            deltas += [
                {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
                for piece in turn.pieces
            ]
        deltas.append({})
        for delta in deltas:
            ended = None if delta else "tool_calls" if turn.tool else "stop"
            yield "", _chunk(turn, [{"index": 0, "delta": delta, "finish_reason": ended}])
        usage = {
            "prompt_tokens": 100,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens": 10,
            "total_tokens": 110,
        }
        yield "", {**_chunk(turn, []), "usage": usage}
        yield "", "[DONE]"


def _chunk(turn: Turn, choices: list[Body]) -> Body:
    return {
        "id": f"chatcmpl-{turn.number}",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "dovetail",
        "choices": choices,
    }


class Responses:
    """`/v1/responses`."""

    route = "/v1/responses"
    limit = "max_output_tokens"

    @staticmethod
    def tools(body: Body) -> dict[str, Schema]:
        return {
            tool["name"]: tool.get("parameters") or {}
            for tool in body.get("tools") or ()
            if tool["type"] == "function"
        }

    @staticmethod
    def results(body: Body) -> int:
        return sum(item.get("type") == "function_call_output" for item in body["input"])

    @staticmethod
    def force(body: Body, tool: str, parameters: Schema | None) -> Body:
        if parameters is None:
            answer = {"type": "json_schema", "name": "answer", "schema": ANSWER}
            return {**body, "tool_choice": "none", "text": {"format": answer}}
        return {
            **body,
            "tools": [
                {**one, "parameters": parameters} if one.get("name") == tool else one
                for one in body["tools"]
            ],
            "tool_choice": {"type": "function", "name": tool},
        }

    @staticmethod
    def stream(turn: Turn) -> Iterator[tuple[str, Any]]:
        for number, (name, data) in enumerate(_response(turn)):
            yield name, {**data, "sequence_number": number}


def _response(turn: Turn) -> Iterator[tuple[str, Body]]:
    reply: Body = {
        "id": f"resp_{turn.number}",
        "object": "response",
        "created_at": 1,
        "model": "dovetail",
        "status": "in_progress",
        "output": [],
    }
    yield "response.created", {"response": reply}
    output: list[Body] = []
    for item, events in _items(turn):
        place = {"output_index": len(output), "item_id": item["id"]}
        begun = {**item, "status": "in_progress"}
        begun |= {"arguments": ""} if turn.tool and "name" in item else {}
        begun |= {"content": []} if "content" in item else {}
        yield "response.output_item.added", {**place, "item": begun}
        for name, data in events:
            yield f"response.{name}", {**place, **data}
        output.append({**item, "status": "completed"})
        yield "response.output_item.done", {**place, "item": output[-1]}
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 110,
    }
    done = {**reply, "status": "completed", "output": output, "usage": usage}
    yield "response.completed", {"response": done}


def _items(turn: Turn) -> Iterator[tuple[Body, list[tuple[str, Body]]]]:
    """The output items of a reply, each with the events of its content."""
    if turn.text:
        part = {"type": "output_text", "text": turn.text, "annotations": []}
        yield (
            {"id": f"msg_{turn.number}", "type": "message", "role": "assistant", "content": [part]},
            [
                ("content_part.added", {"content_index": 0, "part": {**part, "text": ""}}),
                ("output_text.delta", {"content_index": 0, "delta": turn.text}),
                ("output_text.done", {"content_index": 0, "text": turn.text}),
                ("content_part.done", {"content_index": 0, "part": part}),
            ],
        )
    if turn.tool:
        whole = "".join(turn.pieces)
        yield (
            {
                "id": f"fc_{turn.number}",
                "type": "function_call",
                "call_id": turn.call,
                "name": turn.tool,
                "arguments": whole,
            },
            [
                *(("function_call_arguments.delta", {"delta": piece}) for piece in turn.pieces),
                ("function_call_arguments.done", {"arguments": whole}),
            ],
        )


class Messages:
    """`/v1/messages`."""

    route = "/v1/messages"
    limit = "max_tokens"

    @staticmethod
    def tools(body: Body) -> dict[str, Schema]:
        return {
            tool["name"]: tool["input_schema"]
            for tool in body.get("tools") or ()
            if "input_schema" in tool
        }

    @staticmethod
    def results(body: Body) -> int:
        return sum(
            block.get("type") == "tool_result"
            for message in body["messages"]
            if isinstance(message["content"], list)
            for block in message["content"]
        )

    @staticmethod
    def force(body: Body, tool: str, parameters: Schema | None) -> Body:
        if parameters is None:
            answer = {"type": "json_schema", "schema": ANSWER}
            output = {**body.get("output_config", {}), "format": answer}
            return {**body, "tool_choice": {"type": "none"}, "output_config": output}
        return {
            **body,
            "tools": [
                {**one, "input_schema": parameters} if one["name"] == tool else one
                for one in body["tools"]
            ],
            "tool_choice": {"type": "tool", "name": tool},
        }

    @staticmethod
    def stream(turn: Turn) -> Iterator[tuple[str, Any]]:
        message: Body = {
            "id": f"msg_{turn.number}",
            "type": "message",
            "role": "assistant",
            "model": "dovetail",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 100, "output_tokens": 1},
        }
        yield "message_start", {"message": message}
        blocks: list[tuple[Body, list[Body]]] = []
        if turn.thought:
            blocks.append(
                (
                    {"type": "thinking", "thinking": "", "signature": ""},
                    [{"type": "thinking_delta", "thinking": turn.thought}],
                )
            )
        if turn.text:
            blocks.append(
                ({"type": "text", "text": ""}, [{"type": "text_delta", "text": turn.text}])
            )
        if turn.tool:
            blocks.append(
                (
                    {"type": "tool_use", "id": turn.call, "name": turn.tool, "input": {}},
                    [{"type": "input_json_delta", "partial_json": one} for one in turn.pieces],
                )
            )
        for index, (block, deltas) in enumerate(blocks):
            yield "content_block_start", {"index": index, "content_block": block}
            for delta in deltas:
                yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        ended = {"stop_reason": "tool_use" if turn.tool else "end_turn", "stop_sequence": None}
        yield "message_delta", {"delta": ended, "usage": {"output_tokens": 10}}
        yield "message_stop", {}


Dialect = type[Chat] | type[Responses] | type[Messages]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
DIALECTS: dict[str, Dialect] = {one.route: one for one in (Chat, Responses, Messages)}


def limited(dialect: Dialect, body: Body, tokens: int) -> Body:
    """A request whose reply has at most this many tokens."""
    kept = {name: value for name, value in body.items() if name not in LIMITS}
    return {**kept, dialect.limit: tokens}


def event_bytes(dialect: Dialect, name: str, data: Any) -> bytes:
    """An event as it is sent."""
    if not name:
        return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()
