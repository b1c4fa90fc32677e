"""ollama's API: /api/chat and /api/generate, in lines of JSON, and its descriptions of models. From
ollama's reference and the types of its client."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from dovetail.protocol.messages import MAX_TURNS, PromptRead
from dovetail.runtime.http.apis.documents import documented
from dovetail.runtime.http.apis.translation import arguments_of, as_body, call, unsupported
from dovetail.runtime.http.apis.writers import BlockWriter, compact
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.bodies import ChatBody, CompletionBody
from dovetail.runtime.http.errors import OLLAMA, ApiError, shaped
from dovetail.runtime.http.events import Block, Change, all_text
from dovetail.runtime.http.fields import Body
from dovetail.runtime.http.service import Service, json_response

VERSION = "0.14.0"  # of the API that is served, since clients refuse servers that are too old
LATEST = ":latest"  # ollama's tag for a name without one
NANOSECONDS = 1_000_000_000
LOADED = frozenset(
    {
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv"),
        *("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread"),
        *("num_keep", "draft_num_predict"),
    }
)
"""Options for loading a model, which has been loaded."""
Object = dict[str, Any]


class OllamaBody(Body):
    """What both requests have."""

    benign = frozenset({"keep_alive"})

    model: str = Field(max_length=512)
    stream: bool | None = None
    format: str | Object | None = None
    options: Object | None = None
    think: bool | str | None = None

    def common(self) -> Object:
        """Return the fields of a completion that are the same in both."""
        options = {n: v for n, v in (self.options or {}).items() if n not in LOADED}
        options["penalize_nl"] = options.pop("penalize_newline", None)
        if options.get("num_predict") == -2:  # until the context is full
            options["num_predict"] = -1
        fields = {**options, "model": name_of(self.model), "stream": self.stream is not False}
        if self.format:
            fields["response_format"] = _format(self.format)
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think:
            fields["reasoning_effort"] = self.think
        return fields


class OllamaChatBody(OllamaBody):
    """The body of /api/chat."""

    messages: Annotated[list[Object], Field(max_length=MAX_TURNS)] | None = None
    tools: list[Object] | None = None

    def chat(self) -> Object:
        """Return the fields of the chat."""
        return {
            **self.common(),
            "messages": _messages(self.messages or []),
            "tools": self.tools or None,
        }


class OllamaGenerateBody(OllamaBody):
    """The body of /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    context: list[int] | None = None

    def completion(self, target: RequestTarget) -> ChatBody | CompletionBody:
        """Return the completion: a chat, unless `raw` or the model has no template."""
        for name in ("suffix", "template", "images", "context"):
            if getattr(self, name):
                raise unsupported(name, "is not supported", "use /api/chat, with text alone")
        fields = self.common()
        if self.raw or not (target.described.vocabulary.template or self.system):
            own = {"prompt": self.prompt, "max_tokens": -1}
            return as_body(CompletionBody, {**own, **_as_max_tokens(fields)})
        first = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*first, {"role": "user", "content": self.prompt}]
        return as_body(ChatBody, {**fields, "messages": messages})


class ShowBody(Body):
    """The body of /api/show."""

    benign = frozenset({"verbose"})

    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512, description="the same, in earlier clients")


def name_of(model: str) -> str:
    """Return a model's name without ollama's default tag."""
    return model.removesuffix(LATEST)


def _as_max_tokens(fields: Mapping[str, Any]) -> Object:
    """Return fields in which `num_predict`, if given, replaces another length."""
    given = dict(fields)
    length = given.pop("num_predict", None)
    return given if length is None else {**given, "max_tokens": length}


def _format(wanted: str | Object) -> Object:
    """Return OpenAI's response_format for a format."""
    if isinstance(wanted, str):
        if wanted != "json":
            raise unsupported("format", f"is {wanted[:40]!r}", "send 'json' or a JSON schema")
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted}}


def _messages(messages: list[Object]) -> list[Object]:
    """Return the messages of a chat. ollama's calls have no ids: results answer them in order, or
    by the name of the tool."""
    chat: list[Object] = []
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        at, role = f"messages[{index}]", message.get("role")
        if message.get("images"):
            raise unsupported(at, "has images, but the model reads text only", "leave them out")
        own: Object = {"role": role, "content": message.get("content") or ""}
        if thinking := message.get("thinking"):
            own["reasoning_content"] = thinking
        if calls := message.get("tool_calls"):
            listed = calls if isinstance(calls, list) else [calls]
            called = [(f"call{index:04}{n}", _function(one, at)) for n, one in enumerate(listed)]
            waiting = [(str(one.get("name")), number) for number, one in called]
            own["tool_calls"] = [
                call(number, one.get("name"), one.get("arguments") or {}) for number, one in called
            ]
        if role == "tool":
            name = message.get("tool_name") or message.get("name")
            found = next((one for one in waiting if one[0] == name), None)
            found = found or (waiting[0] if waiting else None)
            if found is None:
                raise unsupported(at, "is a result without a call", "send the message with it")
            waiting.remove(found)
            own["tool_call_id"] = message.get("tool_call_id") or found[1]
        chat.append(own)
    return chat


def _function(called: Any, place: str) -> Object:
    """Return the function of a call in an earlier message."""
    function = called.get("function") if isinstance(called, dict) else None
    if not isinstance(function, dict):
        raise unsupported(place, "has tool_calls without a function", "send its name and arguments")
    return function


class OllamaWriter(BlockWriter):
    """Writes a reply of /api/chat."""

    content_type = "application/x-ndjson"

    def comment(self, read: PromptRead | None) -> bytes:
        """Return a line without text, since there are no comments."""
        return self._line(self._reply("")).encode()

    def failed(self, error: ApiError) -> bytes:
        """Return the line of an error."""
        return f"{compact(shaped(error, OLLAMA))}\n".encode()

    def whole(self) -> Object:
        """Return the reply in one piece."""
        blocks = self._blocks.all
        calls = [_call(block) for block in blocks if block.call is not None]
        own = self._reply(all_text(blocks, "text"), all_text(blocks, "reasoning"), calls)
        return {**self._about(), **own, **self._end()}

    def _change(self, change: Change) -> str:
        block = change.block
        if change.what == "more" and block.kind == "text":
            return self._line(self._reply(change.text))
        if change.what == "more" and block.kind == "reasoning":
            return self._line(self._reply("", change.text))
        if change.what == "end" and block.call is not None:
            return self._line(self._reply("", calls=[_call(block)]))
        return ""

    def _ended(self) -> str:
        return f"{compact({**self._about(), **self._reply(''), **self._end()})}\n"

    def _line(self, fields: Object) -> str:
        return f"{compact({**self._about(), **fields, 'done': False})}\n"

    def _about(self) -> Object:
        created = datetime.fromtimestamp(self._order.created, UTC)
        return {"model": self._model, "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def _reply(self, text: str, reasoning: str = "", calls: Sequence[Object] = ()) -> Object:
        """Return a reply, or a part of one."""
        thinking = {"thinking": reasoning} if reasoning else {}
        called = {"tool_calls": [*calls]} if calls else {}
        return {"message": {**_assistant(text), **thinking, **called}}

    def _end(self) -> Object:
        """Return the figures of a reply that has ended; durations are in ns."""
        result = self._result
        seconds = {
            "total_duration": result.wall_s,
            "load_duration": 0.0,
            "prompt_eval_duration": result.prefill_s,
            "eval_duration": max(0.0, result.wall_s - result.time_to_first_token_s),
        }
        return {
            "done": True,
            "done_reason": result.finish_reason,
            **{name: round(value * NANOSECONDS) for name, value in seconds.items()},
            "prompt_eval_count": result.prompt_tokens,
            "eval_count": result.completion_tokens,
        }


class GenerateWriter(OllamaWriter):
    """Writes a reply of /api/generate."""

    def _reply(self, text: str, reasoning: str = "", calls: Sequence[Object] = ()) -> Object:
        return {"response": text, **({"thinking": reasoning} if reasoning else {})}


def _assistant(text: str) -> Object:
    return {"role": "assistant", "content": text}


def _call(block: Block) -> Object:
    """Return a call; its arguments are an object."""
    begun = block.call
    assert begun is not None
    given = {"index": begun.index, "name": begun.name, "arguments": arguments_of(block.text)}
    return {"id": begun.id, "function": given}


def add_ollama(app: FastAPI, service: Service) -> None:
    """Add the routes of ollama's API."""
    _add_replies(app, service)
    _add_models(app, service)


def _add_replies(app: FastAPI, service: Service) -> None:
    def loaded(model: str, **reply: Any) -> Response:
        """Answer a request without a prompt, with which clients load a model."""
        about = {"model": model, "created_at": datetime.now(UTC).isoformat(), **reply}
        return json_response({**about, "done": True, "done_reason": "load"})

    @app.post("/api/chat", **documented("ollama_chat"))
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        """The reply to a conversation, as ollama's API has it."""
        if not body.messages:
            target = await service.target(name_of(body.model))
            return loaded(service.name_of(target), message=_assistant(""))
        return await service.answer(as_body(ChatBody, body.chat()), request, OllamaWriter)

    @app.post("/api/generate", **documented("ollama_generate"))
    async def generate(body: OllamaGenerateBody, request: Request) -> Response:
        """The reply to a prompt, or its continuation with `raw`, as ollama's API has it."""
        target = await service.target(name_of(body.model))
        if not body.prompt:
            return loaded(service.name_of(target), response="")
        return await service.answer(body.completion(target), request, GenerateWriter)


def _add_models(app: FastAPI, service: Service) -> None:
    began = datetime.fromtimestamp(service.began, UTC).isoformat()

    async def listed() -> Object:
        target = await service.target()
        name = service.name_of(target)
        return {
            "name": name,
            "model": name,
            "modified_at": began,
            "size": 0,
            "digest": target.described.fingerprint,
            "details": _details(target),
        }

    @app.get("/api/tags", **documented("ollama_tags"))
    async def tags() -> Response:
        """The served model, in a list."""
        return json_response({"models": [await listed()]})

    @app.get("/api/ps", **documented("ollama_ps"))
    async def running() -> Response:
        """The same, as a loaded model."""
        own = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        context = (await service.target()).context
        return json_response({"models": [{**await listed(), **own, "context_length": context}]})

    @app.post("/api/show", **documented("ollama_show"))
    async def show(body: ShowBody) -> Response:
        """A description of the served model."""
        given = body.model or body.name
        target = await service.target(None if given is None else name_of(given))
        family = "dovetail"
        support = await service.support(target)
        thinks, calls = support.thoughts is not None, support.family is not None
        return json_response(
            {
                "modified_at": began,
                "template": target.described.vocabulary.template,
                "parameters": "",
                "details": _details(target),
                "model_info": {
                    "general.architecture": family,
                    f"{family}.context_length": target.context,
                    f"{family}.vocab_size": target.described.vocabulary.size,
                },
                "capabilities": ["completion", *["tools"] * calls, *["thinking"] * thinks],
            }
        )

    @app.get("/api/version", **documented("ollama_version"))
    async def version() -> Response:
        """The version of ollama's API that is served."""
        return json_response({"version": VERSION})


def _details(target: RequestTarget) -> Object:
    """Return what is known of a model: the type of its weights."""
    weights = target.described.fingerprint.split("/")[1:2]
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": weights[0] if weights else "",
    }
