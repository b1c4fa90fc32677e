"""Recorded sessions, posted to a server; the replies are read by the SDKs of OpenAI and
Anthropic."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
from anthropic.lib.streaming import MessageStream
from anthropic.types import Message, RawMessageStreamEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from agents.dialects import DIALECTS, Body, Chat, Dialect, Messages, Schema, limited

TOKENS = 24
"""Of a reply that nothing ends."""
CALL_TOKENS = 400
NOT_REUSED = 64
"""Tokens at the end of a prompt that may be read again."""


@dataclass
class Reply:
    """What an SDK made of a reply."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Id, name and arguments of each."""
    ended: str = ""
    prompt: int = 0
    cached: int = 0


def read_session(file: Path) -> list[dict[str, Any]]:
    """The requests of a recording that ask for a reply."""
    requests = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [one for one in requests if one["path"].partition("?")[0] in DIALECTS]


class Poster:
    """Posts bodies as they are, by the SDKs."""

    def __init__(self, url: str) -> None:
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def post(self, request: dict[str, Any], body: Body) -> Reply:
        """Post a body in place of a request's own, to its path and with its headers."""
        dialect = DIALECTS[request["path"].partition("?")[0]]
        options = {"headers": request["headers"]}
        if dialect is Messages:
            return self._messages(request["path"], body, options)
        path = request["path"].removeprefix("/v1")
        if dialect is Chat:
            return self._chat(path, body, options)
        return self._responses(path, body, options)

    def _chat(self, path: str, body: Body, options: Any) -> Reply:
        whole = _post(self._openai, path, body, options, ChatCompletion, ChatCompletionChunk)
        if body["stream"]:
            state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
            for chunk in whole:
                state.handle_chunk(chunk)
            whole = state.current_completion_snapshot
        (choice,) = whole.choices
        usage = whole.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return Reply(
            text=choice.message.content or "",
            thought=getattr(choice.message, "reasoning_content", None) or "",
            calls=[
                (call.id, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
                if call.type == "function"
            ],
            ended=choice.finish_reason,
            prompt=usage.prompt_tokens,
            cached=usage.prompt_tokens_details.cached_tokens or 0,
        )

    def _responses(self, path: str, body: Body, options: Any) -> Reply:
        found = _post(self._openai, path, body, options, Response, ResponseStreamEvent)
        return _of_events(found) if body["stream"] else _of_response(found)

    def _messages(self, path: str, body: Body, options: Any) -> Reply:
        message = _post(self._anthropic, path, body, options, Message, RawMessageStreamEvent)
        if body["stream"]:
            message = MessageStream(message, anthropic.NOT_GIVEN).get_final_message()
        reply = Reply(
            ended=message.stop_reason or "",
            prompt=message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
            cached=message.usage.cache_read_input_tokens or 0,
        )
        for block in message.content:
            if block.type == "text":
                reply.text += block.text
            elif block.type == "thinking":
                reply.thought += block.thinking
            elif block.type == "tool_use":
                reply.calls.append((block.id, block.name, json.dumps(block.input)))
        return reply


def _post(client: Any, path: str, body: Body, options: Any, whole: Any, event: Any) -> Any:
    """The parsed reply of an SDK's client, or its stream of events."""
    if not body["stream"]:
        return client.post(path, body=body, options=options, cast_to=whole)
    kind = (openai if isinstance(client, openai.OpenAI) else anthropic).Stream[event]
    return client.post(
        path, body=body, options=options, cast_to=event, stream=True, stream_cls=kind
    )


def _of_events(events: Iterable[ResponseStreamEvent]) -> Reply:
    """The final response; its texts and arguments must be those of the deltas, and its events must
    be numbered."""
    text, arguments = "", ""
    for number, event in enumerate(events):
        assert event.sequence_number == number, event
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            reply = _of_response(event.response)
            assert reply.text == text
            assert "".join(written for _, _, written in reply.calls) == arguments
            return reply
        else:
            assert event.type not in ("response.failed", "error"), event
    raise AssertionError("the stream ended without its last event")


def _of_response(response: Response) -> Reply:
    assert response.usage is not None
    reasons = response.incomplete_details
    reply = Reply(
        text=response.output_text,
        ended=(reasons.reason or "") if reasons else response.status or "",
        prompt=response.usage.input_tokens,
        cached=response.usage.input_tokens_details.cached_tokens,
    )
    for item in response.output:
        if item.type == "function_call":
            reply.calls.append((item.call_id, item.name, item.arguments))
        elif item.type == "reasoning":
            reply.thought += "".join(part.text for part in item.content or ())
    return reply


def replay(url: str, file: Path) -> list[Reply]:
    """Post a session's requests, each of which must reuse the one before; then its first with a
    forced call, streamed and whole. Returns all replies."""
    poster = Poster(url)
    replies: list[Reply] = []
    session = [one for one in read_session(file) if dialect_of(one).tools(one["body"])]
    for other in read_session(file):
        if other not in session:  # a request for a title
            poster.post(other, limited(dialect_of(other), other["body"], TOKENS))
    for request in session:
        body = limited(dialect_of(request), request["body"], TOKENS)
        reply = poster.post(request, body)
        if replies:
            assert reply.cached >= replies[-1].prompt - NOT_REUSED, (reply, replies[-1])
        replies.append(reply)
    first = session[0]
    dialect = dialect_of(first)
    tool = first_called(session)
    parameters = closed(dialect.tools(first["body"])[tool])
    forced = limited(dialect, dialect.force(first["body"], tool, parameters), CALL_TOKENS)
    streamed = poster.post(first, forced)
    check_call(streamed, tool, parameters)
    forced.pop("stream_options", None)
    whole = poster.post(first, {**forced, "stream": False})
    assert [one[1:] for one in whole.calls] == [one[1:] for one in streamed.calls]
    assert whole.text == streamed.text
    return [*replies, streamed, whole]


def dialect_of(request: dict[str, Any]) -> Dialect:
    return DIALECTS[request["path"].partition("?")[0]]


def first_called(session: list[dict[str, Any]]) -> str:
    """The name of the tool that is called first in a recorded session."""
    body = session[1]["body"]
    history = json.dumps(body.get("messages", body.get("input")))
    return next(one for one in dialect_of(session[1]).tools(body) if f'"name": "{one}"' in history)


def closed(parameters: Schema) -> Schema:
    """The required parameters of a tool and no others, so that every model comes to an end."""
    kept = {name: parameters["properties"][name] for name in parameters["required"]}
    return {**parameters, "properties": kept, "additionalProperties": False}


def check_call(reply: Reply, tool: str, parameters: Schema) -> None:
    """There is one call, of this tool, with an id, and its arguments obey the tool's schema."""
    ((call, name, arguments),) = reply.calls
    assert call, reply
    assert name == tool, reply
    assert reply.ended not in ("length", "max_tokens", "max_output_tokens"), reply
    jsonschema.validate(json.loads(arguments), parameters)
