"""Cards of AMD and Intel as Linux shows them in /sys (amdgpu's `mem_info_*` and `gpu_busy_percent`,
xe's `gtidle`, i915's `rc6_residency_ms`, kfd's `gfx_target_version`): maker, memory, load."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
DRM, PCI = "sys/class/drm", "sys/bus/pci/devices"
KFD = "sys/class/kfd/kfd/topology/nodes"
NAMES = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")
"""The PCI ID list, in the places of several distributions."""
CARD_CLASSES = ("0x03", "0x12")  # display controllers and processing accelerators
MAKERS = {"0x1002": "AMD", "0x8086": "Intel"}  # numbers of the PCI SIG
CARVED = 3 << 30
"""Bytes: by default, graphics in an AMD processor use less of the machine's memory."""
LANE_GB_S = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938, 64.0: 7.563}
"""GT/s -> 10^9 bytes/s of a lane of PCIe one way: 8/10 to 5, 128/130 to 32, 242/256 of 64."""


@dataclass(frozen=True)
class Card:
    """A graphics card, and its readable values."""

    maker: str
    name: str
    driver: str  # the kernel's driver, such as amdgpu, i915 or xe; empty: none is bound to it
    integrated: bool  # true if it is part of the processor and uses the machine's memory
    memory_bytes: int | None  # none if its driver does not report it
    target: str  # AMD's name of its instruction set, such as gfx1031; empty: unknown
    link_gb_s: float | None  # the peak rate of its slot in one direction, 10^9 bytes a second
    folder: Path  # the folder of the card's device below /sys

    def used_bytes(self) -> int | None:
        """Return how much of its memory is in use."""
        return _number(self.folder / "mem_info_vram_used")

    def busy(self) -> float | None:
        """Return the share of its driver's last window in which it was busy."""
        percent = _number(self.folder / "gpu_busy_percent")
        return None if percent is None else percent / 100

    def idle_s(self) -> float | None:
        """Return how many seconds it has been powered down since its start: the minimum over its
        parts, since it is busy if any part is."""
        patterns = ("tile*/gt*/gtidle/idle_residency_ms", "drm/card*/gt/gt*/rc6_residency_ms")
        found = [_number(path) for pattern in patterns for path in self.folder.glob(pattern)]
        counted = [number for number in found if number is not None]
        return min(counted) / 1e3 if counted else None


def read_cards(root: Path = ROOT) -> Sequence[Card]:
    """Return the cards of AMD and Intel, in bus order."""
    folders = [*(root / DRM).glob("card*/device"), *(root / PCI).glob("*")]
    places = sorted({folder.resolve() for folder in folders})
    return [card for place in places if (card := _read(place, root)) is not None]


def _read(folder: Path, root: Path) -> Card | None:
    maker = MAKERS.get(_word(folder / "vendor"))
    kind = _word(folder / "class")
    if maker is None or (kind and not kind.startswith(CARD_CLASSES)):
        return None
    memory, device = _memory(folder), _word(folder / "device").removeprefix("0x")
    if maker == "Intel":
        integrated = folder.name.endswith(":00:02.0")  # Intel graphics: always at this address
    else:
        integrated = memory is not None and memory < CARVED
    return Card(
        maker,
        _name(folder, root, maker, device),
        (folder / "driver").resolve().name if (folder / "driver").exists() else "",
        integrated,
        memory,
        _target(folder, root) if maker == "AMD" else "",
        _link(folder),
        folder,
    )


def _memory(folder: Path) -> int | None:
    whole = _number(folder / "mem_info_vram_total")
    tiles = [_number(path) for path in folder.glob("tile*/physical_vram_size_bytes")]
    of_tiles = sum(size for size in tiles if size is not None)
    of_i915 = next((_number(path) for path in folder.glob("drm/card*/lmem_total_bytes")), None)
    return whole or of_tiles or of_i915 or None


def _name(folder: Path, root: Path, maker: str, device: str) -> str:
    """Return the card's own name, or that of its number in the list, or the number."""
    if told := _word(folder / "product_name"):
        return told if told.startswith(maker) else f"{maker} {told}"
    vendor = _word(folder / "vendor").removeprefix("0x")
    for place in NAMES:
        if (root / place).is_file():
            lines = (root / place).read_text(encoding="utf-8", errors="replace").splitlines()
            if listed := next(_listed(lines, vendor, device), ""):
                return f"{maker} {_short(listed)}"
    return f"{maker} card {vendor}:{device}"


def _listed(lines: Iterable[str], vendor: str, device: str) -> Iterator[str]:
    """Yield the name of a device in a list with lines `vendor Name`, followed by tab-indented lines
    `device Name`."""
    within = False
    for line in lines:
        if line[:1] not in ("\t", "#", ""):
            within = line.startswith(f"{vendor} ")
        elif within and line.startswith(f"\t{device} "):
            yield line.strip().partition(" ")[2].strip()


def _short(listed: str) -> str:
    """Return the name on the box of "Navi 22 [Radeon RX 6700/6700 XT]"."""
    found = re.search(r"\[(.+)\]", listed)
    return listed if found is None else found[1]


def _target(folder: Path, root: Path) -> str:
    """Return the name of an AMD card's instruction set. The kernel's compute driver lists it as a
    number (100301 is gfx1031) with the card's bus address."""
    place = re.fullmatch(r"([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])", folder.name)
    if place is None:
        return ""
    bus, slot, function = (int(part, 16) for part in place.groups()[1:])
    for path in sorted((root / KFD).glob("*/properties")):
        facts = dict(
            line.split(maxsplit=1) for line in _word(path).splitlines() if len(line.split()) == 2
        )
        version = int(facts.get("gfx_target_version", "0"))
        if version and int(facts.get("location_id", "-1")) == bus << 8 | slot << 3 | function:
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return ""


def _link(folder: Path) -> float | None:
    speed = re.match(r"[0-9.]+", _word(folder / "max_link_speed"))
    lanes = _number(folder / "max_link_width")
    rate = LANE_GB_S.get(float(speed[0])) if speed else None
    return rate * lanes if rate is not None and lanes else None


def _number(path: Path) -> int | None:
    word = _word(path)
    return int(word) if word.isdigit() else None


def _word(path: Path) -> str:
    """Return the content of a file; empty if it is missing, or its driver refuses."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
