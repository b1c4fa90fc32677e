"""The server under load: an existing one by its URL, or our own processes with an HTTP API, which
end with the block."""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dovetail.launch.chat.web import (
    DONE,
    MOST_BYTES,
    SERVERS,
    STREAMED,
    EndlessError,
    WebServer,
    api_key,
    check_flags,
    events_of,
    said_to_server,
)
from dovetail.launch.console.terminal import spinner
from dovetail.launch.processes.stack import begin_stack, http_arguments, wait_until_ready
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.protocol.errors import DovetailError, UserError, printable

PATH, PLAIN_PATH = "/v1/chat/completions", "/v1/completions"
WORDS = ("content", "reasoning_content", "reasoning")
"""Fields of a streamed choice with text: OpenAI's, llama-server's and older vLLM's, vLLM's."""
BROKEN_OFF = "broken off"  # the error of a stream that ended without [DONE]
TOO_LONG = "too long"  # the error of a stream that does not end
MOST_WORDS = 300  # characters that are kept of a server's error message
MOST_COUNTED = 1 << 40  # the most tokens that a server can report; a larger number counts as none


@dataclass
class Reply:
    """A request and its outcome; times are seconds of `time.perf_counter`."""

    number: int
    began_s: float
    chunks_s: list[float] = field(default_factory=list)
    """The time of each chunk with text of the model."""
    ended_s: float = 0.0  # the time of the last event before [DONE]
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""  # the kind of failure, such as "HTTP 429"; empty: none
    words: str = ""  # the server's own words for it

    @property
    def prompt_tokens(self) -> int:
        return _count(self.usage, "prompt_tokens")

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server had cached from an earlier request."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details, "cached_tokens") if isinstance(details, Mapping) else 0

    @property
    def output_tokens(self) -> int:
        """Tokens of the reply by the server's usage; without it, every chunk counts as one."""
        return _count(self.usage, "completion_tokens") or len(self.chunks_s)

    @property
    def latency_s(self) -> float:
        """Seconds from the request to the last event of the reply."""
        return self.ended_s - self.began_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first chunk with text; None without text."""
        return self.chunks_s[0] - self.began_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, (latency - TTFT) / (tokens - 1); None without a second
        token."""
        first = self.ttft_s
        if first is None or self.output_tokens < 2:
            return None
        return (self.latency_s - first) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Seconds between consecutive chunks, of any number of tokens."""
        return [after - before for before, after in pairwise(self.chunks_s)]


def ask(
    site: WebServer,
    body: Mapping[str, Any],
    number: int,
    clock: Callable[[], float] = time.perf_counter,
    path: str = PATH,
) -> Reply:
    """Stream a completion to its end, or to its error."""
    reply, texts = Reply(number, clock()), list[str]()
    reply.ended_s = reply.began_s
    try:
        with site.opened("POST", path, json.dumps({**body, **STREAMED}).encode()) as response:
            if response.status == http.client.OK:
                _read(reply, texts, response, clock)
            else:
                _fail(reply, f"HTTP {response.status}", _said(response.read(MOST_BYTES)))
    except DovetailError as error:
        _fail(reply, TOO_LONG if isinstance(error, EndlessError) else "connection", str(error))
    reply.text = "".join(texts)
    return reply


def _read(
    reply: Reply, texts: list[str], response: http.client.HTTPResponse, clock: Callable[[], float]
) -> None:
    """Store the arriving texts separately: appending to one long text would take ever longer."""
    for data in events_of(response):
        now_s = clock()
        if data == DONE:
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            _fail(reply, "not JSON", data.decode(errors="replace"))
            return
        if event.get("error") is not None:
            _fail(reply, "error in the stream", _said(data))
            return
        if (text := _text(event)) is None:
            _fail(reply, "not a chunk", data.decode(errors="replace"))
            return
        usage = event.get("usage")
        reply.usage = usage if isinstance(usage, dict) else reply.usage
        reply.ended_s = now_s
        if text:
            reply.chunks_s.append(now_s)
            texts.append(text)
    _fail(reply, BROKEN_OFF, "the stream ended before its [DONE]")


def _text(event: Mapping[str, Any]) -> str | None:
    """Return the text of an event; it is empty for a first chunk with only the role. None: not a
    chunk of a completion."""
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return None
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    if not all(isinstance(delta, dict) for delta in deltas):
        return None
    return "".join(str(delta.get(name) or "") for delta in deltas for name in WORDS)


def _said(content: bytes) -> str:
    """Return the message of an error in OpenAI's format; of any other, the whole body."""
    try:
        told = json.loads(content)["error"]
        return str(told["message"] if isinstance(told, dict) else told)
    except (ValueError, KeyError, TypeError, RecursionError):
        return content.decode(errors="replace")


def _fail(reply: Reply, error: str, words: str) -> None:
    reply.error, reply.words = error, printable(" ".join(words.split())[:MOST_WORDS])


def _count(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    return value if isinstance(value, int) and 0 <= value <= MOST_COUNTED else 0


PLAIN, DRAFTED, OTHER = "none", "draft", "server"
"""Methods: our target alone, our target with its draft, any other server."""
SILENCE_S = 600.0
"""A server that is silent for this long counts as lost; a request may wait behind others."""

FIRST_S = 30.0  # seconds to wait for a server's model before the first request


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    site: WebServer
    model: str
    methods: tuple[str, ...]
    """The methods by which requests are decoded, `PLAIN` first if it is among them."""
    sampling: Mapping[str, Any]  # the sampling fields of a request that the user has set
    lost: Callable[[], list[DovetailError]] = list
    """Returns the failures of our processes that have ended meanwhile."""

    def body(self, method: str, turn: str, *, seed: int, **fields: Any) -> dict[str, Any]:
        wishes = {"dovetail": {"speculate": method != PLAIN, "fit": True}}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": turn}],
            "seed": seed,
            **self.sampling,
            **fields,
            **(wishes if method != OTHER else {}),
        }


@contextmanager
def served(configuration: Configuration, url: str | None) -> Iterator[Served]:
    """Yield the server at this URL; without a URL, our own processes without a prefix cache, since
    every concurrency has the same prompts."""
    if url is None:
        with _own(configuration) as found:
            yield found
        return
    if configuration.origins["target.model"] == POSITIONAL:
        raise UserError(f"the server at {url} has its own model: leave out the model or --url")
    check_flags(configuration, "leave out --url to start a server with it")
    site = WebServer(url, api_key(configuration), silence_s=SILENCE_S)
    model, ours = _model_of(WebServer(url, api_key(configuration), silence_s=FIRST_S))
    said = said_to_server(configuration) - {*SERVERS, "max_tokens"}
    values = configuration.settings.sampling.model_dump(mode="json")
    sampling = {name: value for name, value in values.items() if name in said}
    methods = _methods(configuration) if ours else (OTHER,)
    yield Served(site, model, methods, sampling)


@contextmanager
def _own(configuration: Configuration) -> Iterator[Served]:
    with Supervisor() as supervisor:
        stack = begin_stack(supervisor, configuration, measures=True)()
        with spinner() as say:
            wait_until_ready(supervisor, stack, say)
        local = ["--http.host=127.0.0.1", "--http.port=0"]
        arguments = [*http_arguments(configuration, stack.address, ""), *local]
        child = supervisor.start("HTTP API", arguments, reads=True)
        site = WebServer(_url_of(child), api_key(configuration), silence_s=SILENCE_S)
        model, _ = _model_of(site)

        def lost() -> list[DovetailError]:
            return [*stack.losses(), *([child.failure()] if child.ended else [])]

        yield Served(site, model, _methods(configuration), {}, lost)


def _methods(configuration: Configuration) -> tuple[str, ...]:
    """Return the methods of a dovetail server: without its draft and, unless --draft.kind is none,
    with it."""
    return (PLAIN,) if configuration.settings.draft.kind == "none" else (PLAIN, DRAFTED)


def _url_of(child: Child) -> str:
    assert child.process.stdout is not None
    url = child.process.stdout.readline().decode().strip()
    if not url:
        child.process.wait()
        raise child.failure()
    return url


def _model_of(site: WebServer) -> tuple[str, bool]:
    models = site.get("/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        raise DovetailError(
            f"the server at {site.url} lists no model at /v1/models: is it an OpenAI API?"
        )
    return first["id"], first.get("owned_by") == "dovetail"
