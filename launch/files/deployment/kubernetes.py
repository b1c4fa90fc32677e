"""A LeaderWorkerSet of Kubernetes for the processes of `dovetail serve`: a leader pod with the
coordinator and the HTTP API, and a worker pod.

With a draft, the leader also has the target, so that the draft may run on a separate GPU node. Of
the machine that writes the manifest, only the sizes of the models and the number of cores are used.
"""

from pathlib import Path

from dovetail.launch.files.deployment.containers import (
    CACHE,
    CONFINED,
    DOCKERFILE,
    MODELS,
    PORT,
    RUN,
    USER,
    check_api_keys,
    image,
    in_container,
    key_names,
    listening,
)
from dovetail.launch.files.deployment.parts import Destination, Part, parts_of, settled, whole_model
from dovetail.launch.files.deployment.templates import documents
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError

LISTEN = f"tcp://0.0.0.0:{PORT}"
PROBE_S = 5  # a server that has half a core may take so long to answer under load
LEADER = "$(LWS_LEADER_ADDRESS)"
"""The address of the leader, which the controller puts into every container's environment."""


def kubernetes_manifest(configuration: Configuration) -> str:
    """Return the manifest for these settings. `UserError` for a model that is not on this machine,
    since its size determines the memory, and for a coordinator with a configured address;
    `SettingsError` and `KeysError` for existing keys that would be refused."""
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
