"""Several models behind one address: the router, and for each loaded model a `dovetail serve` on an
internal address. The router decides which models should be loaded (`dovetail.runtime.router`); this
starts and ends their services, and reports the states."""

import json
import logging
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.launch.extras import extra, installed
from dovetail.launch.machine.fit import needs_of
from dovetail.launch.processes.serving.front import TAKEN, Front
from dovetail.launch.processes.serving.service import DRAIN_S, ENDING
from dovetail.launch.processes.stack import LOADING_POLL_S, POLL_S, processes_of
from dovetail.launch.processes.supervise import GRACE_S, Child, Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.workers.models.checkpoints.gguf.view import spelled
from dovetail.workers.models.checkpoints.hub import local_folder

log = logging.getLogger("dovetail.serve")

SETTINGS = (*TAKEN, "aliases", "dashboard", "deadline_s", "most_models", "page", "unload_s")
"""Those that the router gets."""
SECTIONS = ("target", "draft", "tree", "sampling", "memory", "cache", "coordinator", "http")
"""Those that a model's own service gets."""
ALONE = {"http.host": "127.0.0.1", "http.port": 0, "http.cors": ""}
"""Settings of a loaded model's own service, which only the router uses."""
ENDING_S = 2 * GRACE_S + 3 * DRAIN_S  # the longest time for a service to end when asked to
State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass
class ServedModel:
    """One model, with its service while it is loaded."""

    name: str
    size: int  # the estimated bytes of its memory; 0 if unknown
    arguments: Sequence[str]  # the command of its service
    child: Child | None = None
    state: State = "unloaded"
    url: str = ""
    why: str = ""  # why it could not be loaded, or was lost
    kill_s: float = 0.0  # when a service that is ending is killed
    output: bytes = b""  # what it has written to stdout

    @property
    def report(self) -> dict[str, Any]:
        own = {"name": self.name, "size": self.size, "state": self.state}
        return {**own, "url": self.url, "why": self.why}


def served_models(configurations: Mapping[str, Configuration]) -> list[ServedModel]:
    """Return models by their names and settings."""
    return [
        ServedModel(name, size_of(own), _arguments(own, name))
        for name, own in configurations.items()
    ]


def _arguments(configuration: Configuration, name: str) -> list[str]:
    """Return the command of a model's service. The model is an argument, as the user named it, so
    that weights and draft are chosen for it."""
    model = spelled(configuration.settings.target.model)
    own = configuration.over("the router's", {**ALONE, "http.model": name})
    chosen = [f"--target.model={own.settings.target.model}"]
    if not configuration.given("target.weights"):
        chosen.append(f"--target.weights={own.settings.target.weights}")
    flags = [flag for flag in own.arguments(*SECTIONS) if flag not in chosen]
    return ["serve", model, "--json", *flags]


def size_of(configuration: Configuration) -> int:
    """Return the estimated bytes of memory of a model's processes, with the weights that are chosen
    for it; 0 if its files are not here."""
    planner = "launch.planning.choice"
    model = configuration.settings.target.model
    folder = local_folder(model) if model else None
    if installed(planner):
        configuration, _ = extra(planner).with_weights(configuration, folder)
    settings = configuration.settings
    roles = ("serve", "coordinator", "http", *processes_of(settings))
    needs = [*needs_of(settings, roles)]
    whole = any(need.footprint.weights for need in needs)
    return sum(need.size for need in needs) if whole else 0


class Models:
    """The served models; use it within the block of its supervisor."""

    def __init__(
        self, supervisor: Supervisor, models: Sequence[ServedModel], configuration: Configuration
    ) -> None:
        self._supervisor, self._models = supervisor, {model.name: model for model in models}
        self._front = Front(
            supervisor, configuration, "--models", taken=SETTINGS, started=self._router_started
        )
        self._revision = 0
        self._wanted: Sequence[str] | None = None  # None: the router has not sent any yet
        self._reported = ""

    @property
    def url(self) -> str:
        return self._front.url

    @property
    def pids(self) -> dict[str, int]:
        services = {model.name: model.child.pid for model in self._models.values() if model.child}
        return {**services, **self._front.pids}

    def run_until_ready(self, say: Callable[[str], None]) -> None:
        """Wait for the router; models are loaded later."""
        say("starting the router")
        while not self._front.serving:
            self._step()
            time.sleep(LOADING_POLL_S)

    def run(self) -> None:
        """Serve until the router ends."""
        while not self._front.left:
            self._step()
            time.sleep(POLL_S)

    def drain(self) -> None:
        """End the router, then the services; another signal ends all of them at once."""
        try:
            log.info(ENDING)
            self._front.end()
            children = [model.child for model in self._models.values() if model.child]
            self._supervisor.end(children, ENDING_S)
        except (KeyboardInterrupt, SystemExit):
            self._supervisor.kill()

    # -- events ------------------------------------------------------------------------------------

    def _step(self) -> None:
        now_s = time.monotonic()
        self._supervisor.mind()
        for line in self._front.step():
            wanted = json.loads(line)
            self._revision, self._wanted = wanted["revision"], wanted["models"]
        for model in self._models.values():
            self._look_after(model, now_s)
            if self._wanted is not None:
                self._follow(model, now_s, wanted=model.name in self._wanted)
        self._report()

    def _router_started(self) -> None:
        """A new router knows nothing, and has sent nothing."""
        self._revision, self._wanted, self._reported = 0, None, ""
        self._report()

    def _report(self) -> None:
        reports = [model.report for model in self._models.values()]
        line = json.dumps({"revision": self._revision, "models": reports})
        if line != self._reported and self._front.tell(line):
            self._reported = line

    def _follow(self, model: ServedModel, now_s: float, *, wanted: bool) -> None:
        """Load or unload a model as the router wants it. One that has failed is loaded again only
        after the router has received that state."""
        if wanted and model.state == "unloaded":
            log.info("%s is being loaded", model.name)
            model.state, model.why, model.output, model.url = "loading", "", b"", ""
            model.child = self._supervisor.start(model.name, model.arguments, reads=True)
        elif not wanted and model.state == "failed":
            model.state = "unloaded"
        elif not wanted and model.child is not None and model.state != "unloading":
            log.info("%s is being unloaded", model.name)
            model.state, model.url, model.kill_s = "unloading", "", now_s + ENDING_S
            model.child.process.terminate()

    def _look_after(self, model: ServedModel, now_s: float) -> None:
        child = model.child
        if child is None:
            return
        for line in child.listen():
            log.info("%s: %s", model.name, line)
        if child.ended:
            self._ended(model, child)
        elif model.state == "loading" and (url := _url(model, child)):
            model.state, model.url = "loaded", url
            log.info("%s is loaded", model.name)
        elif model.state == "unloading" and now_s >= model.kill_s:
            child.process.kill()

    def _ended(self, model: ServedModel, child: Child) -> None:
        ending = child.ending()
        why = f"it {ending.words}{f': {ending.last_line}' if ending.last_line else ''}"
        match model.state:
            case "loading":
                model.state, model.why = "failed", ending.last_line if ending.mistake else why
                log.error("%s cannot be loaded: %s", model.name, model.why)
            case "loaded":
                model.state, model.why = "unloaded", why
                log.error("%s was lost: %s", model.name, why)
            case _:
                model.state = "unloaded"
                log.info("%s is unloaded", model.name)
        model.url, model.child = "", None
        self._supervisor.end([child])


def _url(model: ServedModel, child: Child) -> str:
    """Return the URL of a service once it is ready; empty before."""
    assert child.process.stdout is not None
    pipe = child.process.stdout.fileno()
    if select.select([pipe], [], [], 0.0)[0]:
        model.output += os.read(pipe, 1 << 16)
    return str(json.loads(model.output)["url"]) if model.output.endswith(b"\n") else ""
