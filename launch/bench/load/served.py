"""The server under load: an existing one, by its URL, or our own stack behind the HTTP API, which
ends with the block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dovetail.launch.chat.web import SERVERS, Site, api_key, check_flags, said_to_server
from dovetail.launch.console.terminal import spinner
from dovetail.launch.processes.stack import begin_stack, http_arguments, wait_until_ready
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.protocol.errors import DovetailError, UserError

PLAIN, DRAFTED, OTHER = "none", "draft", "server"
"""Methods: our target alone, our target with its draft, any other server as it is."""
SILENCE_S = 600.0
"""A server that is silent for this long counts as lost; a request may wait behind others."""

FIRST_S = 30.0  # seconds to wait for a server's model before the first request


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    site: Site
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
    """Yield the server at this URL; without one, a stack of our own without a prefix cache, since
    every concurrency has the same prompts."""
    if url is None:
        with _own(configuration) as found:
            yield found
        return
    if configuration.origins["target.model"] == POSITIONAL:
        raise UserError(f"the server at {url} has its own model: leave the model or --url out")
    check_flags(configuration, "leave --url out, and a server with it is started")
    site = Site(url, api_key(configuration), silence_s=SILENCE_S)
    model, ours = _model_of(Site(url, api_key(configuration), silence_s=FIRST_S))
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
        site = Site(_url_of(child), api_key(configuration), silence_s=SILENCE_S)
        model, _ = _model_of(site)

        def lost() -> list[DovetailError]:
            return [*stack.losses(), *([child.failure()] if child.ended else [])]

        yield Served(site, model, _methods(configuration), {}, lost)


def _methods(configuration: Configuration) -> tuple[str, ...]:
    """Return the methods of a dovetail: without its draft, and with it unless --draft.kind is
    none."""
    return (PLAIN,) if configuration.settings.draft.kind == "none" else (PLAIN, DRAFTED)


def _url_of(child: Child) -> str:
    assert child.process.stdout is not None
    url = child.process.stdout.readline().decode().strip()
    if not url:
        child.process.wait()
        raise child.failure()
    return url


def _model_of(site: Site) -> tuple[str, bool]:
    models = site.get("/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        raise DovetailError(
            f"the server at {site.url} lists no model at /v1/models: is it an OpenAI API?"
        )
    return first["id"], first.get("owned_by") == "dovetail"
