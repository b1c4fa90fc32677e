"""The processes of a deployment, with the files and limits of each: commands, cores and memory as
in `dovetail serve`; for compose and Kubernetes the image (by the Dockerfile in this folder), its
user, and paths in a container."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dovetail.launch.cli import installed_version
from dovetail.launch.machine.cards import read_cards
from dovetail.launch.machine.fit import memory_limit
from dovetail.launch.machine.topology import Place, format_numbers
from dovetail.launch.processes.connection import with_choices
from dovetail.launch.processes.stack import (
    coordinator_arguments,
    http_arguments,
    layout_of,
    processes_of,
    with_room_for_draft,
    worker_arguments,
)
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import PATHS, Configuration
from dovetail.launch.settings.generation import with_generation_config
from dovetail.launch.settings.http_keys import read_keys
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.errors import UserError
from dovetail.protocol.keys import COORDINATOR, OwnKey, load_own_key, own_key_for
from dovetail.protocol.settings import HttpSettings, Settings
from dovetail.workers.devices.registry import Memory, memory_of
from dovetail.workers.models.checkpoints.gguf.view import spelled

FOLDER = Path(__file__).with_name("templates")


def text(name: str, /, **facts: Any) -> str:
    """Render a template with these values; functions among them are filters, too."""
    trimmed: Any = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    loader = FileSystemLoader(FOLDER)
    environment = Environment(loader=loader, undefined=StrictUndefined, **trimmed)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {name: fact for name, fact in facts.items() if callable(fact)}
    environment.filters["quote"] = quote
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
    """The environment of a deployment's processes."""

    address: str  # the coordinator's address for the other processes
    listen: str  # the address at which it listens
    keys: Callable[[str], str]  # part -> its folder of keys; used only over tcp
    model: Callable[[Path], str]  # folder or file of a model on this machine -> its path there
    bound: bool = True  # false if it is another machine, whose cores are not these


@dataclass(frozen=True)
class DeployedProcess:
    """A process of a deployment."""

    name: str  # the role: coordinator, http, target, draft or unified
    arguments: tuple[str, ...]  # its command, after `dovetail`
    place: Place  # its cores and memory nodes on this machine
    memory: int | None  # bytes that it may take; None: unknown
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


def parts_of(configuration: Configuration, there: Destination) -> list[DeployedProcess]:
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
        about = memory_limit(settings, name), _may_use_gpu(settings, name)
        arguments, models = (*_moved(command, there), *keys), tuple(_models(settings, name))
        parts.append(DeployedProcess(name, arguments, place, *about, models))
    return parts


def key_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a folder of keys that a part needs; `KeysError` if its own key is
    missing."""
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
    """Return whether only its own machine can reach an address of the HTTP API."""
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
    """True if a process uses a GPU by the settings; if these leave it open, True if this machine
    has one."""
    target, draft = settings.target, settings.draft
    devices = {
        "target": (target.device, target.split.device, target.prefill),
        "draft": (draft.device if draft.kind not in ("none", "ngram") else "cpu",),
    }
    asked = {device for role in WORKER_ROLES.get(name, ()) for device in devices[role]}
    if any(memory_of(device) is Memory.OWN for device in asked):
        return True
    return "auto" in asked and (NVIDIA.exists() or bool([*read_cards()]))


USER = 10001  # the user and the group in the container, as in the Dockerfile
RUN, MODELS, CACHE = "/run/dovetail", "/models", "/cache"
PORT = 5555  # the port of a coordinator that is reached over tcp
DOCKERFILE = "launch/files/deployment/Dockerfile"
CONFINED: Mapping[str, Any] = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": CACHE}
"""Variables of a worker: it downloads nothing, and stores its measurements."""
READY = (
    "import sys, http.client; asked = http.client.HTTPConnection('127.0.0.1', {port}); "
    "asked.request('GET', '/readyz'); sys.exit(asked.getresponse().status != 200)"
)
"""A readiness check without curl, wget or a proxy."""


def image() -> str:
    """Return the name of the image of this release."""
    return f"dovetail:{installed_version()}"


def in_container(path: Path) -> str:
    """Return the path of a model in a container."""
    snapshot = path.parent.name == "snapshots"
    parts = (path.parent.parent.name, *path.parts[-2:]) if snapshot else (path.name,)
    return "/".join((MODELS, *parts))


def listening(configuration: Configuration, keys: str) -> Configuration:
    """Return settings whose HTTP API listens at every address of its container and takes keys, and
    whose journal and recordings lie in the cache."""
    taken = {"http.host": "0.0.0.0", "http.api_key_file": keys}
    return keeping(configuration.over("the container", taken), "the container", CACHE)


def check_api_keys(file: Path) -> None:
    """`SettingsError` for a file of API keys that `serve` would refuse. It may be missing until
    later, or readable only by the containers' user."""
    if os.access(file, os.R_OK):
        read_keys(HttpSettings(api_key_file=str(file)))


def key_names(folder: Path, name: str) -> list[str]:
    """Return the files of keys that a part needs, by `keygen`'s names if the folder is hidden or
    missing. `KeysError` for a folder without them, or secret keys that others can read."""
    if os.access(folder, os.R_OK | os.X_OK):
        return [file.name for file in key_files(folder, name)]
    if name == "coordinator":
        return ["coordinator.key", *(f"{role}.pub" for role in ("target", "draft", "client"))]
    own = (f"{role}.key" for role in WORKER_ROLES.get(name, ("client",)))
    return [*own, "coordinator.pub"]


SOCKET = f"{RUN}/coordinator"
SECRETS = "/run/secrets"


def compose_file(configuration: Configuration) -> str:
    """Return the compose file. `UserError` for a model that is not here or a configured address;
    `SettingsError` and `KeysError` for existing keys that would be refused."""
    if (listen := configuration.settings.coordinator.listen) != "ipc":
        why = "the containers use their own socket; leave it out"
        raise UserError(f"coordinator.listen = {listen!r}: {why}")
    asked = configuration.settings.http
    keys = str(Path(asked.api_key_file or "api-keys").expanduser())
    keys = keys if asked.api_key_file else f"./{keys}"
    check_api_keys(Path(keys))
    configuration = listening(settled(configuration), f"{SECRETS}/api-keys")
    address = f"ipc://{SOCKET}"
    there = Destination(address, address, lambda _: SECRETS, in_container)
    return documents(
        "compose.yaml",
        literal=lambda text: text.replace("$", "$$"),  # no variable is replaced
        numbers=format_numbers,
        whole=whole_model,
        dockerfile=DOCKERFILE,
        parts=parts_of(configuration, there),
        image=image(),
        user=USER,
        stop_s=round(3 * GRACE_S),
        socket=SOCKET,
        ready=READY.format(port=asked.port),
        host=f"[{asked.host}]" if ":" in asked.host else asked.host,
        port=asked.port,
        run=RUN,
        cache=CACHE,
        models=MODELS,
        confined=CONFINED,
        keys=keys,
    )


LISTEN = f"tcp://0.0.0.0:{PORT}"
PROBE_S = 5  # a server with half a core may take this long to answer under load
LEADER = "$(LWS_LEADER_ADDRESS)"
"""The address of the leader, which the controller puts into every container's environment."""


def kubernetes_manifest(configuration: Configuration) -> str:
    """Return the manifest. `UserError` for a model that is not here (its size gives the memory) or
    a configured address; `SettingsError`, `KeysError` for keys that would be refused."""
    listen = configuration.settings.coordinator.listen
    if listen not in ("ipc", LISTEN):
        raise UserError(f"coordinator.listen = {listen!r}: the pods use {LISTEN}; leave it out")
    folder = Path(configuration.settings.coordinator.keys or "keys").expanduser()
    asked = configuration.settings.http.api_key_file
    api_keys = Path(asked).expanduser() if asked else folder / "api-keys"
    check_api_keys(api_keys)
    configuration = listening(settled(configuration), f"{RUN}/http/api-keys")
    address = f"tcp://{LEADER}:{PORT}"
    there = Destination(address, LISTEN, lambda name: f"{RUN}/{name}", in_container, bound=False)
    parts = parts_of(configuration, there)
    return documents(
        "kubernetes.yaml",
        literal=_literal,
        amounts=_amounts,
        dockerfile=DOCKERFILE,
        folder=str(folder),
        api_keys=str(api_keys),
        secrets={part.name: _secret_files(part.name, folder, api_keys) for part in parts},
        claimed=sorted({whole_model(path) for part in parts for path in part.models}),
        parts=parts,
        image=image(),
        user=USER,
        stop_s=round(3 * GRACE_S),
        probe_s=PROBE_S,
        port=configuration.settings.http.port,
        inner=PORT,
        run=RUN,
        cache=CACHE,
        models=MODELS,
        variables=CONFINED,
    )


def _secret_files(name: str, folder: Path, api_keys: Path) -> dict[str, Path]:
    files = {file: folder / file for file in key_names(folder, name)}
    return {**files, "api-keys": api_keys} if name == "http" else files


def _amounts(part: DeployedProcess) -> dict[str, str]:
    cpu = str(len(set(part.place.cores))) if part.is_worker else "500m"
    memory = {} if part.memory is None else {"memory": str(part.memory)}
    return {"cpu": cpu, **memory, **({"nvidia.com/gpu": "1"} if part.gpu else {})}


def _literal(word: str) -> str:
    """Return an argument in which only the leader's address is replaced."""
    return LEADER.join(part.replace("$(", "$$(") for part in word.split(LEADER))
