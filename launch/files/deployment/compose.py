"""A compose file for the processes of `dovetail serve`: a container each, on one machine. They
speak over a socket in a volume, and only the HTTP API has a network; with a standby, which has to
be reached by another way than the coordinator, over a network of their own."""

from copy import deepcopy
from pathlib import Path
from shlex import quote
from typing import Any

from dovetail.launch.files.deployment.containers import (
    CACHE,
    CONFINED,
    DOCKERFILE,
    MODELS,
    PORT,
    READY,
    RUN,
    USER,
    check_api_keys,
    documents,
    image,
    in_container,
    key_names,
    listening,
)
from dovetail.launch.files.deployment.parts import (
    Destination,
    Part,
    check_copied,
    parts_of,
    settled,
    standby_of,
    whole_model,
)
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError

SOCKET = f"{RUN}/coordinator"
SECRETS = "/run/secrets"
LEAD, STANDBY = "coordinator", "standby"
"""The services of a pair, each with a host of that name: it says of itself that it is there."""
LINKS = "links"
"""The network of a pair, its workers and the HTTP API."""
COMMENT = """\
The image is built from the sources:
  docker build -f {dockerfile} -t {image} .
{keys} holds the API keys, one a line, and belongs to the user of the containers:
  test -e {keys} || (umask 077; openssl rand -hex 32 > {keys}); sudo chown {user} {keys}
Memory policies need a capability that these containers do not have: a target on several memory
nodes is bound to its cores only (cap_add: [SYS_NICE] allows more).
mem_limit: weights while they load, and keys and values of 8 long conversations, estimated."""
PAIR = """
{folder} holds the keys of the links, which belong to that user, too:
  dovetail keygen --out {folder}; sudo chown -R {user} {folder}
The standby takes over when the container of the coordinator is lost or stuck, and not when the
machine is: both are on it. What was taken over from is the next standby."""


def compose_file(configuration: Configuration, *, standby: bool = False) -> str:
    """Return the compose file for these settings on this machine, with a `standby` if there is to
    be one. `UserError` for a model that is not here, for a coordinator that is to listen
    elsewhere, and for a standby without a journal; `SettingsError` and `KeysError` for keys that
    are here and would be refused."""
    if (listen := configuration.settings.coordinator.listen) != "ipc":
        raise UserError(
            f"coordinator.listen = {listen!r}, and the containers of one compose file speak over a "
            "socket or a network of their own: leave it out, or export kubernetes for several "
            "machines"
        )
    check_copied(configuration, standby=standby)
    asked = configuration.settings.http
    keys = str(Path(asked.api_key_file or "api-keys").expanduser())
    keys = keys if asked.api_key_file else f"./{keys}"
    check_api_keys(Path(keys))
    folder = Path(configuration.settings.coordinator.keys or "keys").expanduser()
    configuration = listening(settled(configuration), f"{SECRETS}/api-keys")
    lead, second = (f"tcp://{name}:{PORT}" for name in (LEAD, STANDBY))
    there = Destination(
        address=f"{lead},{second}" if standby else f"ipc://{SOCKET}",
        listen=f"tcp://0.0.0.0:{PORT}" if standby else f"ipc://{SOCKET}",
        keys=lambda _: SECRETS,
        model=in_container,
    )
    parts = parts_of(configuration, there)
    services = {part.name: _service(part, asked.host, asked.port) for part in parts}
    volumes: dict[str, Any] = {"cache": {}}
    secrets = {"api-keys": {"file": _literal(keys)}}
    comment = COMMENT.format(dockerfile=DOCKERFILE, image=image(), keys=quote(keys), user=USER)
    content: dict[str, Any] = {"name": "dovetail", "services": services}
    for part in parts:
        service = services[part.name]
        service |= (
            _linked(service, part.name, folder) if standby else _at_socket(service, part.name)
        )
    if standby:
        services[STANDBY] = {
            **deepcopy(services[LEAD]),
            "command": [*map(_literal, standby_of(parts[0], lead).arguments)],
            "hostname": STANDBY,
            "volumes": [f"{STANDBY}:{CACHE}"],
        }
        volumes[STANDBY] = {}
        names = sorted({name for part in parts for name in key_names(folder, part.name)})
        secrets |= {name: {"file": _literal(f"{folder}/{name}")} for name in names}
        content["networks"] = {LINKS: {"internal": True}}
        comment += PAIR.format(folder=quote(str(folder)), user=USER)
    else:
        options = {
            "type": "tmpfs",
            "device": "tmpfs",
            "o": f"mode=0700,uid={USER},gid={USER}",
        }
        volumes["run"] = {"driver": "local", "driver_opts": options}
    return documents(comment, {**content, "volumes": volumes, "secrets": secrets})


def _linked(service: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Return what a service has beside the rest where there is a pair."""
    return {
        "networks": [*(["default"] if name == "http" else []), LINKS],
        "secrets": [*service.get("secrets", []), *key_names(folder, name)],
        **({"hostname": LEAD} if name == LEAD else _after("service_started")),
    }


def _at_socket(service: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a service has beside the rest where all meet at a socket."""
    lead = {"healthcheck": _check("test", "-S", SOCKET)}
    return {
        "volumes": [f"run:{RUN}", *service.get("volumes", [])],
        **({} if name == "http" else {"network_mode": "none"}),
        **(lead if name == LEAD else _after("service_healthy")),
    }


def _after(condition: str) -> dict[str, Any]:
    return {"depends_on": {LEAD: {"condition": condition}}}


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
