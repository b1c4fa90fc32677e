"""A client of a server over HTTP, with the standard library: its properties, and streamed replies.
Other servers than dovetail send only the text."""

import http.client
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pydantic import ValidationError

from dovetail.launch.chat.answering import PLAIN, Answer, Manner, Paint, Show, spoken
from dovetail.launch.processes.connection import ON_ITS_MACHINE
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.protocol.errors import DovetailError, RequestError, UserError, printable
from dovetail.protocol.files import read_text
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import SamplingSettings
from dovetail.runtime.text.tokenizer import NO_TEMPLATE

CONNECT_S = 10.0
SILENCE_S = 120.0
"""A server that is silent for this long, during prefill or within a reply, counts as lost."""
MOST_WORDS = 200  # characters shown of an invalid answer
KEY_VARIABLE = "DOVETAIL_API_KEY"
SERVERS = ("acceptance", "generation_config")  # sampling settings that the server decides
SECTIONS = ("target", "draft", "tree", "coordinator")  # settings that it decides, too
LATER = (429, 503)
"""The target is full, or restarting: the same request may be answered a little later."""
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}  # fields of a request
DONE = b"[DONE]"
MOST_BYTES = 64 << 20
"""The most bytes read of a stream, or of a line of it: more than any reply has."""


def check_flags(
    configuration: Configuration, otherwise: str = ON_ITS_MACHINE, *, asked: Sequence[str] = ()
) -> None:
    """`UserError` for a setting that only the server can decide, except those `asked` and
    `draft.kind = none`, which a request can have. `otherwise`: the remedy."""
    for name, origin in configuration.origins.items():
        section, _, field = name.partition(".")
        none = name == "draft.kind" and configuration.value(name) == "none"
        wish = none or name in asked
        theirs = section in SECTIONS or (section == "sampling" and field in SERVERS)
        if origin.startswith("--") and theirs and not wish:
            raise UserError(f"the server decides --{name}: leave it out, or {otherwise}")


def api_key(configuration: Configuration) -> str:
    """The key to send: the first in the settings' file, else that in the environment; empty if
    there is none."""
    file = configuration.settings.http.api_key_file
    if not file:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        lines = read_text(Path(file).expanduser(), f"the file of API keys {file}").splitlines()
    except OSError as error:
        raise UserError(f"the file of API keys {file} cannot be read: {error.strerror}") from None
    return next((line.strip() for line in lines if line.strip()), "")


def said_to_server(configuration: Configuration) -> frozenset[str]:
    """The names of the sampling settings that the user has set: a server decides the others."""
    names = SamplingSettings.model_fields
    return frozenset(name for name in names if configuration.given(f"sampling.{name}"))


class WebServer:
    """A server, and the key for requests."""

    def __init__(self, url: str, key: str, *, silence_s: float = SILENCE_S) -> None:
        self._parts, self._key, self._silence_s = _checked(url), key, silence_s

    @property
    def url(self) -> str:
        return self._parts.geturl()

    def get(self, path: str) -> dict[str, Any]:
        with self.asked("GET", path) as response:
            return _object(response.read())

    @contextmanager
    def asked(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Return the server's response if it succeeded; the connection ends with the block."""
        with self.opened(method, path, body) as response:
            if response.status != 200:
                raise _failure(response.status, _object(response.read()), sent_key=bool(self._key))
            yield response

    @contextmanager
    def opened(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Return the server's response, whatever its status; the connection ends with the block."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        path = self._parts.path.rstrip("/").removesuffix("/v1") + path
        with closing(self._connect()) as connection:
            try:
                connection.request(method, path, body, headers)
                with connection.getresponse() as response:
                    yield response
            except (OSError, http.client.HTTPException) as error:
                raise DovetailError(f"the server at {self.url} {self._fault(error)}") from None

    def _fault(self, error: OSError | http.client.HTTPException) -> str:
        """Describe the server's response in printable words."""
        if isinstance(error, TimeoutError):
            return f"has sent nothing for {self._silence_s:g} s"
        said = printable((str(error) or type(error).__name__).strip()[:MOST_WORDS])
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
            return f"does not speak HTTP; it answers: {said}"
        return f"closed the connection: {said}"

    def _connect(self) -> http.client.HTTPConnection:
        secret = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secret else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            why = f"no server answers at {self.url} ({error.strerror or error})"
            raise UserError(f"{why}: start `dovetail serve` there") from None
        connection.sock.settimeout(self._silence_s)
        return connection


class WebAnswerer:
    """Gets replies from a server; queries at once which model it serves."""

    def __init__(self, url: str, key: str, model: str = "") -> None:
        """`model`: one of the server's; empty: the first that is loaded."""
        self._site = WebServer(url, key)
        self.plain = False  # whether it continues plain text, without a chat template
        models = self._site.get("/v1/models").get("data") or [{}]
        if model:
            chosen = next((one for one in models if one.get("id") == model), {"id": model})
        else:
            chosen = next((one for one in models if _is_loaded(one)), models[0])
        self._model, self._loaded = str(chosen.get("id", "")), _is_loaded(chosen)
        held = chosen.get("sampling")
        self._defaults: Mapping[str, Any] = held if isinstance(held, dict) else {}

    def models(self) -> str:
        return f"{printable(self._model)} at {self._site.url}"

    def no_chats(self) -> str:
        if not self._loaded:  # the answer would come after the model is loaded
            return ""
        asked = {"model": self._model, "messages": [{"role": "user", "content": "hello"}]}
        with self._site.opened("POST", "/tokenize", json.dumps(asked).encode()) as response:
            said = _object(response.read()) if response.status == 400 else {}
        why = str(_failure(400, said)) if said else ""
        self.plain = why.startswith(NO_TEMPLATE)
        return PLAIN if self.plain else why

    def defaults(self, manner: Manner) -> str:
        """Describe the server's reported sampling defaults; empty if they are dovetail's."""
        usual = SamplingSettings().model_dump(mode="json")
        held = [
            f"{name} {printable(str(value))}"
            for name, value in self._defaults.items()
            if not manner.decides(name) and name in usual and value != usual[name]
        ]
        return f"sampling by the server: {', '.join(held)}" if held else ""

    def answer(self, turns: Sequence[str], manner: Manner, show: Show) -> Answer:
        """Stream a reply, as `answering.Answerer` describes; interrupting it closes the
        connection."""
        reply, path = _Reply(show), "/v1/completions" if self.plain else "/v1/chat/completions"
        try:
            with closing(self._stream(path, self._body(turns, manner))) as events:
                for event in events:
                    reply.hear(event)
        except KeyboardInterrupt:
            return Answer(reply.text, interrupted=True)
        return Answer(reply.text, reply.result())

    def _body(self, turns: Sequence[str], manner: Manner) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": "\n".join(turns)}
        if not self.plain:
            body = {"messages": spoken(turns)}
        body |= {
            name: value
            for name, value in manner.sampling.model_dump(mode="json").items()
            if name not in (*SERVERS, "max_tokens") and manner.decides(name)
        }
        if manner.decides("max_tokens"):
            body["max_tokens" if self.plain else "max_completion_tokens"] = manner.max_tokens
        if manner.template:
            body["chat_template_kwargs"] = dict(manner.template)
        if manner.stop:
            body["stop"] = list(manner.stop)
        if manner.seed is not None:
            body["seed"] = manner.seed
        dovetail = {"drafted": True, "speculate": manner.speculate, "fit": True}
        return {"model": self._model, **STREAMED, **body, "dovetail": dovetail}

    def _stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        with self._site.asked("POST", path, json.dumps(body).encode()) as response:
            for data in events_of(response):
                if data == DONE:
                    return
                event = _object(data)
                if "error" in event:
                    raise _failure(500, event)
                yield event
        raise DovetailError(f"the server at {self._site.url} closed the connection within a reply")


def answerer_at(url: str, configuration: Configuration) -> WebAnswerer:
    """Return a client of the server at `url`; a model on the command line is one of the server's.
    `UserError` for other settings that the server decides."""
    check_flags(configuration, asked=("target.model",))
    named = configuration.origins["target.model"].startswith(("--", POSITIONAL))
    model = configuration.settings.target.model if named else ""
    return WebAnswerer(url, api_key(configuration), model)


def _is_loaded(model: Mapping[str, Any]) -> bool:
    """Whether a model of /v1/models is loaded; a server of one model has no `status`."""
    status = model.get("status")
    return not isinstance(status, dict) or status.get("value") == "loaded"


class EndlessError(DovetailError):
    """A stream does not end."""


def events_of(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the data of each server-sent event."""
    left = MOST_BYTES
    while line := response.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise EndlessError(f"no end after {MOST_BYTES >> 20} MiB of the stream")
        if line.startswith(b"data:"):
            yield line[len(b"data:") :].strip()


class _Reply:
    """A reply in progress: its text, shown as it arrives, and its figures."""

    def __init__(self, show: Show) -> None:
        self._show, self._paint = show, Paint()
        self._tokens: list[int] = []
        self._usage: dict[str, Any] = {}
        self._metrics: dict[str, Any] | None = None
        self._reason = "stop"
        self.text = ""

    def hear(self, event: dict[str, Any]) -> None:
        self._usage = event.get("usage") or self._usage
        self._metrics = event.get("metrics") or self._metrics
        for choice in event.get("choices", ()):
            told = choice.get("dovetail") or {}
            self._tokens += told.get("tokens", ())
            self._paint.push(zip(told.get("texts", ()), told.get("drafted", ()), strict=False))
            self._reason = choice.get("finish_reason") or self._reason
            text = (choice.get("delta") or choice).get("content") or choice.get("text") or ""
            for piece in self._paint.take(text):
                self._show(*piece)
            self.text += text

    def result(self) -> Result | None:
        told = {name: self._usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")}
        told |= {"finish_reason": self._reason, **(self._metrics or {})}
        told |= {"text": self.text, "token_ids": self._tokens}
        known = {name: value for name, value in told.items() if name in Result.model_fields}
        try:
            return Result.model_validate_json(json.dumps(known, ensure_ascii=False))
        except ValidationError:
            return None


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"{url!r} is not a URL ({error}): write http://HOST:PORT") from None
    more = parts.query or parts.fragment or parts.username
    if parts.scheme not in ("http", "https") or not parts.hostname or more:
        raise UserError(f"{url!r} is not the URL of a server: write http://HOST:PORT")
    return parts


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        said = printable(content[:80].decode(errors="replace"))
        raise DovetailError(f"the server did not answer with a JSON object: {said!r}")
    return found


def _failure(status: int, said: dict[str, Any], *, sent_key: bool = False) -> DovetailError:
    """Return the error for a server's refusal: temporary, a mistake in the request (below 500), or
    the server's failure."""
    error = said.get("error")
    told = error.get("message", "") if isinstance(error, dict) else str(said)[:200]
    text = printable(str(told))
    if status == 401:
        refused = "the API key" if sent_key else "a request without an API key"
        remedy = f"name its file with --http.api_key_file, or set {KEY_VARIABLE}"
        return UserError(f"the server refuses {refused}: {remedy}")
    if status in LATER:
        return DovetailError(f"the server cannot answer now: {text}")
    if status < 500:
        return RequestError("settings", text)
    return DovetailError(f"the server failed: {text}")
