"""The fields of compose files and of Kubernetes' objects that we write, each with its type, after
their specifications; and the instructions of a Dockerfile."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import yaml

from dovetail.launch.commands import coordinator, http, worker
from dovetail.launch.settings.configure import Configuration, configure

TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0}
FLAG: dict[str, Any] = {"type": "boolean"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT, "minItems": 1}
NAMED: dict[str, Any] = {"type": "object", "additionalProperties": TEXT}


def of(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": [*required],
        "additionalProperties": False,
    }


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": [*values]}


# -- compose ---------------------------------------------------------------------------------------

DURATION = {"type": "string", "pattern": r"^(\d+(us|ms|s|m|h))+$"}
_check = {
    "oneOf": [
        of({"disable": {"const": True}}),
        of(
            {"test": {**TEXTS, "contains": one_of("CMD")}},
            {
                "interval": DURATION,
                "timeout": DURATION,
                "retries": NUMBER,
                "start_period": DURATION,
                "start_interval": DURATION,
            },
        ),
    ]
}
_device = of({"driver": TEXT, "count": NUMBER, "capabilities": TEXTS})
_bound = of(
    {"type": {"const": "bind"}, "source": TEXT, "target": TEXT, "read_only": FLAG},
    {"bind": of({"create_host_path": FLAG})},
)
_service = of(
    {"image": TEXT, "command": TEXTS},
    {
        "user": {"type": "string", "pattern": r"^\d+:\d+$"},
        "read_only": FLAG,
        "cap_drop": TEXTS,
        "security_opt": TEXTS,
        "restart": {"type": "string", "pattern": r"^(no|always|on-failure(:\d+)?|unless-stopped)$"},
        "stop_grace_period": DURATION,
        "tmpfs": TEXTS,
        "cpuset": {"type": "string", "pattern": r"^\d+(-\d+)?(,\d+(-\d+)?)*$"},
        "pids_limit": NUMBER,
        "mem_limit": NUMBER,
        "volumes": several(
            {"oneOf": [{"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"}, _bound]}
        ),
        "ports": several({"type": "string", "pattern": r"^\S+:\d+:\d+$"}),
        "secrets": TEXTS,
        "network_mode": one_of("none", "host"),
        "networks": TEXTS,
        "hostname": TEXT,
        "healthcheck": _check,
        "depends_on": {
            "type": "object",
            "additionalProperties": of({"condition": one_of("service_healthy", "service_started")}),
        },
        "environment": NAMED,
        "deploy": of({"resources": of({"reservations": of({"devices": several(_device)})})}),
    },
)
_volume = of({}, {"driver": TEXT, "driver_opts": NAMED})
COMPOSE = of(
    {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": _service},
        "volumes": {"type": "object", "additionalProperties": _volume},
        "secrets": {"type": "object", "additionalProperties": of({"file": TEXT})},
    },
    {"networks": {"type": "object", "additionalProperties": of({}, {"internal": FLAG})}},
)
"""The schema of these fields according to https://github.com/compose-spec/compose-spec."""


# -- Kubernetes ------------------------------------------------------------------------------------

LABEL = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
AMOUNT = {"type": "string", "pattern": r"^\d+(m|Ki|Mi|Gi)?$"}
AMOUNTS = {"type": "object", "additionalProperties": AMOUNT}
_mount = of({"name": LABEL, "mountPath": TEXT}, {"subPath": TEXT, "readOnly": FLAG})
_probe = of(
    {"httpGet": of({"path": TEXT, "port": LABEL})},
    {"periodSeconds": NUMBER, "timeoutSeconds": NUMBER, "failureThreshold": NUMBER},
)
_container = of(
    {"name": LABEL, "image": TEXT},
    {
        "args": TEXTS,
        "command": TEXTS,
        "env": several(of({"name": TEXT, "value": TEXT})),
        "ports": several(of({"name": {**LABEL, "maxLength": 15}, "containerPort": NUMBER})),
        "resources": of({"requests": AMOUNTS, "limits": AMOUNTS}),
        "securityContext": of(
            {
                "allowPrivilegeEscalation": FLAG,
                "readOnlyRootFilesystem": FLAG,
                "capabilities": of({"drop": TEXTS}),
            }
        ),
        "volumeMounts": several(_mount),
        "startupProbe": _probe,
        "livenessProbe": _probe,
        "readinessProbe": _probe,
    },
)
_source = {
    "emptyDir": of({}, {"medium": one_of("Memory"), "sizeLimit": AMOUNT}),
    "secret": of({"secretName": LABEL}, {"defaultMode": {**NUMBER, "maximum": 0o777}}),
    "persistentVolumeClaim": of({"claimName": LABEL}, {"readOnly": FLAG}),
}
_volumes = several({"oneOf": [of({"name": LABEL, kind: _source[kind]}) for kind in _source]})
_near = of({"labelSelector": of({"matchLabels": NAMED}), "topologyKey": TEXT})
_preferred = of(
    {
        "preferredDuringSchedulingIgnoredDuringExecution": several(
            of({"weight": NUMBER, "podAffinityTerm": _near})
        )
    }
)
_pod = of(
    {
        "metadata": of({"labels": NAMED}),
        "spec": of(
            {"containers": several(_container)},
            {
                "initContainers": several(_container),
                "automountServiceAccountToken": FLAG,
                "enableServiceLinks": FLAG,
                "terminationGracePeriodSeconds": NUMBER,
                "securityContext": of(
                    {
                        "runAsNonRoot": FLAG,
                        "runAsUser": NUMBER,
                        "runAsGroup": NUMBER,
                        "fsGroup": NUMBER,
                        "seccompProfile": of({"type": one_of("RuntimeDefault")}),
                    }
                ),
                "affinity": of({}, {"podAffinity": _preferred, "podAntiAffinity": _preferred}),
                "volumes": _volumes,
            },
        ),
    }
)
LEADER_WORKER_SET = of(
    {
        "apiVersion": one_of("leaderworkerset.x-k8s.io/v1"),
        "kind": one_of("LeaderWorkerSet"),
        "metadata": of({"name": LABEL}),
        "spec": of(
            {
                "leaderWorkerTemplate": of(
                    {"workerTemplate": _pod},
                    {
                        "leaderTemplate": _pod,
                        "size": {**NUMBER, "minimum": 1},
                        "restartPolicy": one_of(
                            "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"
                        ),
                    },
                )
            },
            {
                "replicas": NUMBER,
                "startupPolicy": one_of("LeaderCreated", "LeaderReady"),
                "rolloutStrategy": of(
                    {"type": one_of("RollingUpdate")},
                    {
                        "rollingUpdateConfiguration": of(
                            {"maxUnavailable": NUMBER, "maxSurge": NUMBER}
                        )
                    },
                ),
            },
        ),
    }
)
"""The schema according to the types of sigs.k8s.io/lws, api/leaderworkerset/v1, and of
k8s.io/api/core/v1."""
SERVICE = of(
    {
        "apiVersion": one_of("v1"),
        "kind": one_of("Service"),
        "metadata": of({"name": LABEL}),
        "spec": of(
            {
                "selector": NAMED,
                "ports": several(of({"name": LABEL, "port": NUMBER, "targetPort": LABEL})),
            },
            {"clusterIP": one_of("None"), "publishNotReadyAddresses": FLAG},
        ),
    }
)


def check_built(manifest: str, folder: Path) -> None:
    """Have kubectl read a manifest, where it is installed: it finds the objects that are there."""
    if (kubectl := shutil.which("kubectl")) is None:
        return
    (folder / "manifest.yaml").write_text(manifest)
    (folder / "kustomization.yaml").write_text("resources: [manifest.yaml]\n")
    built = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, check=True
    )
    found, written = (
        {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
        for text in (built.stdout, manifest)
    )
    assert found == written


# -- an image --------------------------------------------------------------------------------------


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and what follows them, lines that go on joined."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    pairs = (line.partition(" ") for line in lines if line.strip())
    return [(name, rest.strip()) for name, _, rest in pairs]


# -- commands --------------------------------------------------------------------------------------


def settings(**flags: str) -> Configuration:
    """Return the settings that these flags make, `.` written as two underscores."""
    return configure(flags={name.replace("__", "."): text for name, text in flags.items()})


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters that the command line makes of a command, which is refused here if it
    would be then."""
    commands: dict[str, click.Command] = {
        "coordinator": coordinator.command,
        "http": http.command,
        "worker": worker.command,
    }
    name, *rest = arguments
    return dict(commands[name].make_context(name, rest).params)
