"""The processes of a deployment, with the files and limits of each: commands, cores and memory as
in `dovetail serve`."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dovetail.launch.machine.binding import Place
from dovetail.launch.machine.cards import read_cards
from dovetail.launch.machine.fit import memory_limit
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.connection import with_choices
from dovetail.launch.processes.stack import (
    coordinator_arguments,
    http_arguments,
    layout_of,
    processes_of,
    with_room_for_draft,
    worker_arguments,
)
from dovetail.launch.settings.configure import PATHS, Configuration
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.launch.settings.generation import with_generation_config
from dovetail.protocol.errors import UserError
from dovetail.protocol.keys import COORDINATOR, OwnKey, load_own_key, own_key_for
from dovetail.protocol.settings import Settings
from dovetail.workers.devices.registry import Memory, memory_of
from dovetail.workers.models.checkpoints.gguf.view import spelled

FOLDER = Path(__file__).with_name("templates")


def text(name: str, /, **facts: Any) -> str:
    """Render a template with these values; functions among them are filters, too."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"quote": quote} | {
        name: fact for name, fact in facts.items() if callable(fact)
    }
    return environment.get_template(name).render(facts)


def documents(name: str, /, **facts: Any) -> str:
    """Return the YAML documents of a template as PyYAML lays them out, below the comment at the top
    of the template."""
    rendered = text(name, **facts)
    head = "".join(takewhile(lambda line: line.startswith("#"), rendered.splitlines(True)))
    body: str = yaml.safe_dump_all(yaml.safe_load_all(rendered), sort_keys=False, width=100)
    return head + body


NVIDIA = Path("/dev/nvidiactl")
WORKER_ROLES = {"target": ("target",), "draft": ("draft",), "unified": ("target", "draft")}
BINDING = ("--cores=", "--memory-nodes=")
PLACES = ("--target.model=", "--draft.model=")


@dataclass(frozen=True)
class Destination:
    """The surroundings in which the processes of a deployment find themselves."""

    address: str  # the coordinator, as the other processes reach it
    listen: str  # the address at which it listens
    keys: Callable[[str], str]  # part -> its folder of keys; asked only over tcp
    model: Callable[[Path], str]  # folder or file of a model on this machine -> its path there
    bound: bool = True  # false if it is another machine, whose cores are not these


@dataclass(frozen=True)
class Part:
    """A process of a deployment."""

    name: str  # the role: coordinator, http, target, draft or unified
    arguments: tuple[str, ...]  # its command, behind `dovetail`
    place: Place  # its cores and memory nodes on this machine
    memory: int | None  # bytes that it may take; None: not known
    gpu: bool  # true if it may use a GPU
    models: tuple[Path, ...]  # the folders and files of models on this machine that it reads

    @property
    def is_worker(self) -> bool:
        return self.name in WORKER_ROLES


def settled(configuration: Configuration) -> Configuration:
    """Return the settings as in `serve`: with the sampling defaults of the target, and weights and
    draft chosen where the user set none. `UserError` for a random port."""
    for name in PATHS:
        if len(str(value := configuration.value(name)).splitlines()) > 1:
            raise UserError(f"{name} = {value!r} has a line break, which no exported file can have")
    if configuration.settings.http.port == 0:
        raise UserError("http.port = 0 is another port at every start: name one with --http.port")
    return with_choices(with_generation_config(configuration)[0])


def keeping(configuration: Configuration, origin: str, folder: str) -> Configuration:
    """Return settings whose coordinator keeps a journal and recordings, if any, in a folder that it
    can write; `origin`: of that setting. `UserError` for another folder."""
    settings, taken = configuration.settings.coordinator, {}
    for name, given, own in (
        ("coordinator.journal", settings.journal, f"{folder}/journal"),
        ("coordinator.record", settings.record, f"{folder}/recordings"),
    ):
        if given in ("off", ""):
            continue
        if given not in ("auto", own):
            raise UserError(f"{name} = {given!r}: in {origin} use --{name} {own}")
        taken[name] = own
    return configuration.over(origin, taken)


def parts_of(configuration: Configuration, there: Destination) -> list[Part]:
    """Return the coordinator, the HTTP API and the workers of these settings. `UserError` for a
    model that is not on this machine."""
    settings, layout = configuration.settings, layout_of(configuration.settings)
    coordinator = [
        "coordinator",
        f"--coordinator.listen={there.listen}",
        *coordinator_arguments(configuration),
        f"--cores={format_numbers(layout.coordinator.cores)}",
    ]
    commands = [
        ("coordinator", coordinator, layout.coordinator),
        ("http", http_arguments(configuration, there.address, ""), layout.coordinator),
    ]
    for role in processes_of(settings):
        own = with_room_for_draft(configuration) if role == "target" else configuration
        place = layout.draft if role == "draft" else layout.target
        if role == "unified":
            place = Place(tuple(sorted({*layout.target.cores, *layout.draft.cores})), place.nodes)
        commands.append((role, worker_arguments(own, role, there.address, layout), place))
    tcp = there.address.startswith("tcp://")
    parts = []
    for name, command, place in commands:
        keys = [f"--coordinator.keys={there.keys(name)}"] if tcp else []
        parts.append(
            Part(
                name,
                (*_moved(command, there), *keys),
                place,
                memory_limit(settings, name),
                _may_use_gpu(settings, name),
                tuple(_models(settings, name)),
            )
        )
    return parts


def key_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a folder of keys that a part needs; `KeysError` if its own is not
    there."""
    if name == COORDINATOR:
        load_own_key(folder, COORDINATOR)
        return [folder / f"{COORDINATOR}.key", *sorted(folder.glob("*.pub"))]
    own: list[OwnKey] = [own_key_for(folder, role) for role in WORKER_ROLES.get(name, ("client",))]
    return [
        *dict.fromkeys(folder / f"{key.name}.key" for key in own),
        folder / f"{COORDINATOR}.pub",
    ]


def whole_model(path: Path) -> Path:
    """Return the folders that are needed to read a model: in the hub's cache a revision consists of
    links into another folder."""
    return path.parent.parent if path.parent.name == "snapshots" else path


def local_host(host: str) -> bool:
    """Return whether an address of the HTTP API is reached from its own machine alone."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(str(address[4][0]).startswith(("127.", "::1")) for address in found)


def _moved(command: list[str], there: Destination) -> Iterator[str]:
    """Yield a command with its model paths replaced and, unless `there.bound`, without core
    lists."""
    for flag in command:
        if flag.startswith(PLACES) and flag.partition("=")[2]:
            name, _, model = flag.partition("=")
            yield f"{name}={there.model(_here(model))}"
        elif there.bound or not flag.startswith(BINDING):
            yield flag


def _models(settings: Settings, name: str) -> Iterator[Path]:
    target, draft = with_target(settings.target), with_draft(settings.draft)
    if name in WORKER_ROLES and settings.target.model:
        yield _here(target.model)
    if name in ("draft", "unified") and settings.draft.model:
        yield _here(draft.model)


def _here(model: str) -> Path:
    """Return where a model is on this machine: a folder, a GGUF file, or a revision in the hub's
    cache."""
    path = Path(spelled(model)).expanduser()
    if path.exists():
        return path.absolute()
    from dovetail.workers.models.checkpoints.hub import Hosted, local_folder  # half a second

    if (folder := local_folder(model)) is None:
        hosted = Hosted.of(model)
        fetch = f" with `{hosted.command()}`" if hosted is not None else ""
        raise UserError(f"the model {model} is not on this machine: fetch it first{fetch}")
    return Path(spelled(str(folder)))


def _may_use_gpu(settings: Settings, name: str) -> bool:
    """True if a process uses a GPU by the settings; if they leave it open, whether this machine has
    one."""
    target, draft = settings.target, settings.draft
    devices = {
        "target": (target.device, target.split.device, target.prefill),
        "draft": (draft.device if draft.kind not in ("none", "ngram") else "cpu",),
    }
    asked = {device for role in WORKER_ROLES.get(name, ()) for device in devices[role]}
    if any(memory_of(device) is Memory.OWN for device in asked):
        return True
    return "auto" in asked and (NVIDIA.exists() or bool([*read_cards()]))
