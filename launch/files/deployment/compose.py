"""A compose file for the processes of `dovetail serve`: a container each, on one machine. They
communicate over a socket in a volume, and only the HTTP API has a network."""

from pathlib import Path
from shlex import quote
from typing import Any

from dovetail.launch.files.deployment.containers import (
    CACHE,
    CONFINED,
    DOCKERFILE,
    MODELS,
    READY,
    RUN,
    USER,
    check_api_keys,
    documents,
    image,
    in_container,
    listening,
)
from dovetail.launch.files.deployment.parts import (
    Destination,
    Part,
    parts_of,
    settled,
    whole_model,
)
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError

SOCKET = f"{RUN}/coordinator"
SECRETS = "/run/secrets"
LEAD = "coordinator"
COMMENT = """\
The image is built from the sources:
  docker build -f {dockerfile} -t {image} .
{keys} holds the API keys, one a line, and belongs to the user of the containers:
  test -e {keys} || (umask 077; openssl rand -hex 32 > {keys}); sudo chown {user} {keys}
Memory policies need a capability that these containers do not have: a target on several memory
nodes is bound to its cores only (cap_add: [SYS_NICE] allows more).
mem_limit: weights while they load, and keys and values of 8 long conversations, estimated."""


def compose_file(configuration: Configuration) -> str:
    """Return the compose file for these settings on this machine. `UserError` for a model that is
    not here and for a coordinator that is to listen elsewhere; `SettingsError` and `KeysError` for
    keys that are here and would be refused."""
    if (listen := configuration.settings.coordinator.listen) != "ipc":
        raise UserError(
            f"coordinator.listen = {listen!r}, and the containers of a compose file use a socket "
            "of their own: leave it out, or export kubernetes for several machines"
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
    parts = parts_of(configuration, there)
    services = {part.name: _service(part, asked.host, asked.port) for part in parts}
    for name, service in services.items():
        service |= _at_socket(service, name)
    options = {"type": "tmpfs", "device": "tmpfs", "o": f"mode=0700,uid={USER},gid={USER}"}
    content = {
        "name": "dovetail",
        "services": services,
        "volumes": {"cache": {}, "run": {"driver": "local", "driver_opts": options}},
        "secrets": {"api-keys": {"file": _literal(keys)}},
    }
    comment = COMMENT.format(dockerfile=DOCKERFILE, image=image(), keys=quote(keys), user=USER)
    return documents(comment, content)


def _at_socket(service: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a service needs to reach the socket, and when it starts."""
    lead = {"healthcheck": _check("test", "-S", SOCKET)}
    return {
        "volumes": [f"run:{RUN}", *service.get("volumes", [])],
        **({} if name == "http" else {"network_mode": "none"}),
        **(lead if name == LEAD else {"depends_on": {LEAD: {"condition": "service_healthy"}}}),
    }


def _service(part: Part, host: str, port: int) -> dict[str, Any]:
    """Return one service; `host` and `port`: where the HTTP API is published on the machine."""
    cores = format_numbers(sorted(part.place.cores))
    service: dict[str, Any] = {
        "image": image(),
        "command": [*map(_literal, part.arguments)],
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "stop_grace_period": f"{round(3 * GRACE_S)}s",
        "tmpfs": ["/tmp"],
        "cpuset": cores,
        "pids_limit": 512,
        **({} if part.memory is None else {"mem_limit": part.memory}),
        "healthcheck": {"disable": True},
    }
    if part.name == "http":
        service["ports"] = [f"{_published(host)}:{port}:{port}"]
        service["secrets"] = ["api-keys"]
        service["healthcheck"] = _check("python", "-c", READY.format(port=port))
    else:
        service["volumes"] = [f"cache:{CACHE}", *map(_bound, map(whole_model, part.models))]
    if part.is_worker:
        service["environment"] = dict(CONFINED)
    if part.gpu:
        wanted = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [wanted]}}}
    return service


def _bound(model: Path) -> dict[str, Any]:
    """Return a model as a volume; in the short syntax a colon in its path would end it."""
    return {
        "type": "bind",
        "source": _literal(str(model)),
        "target": _literal(f"{MODELS}/{model.name}"),
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def _check(*command: str) -> dict[str, Any]:
    return {
        "test": ["CMD", *command],
        "interval": "10s",
        "timeout": "5s",
        "retries": 3,
        "start_period": "15m",
        "start_interval": "1s",
    }


def _literal(text: str) -> str:
    """Return a text in which no variable is replaced."""
    return text.replace("$", "$$")


def _published(host: str) -> str:
    """Return an address as a published port has it."""
    return f"[{host}]" if ":" in host else host
