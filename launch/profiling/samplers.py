"""Samples busy cores, processes and GPUs while a workload runs. A sampler that cannot read gives
the reason, never 0. Only differences of counters are meaningful."""

import contextlib
import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dovetail.launch.machine.cards import CARD_CLASSES, LANE_GB_S, Card, read_cards

ROOT = Path("/")
DEVICES = "sys/bus/pci/devices"
NVIDIA = "0x10de"  # the number of the PCI SIG
GUESTS = ("dev/dxg", "dev/nvidia0")  # places of a card that is on no bus
NO_CARD = "no such card is on this machine's bus"
LANES_GT_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""The rate of a lane by the generation of PCIe, GT/s."""


class Absent(Exception):
    """Raised if a reading does not exist here, with the reason."""


@dataclass(frozen=True)
class Process:
    """The time and memory that a process has used."""

    cpu_s: float  # CPU seconds of all its threads, since it began
    rss_bytes: int


@dataclass(frozen=True)
class CardReading:
    """The figures of a card; None if it does not report them."""

    name: str
    busy: float | None  # share of the driver's last window, of up to a second
    used_bytes: int | None
    memory_bytes: int | None
    link_gb_s: float | None  # the peak rate of its slot in one direction
    integrated: bool = False  # true if it is a part of the processor


@dataclass(frozen=True)
class Sample:
    """All readings at one moment."""

    at_ns: int
    cores: Mapping[int, tuple[float, float]]
    """(busy, all) seconds of each logical CPU, both since boot."""
    processes: Mapping[int, Process]
    gpus: Mapping[str, CardReading]


def cards_of(vendor: str, root: Path = ROOT) -> bool:
    """True if a display or compute card of this maker (its PCI number) is on the bus, or may be: if
    the kernel does not show it, or a guest sees no bus."""
    devices = [*(root / DEVICES).glob("*")]
    if any((root / guest).exists() for guest in GUESTS):
        return True
    own = (device for device in devices if _word(device / "vendor") == vendor)
    return not devices or any(_word(one / "class").startswith(CARD_CLASSES) for one in own)


def _word(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


class Nvml:
    """NVIDIA's cards, by pynvml."""

    def __init__(self) -> None:
        if importlib.util.find_spec("pynvml") is None:
            if not cards_of(NVIDIA):
                raise Absent(NO_CARD)
            raise Absent("pynvml is not installed (pip install nvidia-ml-py)")
        self._nvml: Any = importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise Absent(f"NVML finds no card: {error}") from None
        if not count:
            raise Absent("NVML finds no card")
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        try:
            self.read()
        except self._nvml.NVMLError as error:  # such as a part of a card (MIG)
            raise Absent(f"NVML does not report how busy the card is: {error}") from None

    def read(self) -> Mapping[str, CardReading]:
        return {f"cuda:{index}": self._card(handle) for index, handle in enumerate(self._handles)}

    def _card(self, handle: Any) -> CardReading:
        nvml = self._nvml
        name = nvml.nvmlDeviceGetName(handle)
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        generation = self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
        lanes = self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
        rate = LANE_GB_S.get(LANES_GT_S.get(generation, 0.0))
        link = rate * lanes if rate is not None and lanes else None
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = name if isinstance(name, str) else name.decode()
        return CardReading(name, busy, int(memory.used), int(memory.total), link)

    def _ask(self, question: Any, handle: Any) -> Any:
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None


class SysfsCards:
    """Cards of AMD and Intel (`machine/cards.py`), by torch's names. Intel reports how long a card
    was powered down; its busy share is the rest of the time between two readings, None at the
    first."""

    def __init__(self, root: Path = ROOT, *, beside_nvidia: bool = False) -> None:
        """`beside_nvidia`: cuda:N are NVIDIA's cards, so AMD's are called amd:N."""
        names = {"AMD": "amd" if beside_nvidia else "cuda", "Intel": "xpu"}
        counts = dict.fromkeys(names, 0)
        self._cards: dict[str, Card] = {}
        # their libraries list GPUs that are part of a processor last
        for card in sorted(read_cards(root), key=lambda card: card.integrated):
            if card.driver:
                self._cards[f"{names[card.maker]}:{counts[card.maker]}"] = card
                counts[card.maker] += 1
        if not self._cards:
            raise Absent(NO_CARD)
        self._idle: dict[str, tuple[float, float]] = {}
        """Name -> time of a card's last reading, and its powered-down time then; seconds."""

    def read(self) -> Mapping[str, CardReading]:
        return {name: self._read(name, card) for name, card in self._cards.items()}

    def _read(self, name: str, card: Card) -> CardReading:
        busy, idle_s, now_s = card.busy(), card.idle_s(), time.monotonic()
        if busy is None and idle_s is not None:
            before = self._idle.get(name)
            self._idle[name] = now_s, idle_s
            if before is not None and now_s > before[0]:
                busy = min(1.0, max(0.0, 1.0 - (idle_s - before[1]) / (now_s - before[0])))
        sizes = card.used_bytes(), card.memory_bytes, card.link_gb_s
        return CardReading(card.name, busy, *sizes, card.integrated)


class Samplers:
    """All samplers of this machine, read together."""

    def __init__(self, pids: Sequence[int] = (), *, root: Path = ROOT) -> None:
        """`pids`: the sampled processes of this machine."""
        self._processes = {pid: psutil.Process(pid) for pid in pids}
        self.absent: dict[str, str] = {}  # reading -> why there is none
        nvidia = self._open("NVIDIA cards (NVML)", Nvml)
        others = partial(SysfsCards, root, beside_nvidia=nvidia is not None)
        cards = (nvidia, self._open("AMD and Intel cards (sysfs)", others))
        self._cards: list[Any] = [card for card in cards if card is not None]
        self._taken: list[Sample] = []

    def _open(self, name: str, kind: Any) -> Any:
        try:
            return kind()
        except Absent as reason:
            self.absent[name] = str(reason)
            return None

    @property
    def taken(self) -> Sequence[Sample]:
        return self._taken

    def take(self) -> Sample:
        cards = {name: gpu for card in self._cards for name, gpu in card.read().items()}
        sample = Sample(time.monotonic_ns(), _cores(), self._used(), cards)
        self._taken.append(sample)
        return sample

    def _used(self) -> Mapping[int, Process]:
        found = {}
        for pid, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                times = process.cpu_times()
                found[pid] = Process(times.user + times.system, process.memory_info().rss)
        return found


def _cores() -> Mapping[int, tuple[float, float]]:
    """(busy, all) seconds of each logical CPU. A guest's time is already part of user time, and
    steal time does not count as busy."""
    return {
        core: (
            sum(t) - t.idle - t.iowait - t.guest - t.guest_nice - t.steal,
            sum(t) - t.guest - t.guest_nice,
        )
        for core, t in enumerate(psutil.cpu_times(percpu=True))
    }


def busy_cores(first: Sample, last: Sample, cores: Sequence[int]) -> float | None:
    """Share of the time between two samples in which these cores were busy with any process; None
    if none was read, or no time has passed."""
    known = [core for core in cores if core in first.cores and core in last.cores]
    busy, every = (
        sum(last.cores[core][part] - first.cores[core][part] for core in known) for part in (0, 1)
    )
    return busy / every if every > 0.0 else None


def busy_process(first: Sample, last: Sample, pid: int, threads: int) -> float | None:
    """CPU time of a process between two samples, over the time available to its threads."""
    wall_s = (last.at_ns - first.at_ns) / 1e9
    if pid not in first.processes or pid not in last.processes or wall_s <= 0.0:
        return None
    return (last.processes[pid].cpu_s - first.processes[pid].cpu_s) / (wall_s * max(1, threads))
