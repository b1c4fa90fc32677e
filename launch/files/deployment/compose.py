"""A compose file for the processes of `dovetail serve`: a container each, on one machine. They
communicate over a socket in a volume, and only the HTTP API has a network."""

from pathlib import Path

from dovetail.launch.files.deployment.containers import (
    CACHE,
    CONFINED,
    DOCKERFILE,
    MODELS,
    READY,
    RUN,
    USER,
    check_api_keys,
    image,
    in_container,
    listening,
)
from dovetail.launch.files.deployment.parts import Destination, parts_of, settled, whole_model
from dovetail.launch.files.deployment.templates import documents
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError

SOCKET = f"{RUN}/coordinator"
SECRETS = "/run/secrets"


def compose_file(configuration: Configuration) -> str:
    """Return the compose file for these settings on this machine. `UserError` for a model that is
    not on this machine and for a coordinator with a configured address; `SettingsError` and
    `KeysError` for existing keys that would be refused."""
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
        literal=_literal,
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


def _literal(text: str) -> str:
    """Return a text in which no variable is replaced."""
    return text.replace("$", "$$")
