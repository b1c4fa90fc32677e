"""Facts common to compose and Kubernetes: the image, its user, and paths in a container. The
Dockerfile in this folder makes the image."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.launch.cli import installed_version
from dovetail.launch.files.deployment.parts import WORKER_ROLES, keeping, key_files
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.http_keys import read_keys
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
    """Return the files of a folder of keys that a part needs: as `dovetail keygen` names them, if
    it is to be made or is hidden from this user. `KeysError` for a folder without them, or with
    secret keys that others can read."""
    if os.access(folder, os.R_OK | os.X_OK):
        return [file.name for file in key_files(folder, name)]
    if name == "coordinator":
        return ["coordinator.key", *(f"{role}.pub" for role in ("target", "draft", "client"))]
    own = (f"{role}.key" for role in WORKER_ROLES.get(name, ("client",)))
    return [*own, "coordinator.pub"]
