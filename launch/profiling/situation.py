"""The run that advice is asked for: its settings, its machine, and what other cards could do."""

from dataclasses import dataclass

from dovetail.launch.profiling.bounds import Roofline

USABLE = 0.9
"""Share of a card's free memory that layers may take."""


@dataclass(frozen=True)
class Elsewhere:
    """Cores and memory nodes that the target could have in place of its own."""

    what: str
    flags: tuple[str, ...]
    roofline: Roofline


@dataclass(frozen=True)
class Card:
    """A GPU beside a target that is on the CPU."""

    device: str
    name: str
    free_bytes: int
    link_gb_s: float | None
    """The rate that its slot carries one way at best; None: not known."""

    def holds(self, layer_bytes: float) -> int:
        """Layers that stay on it, with some room for keys, values and what a pass needs."""
        return int(self.free_bytes * USABLE // layer_bytes)


@dataclass(frozen=True)
class Situation:
    """The settings and the machine of a run."""

    policy: str
    """UNKNOWN where others' requests were watched."""
    cuts: bool
    """Return True if the size of a tree follows what pays."""
    draft_kind: str
    reads: bool
    """True if the draft is a head, which reads its target's states."""
    ahead_possible: bool
    """True if the draft could go on while the target verifies: it has a device, or cores, of its
    own."""
    weights: str
    stored_16_bits: bool
    threads: int
    spare_threads: int
    """Cores that neither target nor draft has."""
    roofline: Roofline | None = None
    wider: Roofline | None = None
    """The roofline on the target's cores and the spare ones together."""
    blocks: int | None = None
    """Blocks of a Dovetail head."""
    idle_gpu: str = ""
    """A GPU that nobody uses."""
    elsewhere: tuple[Elsewhere, ...] = ()
    card: Card | None = None
    layers: int = 0
    """Layers of the target; 0: not known."""
    weight_bytes: int = 0
    """Bytes of the target that a pass reads; 0: not known."""
