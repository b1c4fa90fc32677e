"""`dovetail serve`: a coordinator, its workers and the HTTP API, restarted when they are lost or
stuck. The API listens before models are loaded."""

import json
import logging
import os
import shlex
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand, json_option, option, parent_option
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.console.terminal import note, spinner
from dovetail.launch.extras import extra, installed
from dovetail.launch.processes import forked, preflight
from dovetail.launch.processes.child import end_with, name_process
from dovetail.launch.processes.connection import (
    ends_of,
    kernels_of,
    models_of,
    slow_kernels,
    with_choices,
)
from dovetail.launch.processes.preflight import check_coordinator, check_port, check_target
from dovetail.launch.processes.serving.local import Local
from dovetail.launch.processes.serving.models import Models, served_models
from dovetail.launch.processes.serving.service import Service
from dovetail.launch.processes.stack import check_models, check_stack
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import SERVING, settings_flags
from dovetail.launch.settings.generation import with_generation_config
from dovetail.launch.settings.http_keys import read_keys
from dovetail.launch.settings.models import blocks_in_words
from dovetail.launch.settings.several import Several
from dovetail.protocol.errors import UserError
from dovetail.runtime.http.serving.listening import listen

log = logging.getLogger("dovetail.serve")

ANYWHERE = ("0.0.0.0", "[::]")  # hosts that mean all addresses of a machine


@click.command(cls=HelpCommand)
@json_option("Once everything is ready, print one JSON object on stdout: url, address, pid, pids.")
@option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Where the processes run: on this machine, or on the nodes of a Ray cluster (--ray.*).",
)
@settings_flags(
    *("target", "draft", "tree", "sampling", "memory", "cache", "coordinator", "http", "ray"),
    shown=SERVING,
    several=True,
)
@parent_option
def command(
    configuration: Configuration, models: Several, engine: str, as_json: bool, parent: int | None
) -> None:
    """Serve the OpenAI API over HTTP until SIGTERM, SIGHUP or Ctrl-C.

    MODEL is the target: a folder, a GGUF file or the id of a model on the hub. Unless you name
    them, weights that fit and the best available draft are chosen. Without MODEL the embedded pair
    is served. With several, or a folder of models, each is loaded when a request names it.

    Starts a coordinator, its workers and the HTTP API, and restarts any that fail. When all are
    ready, the URL is printed as one line on stdout. Other commands of this user on this machine
    find the coordinator without --connect. After the first signal, running requests have some
    seconds to finish; a second signal ends them. The settings of tree and sampling are the defaults
    of requests.
    """
    if parent is not None:
        end_with(parent)
    log_to_stderr(logging.WARNING, "%(message)s" if parent else "%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    flags = [origin for origin in configuration.origins.values() if origin.startswith("--ray.")]
    if engine == "local" and flags:
        raise UserError(f"{flags[0]} is for a Ray cluster: add --engine ray, or leave it out")
    if len(models.sources) > 1:
        _serve_several(configuration, models, engine, as_json=as_json)
        return
    configuration, taken = with_generation_config(configuration)
    _check_addresses(configuration)
    configuration = with_choices(configuration)
    if engine == "local":
        check_stack(configuration, "http")
    else:
        check_models(configuration)
    for said in (taken, blocks_in_words(configuration.settings.target)):
        if said:
            note(said)
    name_process("serve")
    with ExitStack() as opened:
        try:
            service = _open(engine, configuration, opened)
        except SystemExit as told:
            if told.code != signal.SIGTERM:  # Ray's exit code if it is ended while starting
                raise
            return
        try:
            service.begin()
            with spinner() as say:
                service.run_until_ready(say)
            _introduce(service, configuration, as_json=as_json)
            service.run()
        except (KeyboardInterrupt, SystemExit):
            service.drain()


def _open(engine: str, configuration: Configuration, opened: ExitStack) -> Any:
    if engine == "local":
        site = Local(opened.enter_context(Supervisor()), configuration)
        return opened.enter_context(Service(site, configuration))
    return extra("launch.processes.ray.site").open_services(configuration, opened)


def _check_addresses(configuration: Configuration) -> None:
    http, coordinator = configuration.settings.http, configuration.settings.coordinator
    remedy = "stop it, or choose another port with --http.port (0: any free one)"
    check_port(http.host, http.port, remedy=remedy)
    listen(http.host, http.port).close()
    read_keys(http)
    remedy = "or choose another address with --coordinator.listen"
    check_coordinator(coordinator.listen, remedy=remedy)


OF_ONE = ("target.model", "coordinator.listen", "coordinator.keys", "coordinator.record")
"""Settings that several models cannot share."""


def _serve_several(
    configuration: Configuration, models: Several, engine: str, *, as_json: bool
) -> None:
    """Serve several models behind one address, each loaded when it is wanted."""
    if engine != "local":
        raise UserError("--engine ray serves one model: name a single MODEL")
    if given := [name for name in OF_ONE if configuration.given(name)]:
        raise UserError(f"{given[0]} applies to one model, but several are named: leave it out")
    if not installed("launch.commands.router"):
        raise UserError(
            "this installation of dovetail lacks the router, which serves several models"
        )
    forked.dismiss()  # each model starts its own processes
    _check_addresses(configuration)

    def check(own: Configuration) -> None:
        check_target(own.settings)

    served = served_models(models.configurations(check, note))
    name_process("serve")
    with Supervisor() as supervisor:
        pool = Models(supervisor, served, configuration)
        try:
            with spinner() as say:
                pool.run_until_ready(say)
            if as_json:
                names = [model.name for model in served]
                own = {"url": pool.url, "pid": os.getpid(), "pids": pool.pids}
                click.echo(json.dumps({**own, "models": names}))
            else:
                click.echo(pool.url)
                for model in served:
                    size = f", about {model.size / 1e9:.3g} GB of memory" if model.size else ""
                    note(f"  {model.name}{size}")
                for what, page in zip(
                    ("chat", "monitor"), _pages(pool.url, configuration), strict=True
                ):
                    if page:
                        note(f"  {what}: {page}")
                note(f"  stop: Ctrl-C, or kill {os.getpid()}")
            pool.run()
        except (KeyboardInterrupt, SystemExit):
            pool.drain()


def _introduce(service: Any, configuration: Configuration, *, as_json: bool) -> None:
    if no_chats := preflight.no_chats(configuration.settings.target):
        note(f"  {no_chats}")
    if as_json:
        own = {"url": service.url, "address": service.address}
        click.echo(json.dumps({**own, "pid": os.getpid(), "pids": service.pids}))
        return
    click.echo(service.url)
    state = service.state
    assert state is not None
    file = configuration.settings.http.api_key_file
    place = shlex.quote(str(Path(file).expanduser()))
    key = f' -H "Authorization: Bearer $(head -n 1 {place})"' if file else ""
    chat = {"messages": [{"role": "user", "content": "Hello."}]}
    hello = {"prompt": "Hello."} if no_chats else chat
    path = "completions" if no_chats else "chat/completions"
    for said in filter(None, (models_of(state), kernels_of(state), ends_of(state))):
        note(f"  {said}")
    for warning in slow_kernels(state):
        note(f"  warning: {warning}")
    for fault in service.faults(time.monotonic()):
        note(f"  degraded: {fault.words}")
    url = service.url
    for anywhere in ANYWHERE:
        url = url.replace(f"//{anywhere}:", f"//{socket.gethostname()}:")
    note(
        f"  try it:  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(hello)}'"
    )
    chat_page, dashboard = (f"{page}, or " if page else "" for page in _pages(url, configuration))
    note(f"  chat:    {'' if no_chats else chat_page}dovetail chat")
    note(f"  monitor: {dashboard}dovetail top        stop: Ctrl-C, or kill {os.getpid()}")


def _pages(url: str, configuration: Configuration) -> tuple[str, str]:
    """Return the addresses of the chat page and of the dashboard, or "" for one that is off."""
    http = configuration.settings.http
    dashboard = f"{url}/dashboard" if http.dashboard != "off" else ""
    return url if http.page == "chat" else "", dashboard
