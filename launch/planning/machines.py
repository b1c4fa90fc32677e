"""Descriptions of other machines: TOML files that name the source of every number, measured or
estimated. A machine without a GPU may give memory channels, cores and instruction set instead."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dovetail.launch.planning.planner import GIGA, MICRO, Engine, Hardware
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import read_text
from dovetail.protocol.settings import Frozen
from dovetail.runtime.costs.rounds import Messages, Nodes, Origin
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.gguf.view import FILE

FOLDER = DEMO_FOLDER / "machines"
Weights = Literal["fp32", "half", "int8"]
Rate = Annotated[float, Field(gt=0.0, le=1e12, strict=False)]
Micros = Annotated[float, Field(ge=0.0, le=1e9, strict=False)]
FP32_SHARE = 0.5
"""A GPU's fp32 arithmetic, used for a target's layers, as a share of that in 16 bits."""


@dataclass(frozen=True)
class Size:
    """The shape of a decoder; `keys` is the width of its keys, and of its values."""

    hidden: int
    layers: int
    inner: int
    keys: int
    vocabulary: int


SIZES = {
    "7B": Size(4096, 32, 11008, 4096, 32000),
    "8B": Size(4096, 32, 14336, 1024, 128256),
    "13B": Size(5120, 40, 13824, 5120, 32000),
    "33B": Size(6656, 60, 17920, 6656, 32000),
    "70B": Size(8192, 80, 28672, 1024, 32000),
}
"""Llama-2 and Vicuna of 7, 13, 33 and 70 billion parameters, and Llama-3.1 8B."""


class TargetPart(Frozen):
    """The device and the costs of the target."""

    bandwidth_gb_s: Rate
    """The rate at which weights are read: of memory, or of the bus if they are streamed."""
    peak_gflop_s: dict[Weights, Rate]
    layer_us: Micros
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Memory nodes, each with this bandwidth and arithmetic, over which it can be spread."""
    kv_bytes: Annotated[float, Field(gt=0.0, le=8.0, strict=False)]
    """Bytes of a number of a key or value."""
    resident_gb: Annotated[float, Field(ge=0.0, strict=False)] = 0.0
    """Weights stored where they are computed."""
    resident_bandwidth_gb_s: Rate | None = None
    """The rate at which these and the cache are read."""

    @property
    def spread(self) -> Nodes | None:
        """Return the nodes over which the target can be spread; None if there is only one."""
        return Nodes(self.nodes, float(self.nodes)) if self.nodes > 1 else None


class DraftPart(Frozen):
    """The device and the kind of the draft: a head of this many blocks, or a copy of the whole
    target in fewer bits."""

    bandwidth_gb_s: Rate
    peak_gflop_s: Rate
    blocks: Annotated[int, Field(ge=1, le=64)] = 1
    bytes: Annotated[float, Field(gt=0.0, le=4.0, strict=False)] = 2.0
    copy_bits: Annotated[float, Field(gt=0.0, le=16.0, strict=False)] | None = None
    block_us: Micros
    pass_us: Micros


class LinkPart(Frozen):
    hop_us: Micros
    coordinator_us: Micros

    @property
    def messages(self) -> Messages:
        return Messages(self.hop_us * MICRO, self.coordinator_us * MICRO)


class HostPart(Frozen):
    """The processor of a machine whose target runs elsewhere."""

    bandwidth_gb_s: Rate
    peak_gflop_s: dict[Weights, Rate]
    layer_us: Micros


class MemoryPart(Frozen):
    """Figures that a planner needs in addition to the costs of the measured placement."""

    vram_gb: Rate
    ram_gb: Rate
    link_gb_s: Rate
    """The rate of the bus between the two."""


ATTAINED = 0.8
"""Share of nominal bandwidth and arithmetic that is reached, as on the papers' machines."""
OPERATIONS = {"sse": 8, "avx": 16, "avx2": 32, "avx512": 64}
"""Products and sums in fp32 that a core does in a cycle."""
INT8_TIMES = 2  # int8 products per fp32 product: an estimate
LAYER_US, LEVEL_US, HOP_US, COORDINATOR_US = 30.0, 150.0, 60.0, 100.0
"""Microseconds per layer, tree level (ours) and message, and of the coordinator (Dovetail
paper)."""


class ProcessorPart(Frozen):
    """The processors of a machine without a GPU, by their data sheet."""

    channels: Annotated[int, Field(ge=1, le=1024)]
    """Memory channels of all sockets; `cores` likewise."""
    mt_s: Rate
    """Transfers of 8 bytes on a channel, in millions per second: 3200 for DDR4-3200."""
    cores: Annotated[int, Field(ge=1, le=65536)]
    ghz: Annotated[float, Field(gt=0.0, le=100.0, strict=False)]
    isa: Literal["sse", "avx", "avx2", "avx512"]
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Memory nodes, among which channels and cores are divided equally."""

    def parts(self) -> dict[str, Any]:
        """Return the other parts of a description: a target on all cores of a node, a draft on
        one."""
        bandwidth = ATTAINED * self.channels / self.nodes * self.mt_s * 8 / 1000
        core = ATTAINED * self.ghz * OPERATIONS[self.isa]
        peak = self.cores / self.nodes * core
        return {
            "target": {
                "bandwidth_gb_s": bandwidth,
                "peak_gflop_s": {"fp32": peak, "half": peak, "int8": INT8_TIMES * peak},
                "layer_us": LAYER_US,
                "nodes": self.nodes,
                "kv_bytes": 2,
            },
            "draft": {
                "bandwidth_gb_s": bandwidth,
                "peak_gflop_s": core,
                "block_us": LAYER_US,
                "pass_us": LEVEL_US,
            },
            "link": {"hop_us": HOP_US, "coordinator_us": COORDINATOR_US},
        }


class DescribedMachine(Frozen):
    """A machine described by a file."""

    title: str
    weights: Weights
    """The target's, unless another one is set."""
    shared: bool = False
    """True if target and draft compute on one device, and take turns there."""
    target: TargetPart
    draft: DraftPart
    link: LinkPart
    memory: MemoryPart | None = None
    host: HostPart | None = None
    """None: the target runs on it, or it is unknown."""

    def hardware(self, weights: str, vram: int | None, ram: int | None) -> Hardware:
        """Return its limits for a target with these weights; bytes of memory override its own.
        `UserError` for weights without figures."""
        weights, source = "int8" if weights in (FILE, INT4) else weights, "its description"
        target, draft, memory, own = self.target, self.draft, self.memory, self.host
        if weights not in target.peak_gflop_s:
            choices = " or ".join(target.peak_gflop_s)
            raise UserError(f"{self.title} has no figures for {weights}: choose {choices}")
        peak = target.peak_gflop_s[weights]
        host: Engine | None = None
        if self.shared:
            near = target.resident_bandwidth_gb_s or target.bandwidth_gb_s
            device = Engine(near, peak, target.layer_us, source=source)
            if own is not None:
                peak = own.peak_gflop_s[weights]
                host = Engine(own.bandwidth_gb_s, peak, own.layer_us, source=source)
        else:
            gflop_s = (FP32_SHARE if weights == "fp32" else 1.0) * draft.peak_gflop_s
            device = Engine(draft.bandwidth_gb_s, gflop_s, draft.block_us, source=source)
            host = Engine(target.bandwidth_gb_s, peak, target.layer_us, source=source)
        if memory is not None:
            vram = round(memory.vram_gb * GIGA) if vram is None else vram
            ram = round(memory.ram_gb * GIGA) if ram is None else ram
        return Hardware(
            title=self.title,
            host=host,
            device=device if memory is not None else None,
            draft=Engine(
                draft.bandwidth_gb_s, draft.peak_gflop_s, draft.block_us, draft.pass_us, source
            ),
            link_gb_s=memory.link_gb_s if memory is not None else 0.0,
            link=source,
            device_bytes=vram,
            host_bytes=ram,
            messages=self.link.messages,
            messages_from=Origin(source, estimated=True),
            level_s=0.0,
            proposal_s=0.0,
            nodes=None if self.shared else target.spread,
        )


def machine_names() -> list[str]:
    """Return the names of the machines that come with the program."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_machine(name: str) -> DescribedMachine:
    """The machine of that name, or in that file; `UserError` if it is invalid."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        table = tomllib.loads(read_text(path, f"the machine in {path}"))
        if "processor" in table:
            table |= ProcessorPart.model_validate(table.pop("processor")).parts()
        return DescribedMachine.model_validate(table)
    except FileNotFoundError:
        raise UserError(
            f"there is no machine {name!r}: choose {', '.join(machine_names())} or a .toml file"
        ) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the machine in {path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise UserError(
            f"the machine in {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
