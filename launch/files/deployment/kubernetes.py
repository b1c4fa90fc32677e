"""A LeaderWorkerSet of Kubernetes for the processes of `dovetail serve`: a leader pod with the
coordinator and the HTTP API, and a worker pod beside it.

The leader has the target too where there is a draft, which then may have a node with a GPU of its
own. Nothing here is about the machine on which the manifest is written but the sizes of models
and the number of cores.
"""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from dovetail.launch.files.deployment.containers import (
    CACHE,
    CONFINED,
    DOCKERFILE,
    MODELS,
    PORT,
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
    parts_of,
    settled,
    whole_model,
)
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError

NAME = "dovetail"
NAMED, SERVES = {"app.kubernetes.io/name": NAME}, {"http": "served"}
"""The labels of all pods, and of those that have the HTTP API."""
LISTEN = f"tcp://0.0.0.0:{PORT}"
PROBE_S = 5
"""A server that has half a core may take so long to answer under load."""
LEADER, SET = "$(LWS_LEADER_ADDRESS)", "leaderworkerset.sigs.k8s.io"
"""The address of the leader, which the controller puts into every container's environment; the
prefix of its labels."""
COMMENT = """\
Needs the LeaderWorkerSet controller ({set}); the image, where the nodes can
pull it:
  docker build -f {dockerfile} -t {image} .
and these, which are made once:
  dovetail keygen --out {folder}
  test -e {api_keys} || (umask 077; openssl rand -hex 32 > {api_keys})
{secrets}{claim}Whatever a worker holds can be rebuilt, so a pod that fails takes no other with it
(restartPolicy None). A worker that is stuck ends itself, and is started again: only the HTTP API
has probes.
Whole cores at equal requests and limits are exclusive under the node's static CPU manager, and
topologyManagerPolicy single-numa-node puts them beside their memory.
memory: weights while they load, and keys and values of 8 long conversations, estimated."""


def kubernetes_manifest(configuration: Configuration) -> str:
    """Return the manifest for these settings. `UserError` for a model that is not here, whose size
    determines the memory, and for a coordinator that is to listen elsewhere; `SettingsError` and
    `KeysError` for keys that are here and would be refused."""
    listen = configuration.settings.coordinator.listen
    if listen not in ("ipc", LISTEN):
        raise UserError(
            f"coordinator.listen = {listen!r}, and in its pod the coordinator listens at {LISTEN}, "
            "where the containers find it: leave it out"
        )
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
    served = configuration.settings.http.port
    *_, last = parts
    leading, following = parts[:-1], [last]
    models = sorted({whole_model(path) for part in parts for path in part.models})
    content = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": NAME},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "leaderWorkerTemplate": {
                "size": 2,
                "restartPolicy": "None",
                "leaderTemplate": _pod(leading, "leader", served),
                "workerTemplate": _pod(following, "worker", served),
            },
        },
    }
    api = {
        "selector": {**NAMED, **SERVES},
        "ports": [{"name": "http", "port": served, "targetPort": "http"}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{NAME}-http"},
        "spec": api,
    }
    return documents(_comment(parts, models, folder, api_keys), content, service)


def _comment(parts: Sequence[Part], models: Sequence[Path], folder: Path, api_keys: Path) -> str:
    secrets = "".join(
        f"  kubectl create secret generic {_secret(part.name)} \\\n    "
        + " \\\n    ".join(
            f"--from-file={quote(f'{name}={file}')}"
            for name, file in _secret_files(part.name, folder, api_keys).items()
        )
        + "\n"
        for part in parts
    )
    claim = (
        f"  a PersistentVolumeClaim {NAME}-models, read by several nodes if need be, with\n"
        + "".join(f"    {path.name} (here {path})\n" for path in models)
        if models
        else ""
    )
    return COMMENT.format(
        set=SET,
        image=image(),
        dockerfile=DOCKERFILE,
        folder=quote(str(folder)),
        api_keys=quote(str(api_keys)),
        secrets=secrets,
        claim=claim,
    )


def _secret_files(name: str, folder: Path, api_keys: Path) -> dict[str, Path]:
    """Return the files that the secret of a part is made of, by their names in it."""
    files = {file: folder / file for file in key_names(folder, name)}
    return {**files, "api-keys": api_keys} if name == "http" else files


def _pod(parts: Sequence[Part], role: str, served: int) -> dict[str, Any]:
    """Return the template of a pod."""
    models = any(part.models for part in parts)
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(3 * GRACE_S),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": _near(),
        "initContainers": [_own_keys(parts)],
        "containers": [_container(part, served) for part in parts],
        "volumes": [
            {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "cache", "emptyDir": {}},
            *(
                {
                    "name": f"keys-{part.name}",
                    "secret": {"secretName": _secret(part.name), "defaultMode": 0o440},
                }
                for part in parts
            ),
            *(
                [
                    {
                        "name": "models",
                        "persistentVolumeClaim": {"claimName": f"{NAME}-models", "readOnly": True},
                    }
                ]
                if models
                else []
            ),
        ],
    }
    serves = SERVES if any(part.name == "http" for part in parts) else {}
    return {"metadata": {"labels": {**NAMED, "role": role, **serves}}, "spec": spec}


def _near() -> dict[str, Any]:
    """Return the wish for a node near the rest of the group: a round trip is part of a round."""
    term = {
        "labelSelector": {"matchLabels": {f"{SET}/name": NAME}},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _own_keys(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the container that copies keys to where only their user can read them, which is
    demanded: a Secret's files belong to root."""
    names = " ".join(part.name for part in parts)
    script = (
        f"umask 077; for part in {names}; do mkdir -p {RUN}/$part; "
        f"install -m 0400 /keys/$part/* {RUN}/$part/; done"
    )
    mounts = (
        {"name": f"keys-{part.name}", "mountPath": f"/keys/{part.name}", "readOnly": True}
        for part in parts
    )
    return {
        "name": "keys",
        "image": image(),
        "command": ["sh", "-c", script],
        "securityContext": _confined(),
        "resources": _equal({"cpu": "100m", "memory": "64Mi"}),
        "volumeMounts": [{"name": "run", "mountPath": RUN}, *mounts],
    }


def _container(part: Part, served: int) -> dict[str, Any]:
    cpu = str(len(set(part.place.cores))) if part.is_worker else "500m"
    resources = {"cpu": cpu, **({} if part.memory is None else {"memory": str(part.memory)})}
    if part.gpu:
        resources["nvidia.com/gpu"] = "1"
    container: dict[str, Any] = {
        "name": part.name,
        "image": image(),
        "args": [_literal(word) for word in part.arguments],
        "securityContext": _confined(),
        "resources": _equal(resources),
        "volumeMounts": [
            {"name": "run", "mountPath": f"{RUN}/{part.name}", "subPath": part.name},
            {"name": "tmp", "mountPath": "/tmp", "subPath": part.name},
        ],
    }
    if part.is_worker:
        container["env"] = [{"name": name, "value": value} for name, value in CONFINED.items()]
    if part.is_worker or part.name == "coordinator":
        container["volumeMounts"].append({"name": "cache", "mountPath": CACHE})
    if part.models:
        container["volumeMounts"].append({"name": "models", "mountPath": MODELS, "readOnly": True})
    if part.name == "coordinator":
        container["ports"] = [{"name": "coordinator", "containerPort": PORT}]
    if part.name == "http":
        container["ports"] = [{"name": "http", "containerPort": served}]
        container["startupProbe"] = _probe("/health", 1, 60)
        container["livenessProbe"] = _probe("/health", 10, 3)
        container["readinessProbe"] = _probe("/readyz", 2, 3)
    return container


def _probe(path: str, every_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": every_s,
        "timeoutSeconds": PROBE_S,
        "failureThreshold": failures,
    }


def _confined() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _equal(amounts: dict[str, str]) -> dict[str, Any]:
    return {"requests": amounts, "limits": dict(amounts)}


def _literal(word: str) -> str:
    """Return an argument in which nothing but the leader's address is replaced."""
    return LEADER.join(part.replace("$(", "$$(") for part in word.split(LEADER))


def _secret(name: str) -> str:
    return f"{NAME}-{name}-keys"
