"""`pretended`: the CPU behind the rules of a GPU, for tests of device code on machines that have
none.

Its tensors say that they are elsewhere, hold their numbers on the CPU, and are computed there. What
CUDA refuses is refused: an operation on tensors of two devices, numbers read without asking for
them (`.numpy()`), a random generator of another device, int4 codes that are not laid out as CUDA's,
and within a captured graph any wait for the device. Graphs are recorded operation by operation and
replayed on the same memory. Which operations take a tensor of the CPU beside those of a GPU is in
torch's native_functions.yaml: copies, indices of `x[...]`, and single numbers where the operation
is elementwise. What is asked of it, and the bytes that it moves, are counted (`counted`); a test
may say where its memory ends (`capped`), which compute capability it has (`capable`), and what it
lacks, as cards of other makers do (`lacking`, `PROFILES`).

Copies are made as late as the events that are waited for allow (`streams.py`, `pinned.py`), and
graphs share their memory: what one returned is spoilt when another is replayed. Everything else is
done when a call returns. Its clock counts what products would take (`times.py`). torch is told of
the device once for the whole process, which changes nothing for other tensors. It is a test rig and
makes nothing faster.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.workers.devices import cpu
from dovetail.workers.devices.base import Device, DeviceKind, Transfer
from dovetail.workers.devices.memory import HELD
from pretended import counts
from pretended.card import CARD, PROFILES, capable, lacking
from pretended.counts import Counts, counted
from pretended.graphs import capture
from pretended.memory import MEMORY, capped
from pretended.pinned import fetched, pin, sent
from pretended.recording import Recorded, recording
from pretended.registration import POSSIBLE, device
from pretended.rules import NAME
from pretended.streams import PretendedTransfer
from pretended.tensors import Elsewhere
from pretended.times import CLOCK, slow_fp16
from pretended.traffic import bytes_of
from pretended.uses import USES

__all__ = [
    "CLOCK",
    "MEMORY",
    "POSSIBLE",
    "PRETENDED",
    "PROFILES",
    "USES",
    "Counts",
    "Elsewhere",
    "PretendedTransfer",
    "Recorded",
    "bytes_of",
    "capable",
    "capped",
    "capture",
    "counted",
    "counts",
    "device",
    "lacking",
    "recording",
    "slow_fp16",
]


class _Pretended(DeviceKind):
    """The one pretended device."""

    type = NAME
    counts_time = True

    def open(self, name: str) -> Device | None:
        if name not in (NAME, f"{NAME}:0"):
            return None
        place = device()
        HELD.add_cache(MEMORY.empty_cache)
        captures = capture if CARD.has("graphs") else None
        return Device(self, str(place), place, f"{cpu.library()}-{NAME}", "fp16", captures)

    def pinned(self, size: int) -> Tensor:
        memory = super().pinned(size)
        if CARD.has("pinned"):
            pin(memory)
        return memory

    def send(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        if not CARD.has("pinned"):
            return super().send(source, target)
        target.copy_(source, non_blocking=True)
        return sent(source)

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        if not CARD.has("pinned"):
            return super().fetch(source, target)
        target.copy_(source, non_blocking=True)
        arrive = fetched(target)

        def wait() -> None:
            counts.add(synchronisations=1)
            arrive()

        return wait

    def has_fp64(self, device: torch.device) -> bool:
        return CARD.has("fp64")

    def clock(self) -> float:
        return CLOCK.seconds

    def driver(self, device: torch.device) -> str:
        return f"capability-{CARD.capability}-{CLOCK.fp16_share}"

    def against_bf16(self, device: torch.device) -> str:
        if CARD.computes_bf16:
            return ""
        return f"{device} has no bf16 arithmetic (compute capability {CARD.capability})"

    def against_int4(self, device: torch.device) -> str:
        if CARD.multiplies_int4:
            return ""
        if not CARD.has("int4"):
            return f"torch has no int4 products for {device}"
        return (
            f"torch's int4 products need a GPU of compute capability 8.0 or more, and {device} "
            f"has {CARD.capability}"
        )

    def free_bytes(self, device: torch.device) -> int:
        return MEMORY.free_bytes()

    def limit(self, device: torch.device, size: int) -> bool:
        MEMORY.limit = size
        return True

    def transfer(self, device: torch.device) -> Transfer:
        return PretendedTransfer() if CARD.has("streams") else super().transfer(device)


PRETENDED = _Pretended()
