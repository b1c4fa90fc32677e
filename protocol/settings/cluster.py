"""Settings of `dovetail serve --engine ray`: a cluster, and the requirements on its nodes."""

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from dovetail.protocol.settings.values import Frozen, byte_count

LABEL = "label:"
MEMORY = "memory"


class RaySettings(Frozen):
    """The cluster in which the processes of a service are placed.

    Node requirements are NAME=AMOUNT, separated by commas: CPU, GPU, memory (a size), or a custom
    resource of the cluster; label:KEY=VALUE is a label of the node. Resources that are not named
    are derived from the models' settings."""

    address: str = Field(
        "",
        description="the cluster: HOST:PORT, or auto for the one that this machine belongs to; "
        "empty: one is started on this machine",
    )
    replicas: Annotated[int, Field(ge=1, le=256)] = Field(
        1, description="number of services, behind one router if more than one"
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="whether the processes of a replica share few nodes or use many"
    )
    coordinator: str = Field(
        "",
        description="what the node of a coordinator and its HTTP API needs, such as "
        "CPU=1,label:zone=a; empty: it is the machine where `serve` was started",
    )
    target: str = Field(
        "",
        description="what the node of a target needs, such as CPU=8,memory=20GB; without CPU: "
        "target.threads, or most of the largest node; without memory: the size of its weights",
    )
    draft: str = Field(
        "",
        description="what the node of a draft needs, such as GPU=1,label:gpu=a10; without "
        "GPU: one if draft.device asks for it or the cluster has any, else a core",
    )
    wait_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(
        60.0, description="how long to wait until the cluster has room for a replica"
    )

    @field_validator("coordinator", "target", "draft")
    @classmethod
    def _wishes(cls, value: str) -> str:
        node_wishes(value)
        return value


def node_wishes(text: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the resources and the labels in "CPU=8,memory=20GB,label:zone=a": amounts by name,
    memory in bytes, and values by key; `ValueError` for anything else."""
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        if not name or not value or name in resources:
            raise ValueError(_form(part))
        if name.startswith(LABEL):
            labels[name.removeprefix(LABEL)] = value
        else:
            resources[name] = float(byte_count(value)) if name == MEMORY else _amount(part, value)
    return resources, labels


def _amount(part: str, value: str) -> float:
    try:
        amount = float(value)
    except ValueError:
        raise ValueError(_form(part)) from None
    if not 0.0 <= amount < math.inf:
        raise ValueError(_form(part))
    return amount


def _form(part: str) -> str:
    return (
        f"{part!r} is not a node requirement: write NAME=AMOUNT with commas between them, such as "
        "CPU=8,memory=20GB,label:zone=a"
    )
