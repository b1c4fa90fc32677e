"""The three APIs that agents speak: the tools and tool results of a request, a forced call, and
scripted replies."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.runtime.http.apis.anthropic import MessagesWriter
from dovetail.runtime.http.apis.openai import ChatWriter
from dovetail.runtime.http.apis.responses import ResponsesBody, ResponsesWriter
from dovetail.runtime.http.events import CallArguments, CallBegun, CallEnded, Event, Reasoning, Text
from support.written import written

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
    def events(self) -> list[Event]:
        events: list[Event] = [Reasoning(self.thought)] if self.thought else []
        events += [Text(self.text)] if self.text else []
        if self.tool:
            text = json.dumps(self.arguments or {})
            pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
            events += [
                CallBegun(0, self.call, self.tool),
                *(CallArguments(0, one) for one in pieces),
            ]
            events.append(CallEnded(0))
        return events


class Chat:
    """`/v1/chat/completions`."""

    route = "/v1/chat/completions"
    writer = ChatWriter
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


class Responses:
    """`/v1/responses`."""

    route = "/v1/responses"
    writer = partial(ResponsesWriter, asked=ResponsesBody(input="x"), left_out=())
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


class Messages:
    """`/v1/messages`."""

    route = "/v1/messages"
    writer = MessagesWriter
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


Dialect = type[Chat] | type[Responses] | type[Messages]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
DIALECTS: dict[str, Dialect] = {one.route: one for one in (Chat, Responses, Messages)}


def limited(dialect: Dialect, body: Body, tokens: int) -> Body:
    """A request whose reply has at most this many tokens."""
    kept = {name: value for name, value in body.items() if name not in LIMITS}
    return {**kept, dialect.limit: tokens}


def streamed(dialect: Dialect, turn: Turn) -> bytes:
    """A scripted reply as it is sent."""
    return written(dialect.writer, turn.events, name=f"reply-{turn.number}")
