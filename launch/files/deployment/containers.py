"""Facts common to compose and Kubernetes: the image, its user, and paths in a container. The
Dockerfile in this folder makes the image."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.launch.cli import installed_version
from dovetail.launch.files.deployment.parts import (
    WORKER_ROLES,
    Destination,
    Part,
    documents,
    keeping,
    key_files,
    parts_of,
    settled,
    whole_model,
)
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.http_keys import read_keys
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import HttpSettings

USER = 10001  # the user and the group in the container, as the Dockerfile has them
RUN, MODELS, CACHE = "/run/dovetail", "/models", "/cache"
PORT = 5555  # the port of a coordinator that is reached over tcp
DOCKERFILE = "launch/files/deployment/Dockerfile"
CONFINED: Mapping[str, Any] = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": CACHE}
"""Variables of a worker: it downloads nothing, and keeps what it has measured."""
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
    """`SettingsError` for a file of API keys that `serve` would refuse. One that is not here is
    made later, and one that belongs to the user of the containers may be hidden from this one."""
    if os.access(file, os.R_OK):
        read_keys(HttpSettings(api_key_file=str(file)))


def key_names(folder: Path, name: str) -> list[str]:
    """Return the files of keys that a part needs, by `keygen`'s names if the folder is hidden or
    not there. `KeysError` for a folder without them, or secret keys that others can read."""
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
        raise UserError(
            f"coordinator.listen = {listen!r}: the containers use their own socket; leave it out"
        )
    asked = configuration.settings.http
    keys = str(Path(asked.api_key_file or "api-keys").expanduser())
    keys = keys if asked.api_key_file else f"./{keys}"
    check_api_keys(Path(keys))
    configuration = listening(settled(configuration), f"{SECRETS}/api-keys")
    there = Destination(
        address=f"ipc://{SOCKET}",
        listen=f"ipc://{SOCKET}",
        keys=lambda _: SECRETS,
        model=in_container,
    )
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
PROBE_S = 5  # a server that has half a core may take so long to answer under load
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
    there = Destination(
        address=f"tcp://{LEADER}:{PORT}",
        listen=LISTEN,
        keys=lambda name: f"{RUN}/{name}",
        model=in_container,
        bound=False,
    )
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


def _amounts(part: Part) -> dict[str, str]:
    cpu = str(len(set(part.place.cores))) if part.is_worker else "500m"
    memory = {} if part.memory is None else {"memory": str(part.memory)}
    return {"cpu": cpu, **memory, **({"nvidia.com/gpu": "1"} if part.gpu else {})}


def _literal(word: str) -> str:
    """Return an argument in which nothing but the leader's address is replaced."""
    return LEADER.join(part.replace("$(", "$$(") for part in word.split(LEADER))
