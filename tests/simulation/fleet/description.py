"""A fleet as a file describes it: kinds of servers, their shares, watts and failures."""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from dovetail.launch.planning.acceptance import Library
from dovetail.launch.planning.machines import Weights, read_machine
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import read_text
from dovetail.protocol.settings import Frozen
from simulation.figures import Figures
from simulation.fleet.layout import Kind
from simulation.fleet.profile import of_costs
from simulation.methods import Method
from simulation.prices import placed_costs, read_size
from simulation.runs import figures_of

FOLDER = Path(__file__).parent
Hours = Annotated[float, Field(ge=0.0, le=1e9, strict=False)]
Seconds = Annotated[float, Field(ge=0.0, le=1e9, strict=False)]
Watts = Annotated[float, Field(ge=0.0, le=1e6, strict=False)]


class KindPart(Frozen):
    """Servers that are alike."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    machine: str
    target: str
    weights: Weights
    share: Annotated[float, Field(gt=0.0, le=1e9, strict=False)] = 1.0
    """Part of all servers of the fleet, beside the shares of the other kinds."""
    sessions: Annotated[int, Field(ge=1, le=1024)] = 16
    idle_w: Watts
    busy_w: Watts
    per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    worker_h: Hours = 0.0
    worker_back_s: Seconds = 60.0
    node_h: Hours = 0.0
    node_back_s: Seconds = 600.0
    gpu_h: Hours = 0.0
    gpu_back_s: Seconds = 3600.0


class Description(Frozen):
    """The file as a whole."""

    kind: Annotated[tuple[KindPart, ...], Field(min_length=1, max_length=64)]


def fleet_names() -> list[str]:
    """Return the names of the fleets that come with the tool."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_fleet(name: str) -> Description:
    """Return the fleet of that name, or in that file; `UserError` says what is wrong with it."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        table = tomllib.loads(read_text(path, f"the fleet in {path}"))
        if isinstance(table.get("kind"), list):
            table["kind"] = tuple(table["kind"])
        return Description.model_validate(table)
    except FileNotFoundError:
        known = ", ".join(fleet_names())
        if name.endswith(".toml"):
            raise UserError(
                f"there is no file {path}: name one that describes a fleet, or choose {known}"
            ) from None
        raise UserError(
            f"there is no fleet {name!r}: choose {known}, or name a file that ends in .toml"
        ) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the fleet in {path} cannot be read: {error}") from None
    except ValidationError as error:
        raise UserError(
            f"the fleet in {path}: {_mistake(error)}; {FOLDER / 'legacy.toml'} is an example"
        ) from None


def _mistake(error: ValidationError) -> str:
    """Return what is wrong first, with its place and its value."""
    first = error.errors(include_url=False, include_context=False)[0]
    *_, name = first["loc"]
    kind = f" of kind {int(first['loc'][1]) + 1}" if len(first["loc"]) > 2 else ""
    match first["type"]:
        case "missing":
            return f"{name}{kind} is missing"
        case "extra_forbidden":
            known = (KindPart if kind else Description).model_fields
            return f"there is no {name}{kind}: known are {', '.join(known)}"
        case _:
            return f"{name}{kind} is {str(first['input'])[:80]!r}: {first['msg']}"


def kinds_of(
    fleet: Description,
    servers: int,
    context: float,
    library: Library | None = None,
    method: Method | None = None,
) -> list[Kind]:
    """Return the kinds of so many servers, at least one of each, as far as that many are there.
    With a `library` of recorded replies they draft, as `method` says; without it none does."""
    shares = sum(part.share for part in fleet.kind)
    kinds, left = [], servers
    for place, part in enumerate(fleet.kind):
        wanted = max(1, round(servers * part.share / shares))
        count = left if place == len(fleet.kind) - 1 else min(left, wanted)
        left -= count
        costs = placed_costs(read_machine(part.machine), read_size(part.target), part.weights)
        drafted: Figures | None = None
        if library is not None and method is not None:
            drafted, _ = figures_of(library, costs, method, lambda _: None)
        alone = of_costs(costs, part.sessions, context)
        fails = {
            name: getattr(part, name)
            for name in ("per_node", "worker_h", "worker_back_s", "node_h", "node_back_s")
        }
        kinds.append(
            Kind(
                part.name,
                count,
                of_costs(costs, part.sessions, context, drafted),
                alone,
                part.idle_w,
                part.busy_w,
                gpu_h=part.gpu_h,
                gpu_back_s=part.gpu_back_s,
                **fails,
            )
        )
    return [kind for kind in kinds if kind.count]
