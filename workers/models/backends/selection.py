"""Which candidate computes which linears: found by a self-test, then a measurement of a second or
two for each shape and class of rows, and cached."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.profile import (
    Entry,
    LinearChoice,
    ProfileKey,
    load_profile,
    machine_key,
    shapes_key,
    update_profile,
)
from dovetail.workers.models.backends.linear import (
    CANDIDATES,
    Candidate,
    PackedLinear,
    reason_against,
)

Shape = tuple[int, int]  # [out, in] of a linear

ROW_CLASSES = (3, 64, 1 << 20)  # most rows of each class: a token, a tree, a chunk of a prompt
TIMED_ROWS = (1, 16, 128)
BUDGET_S = 1.5  # time limit for measuring all shapes of a model together
TIMED_WEIGHTS = 1 << 24  # weights of a matrix that are timed: 64 MiB, beyond most caches
WORTH_A_COPY = 0.9  # a second layout must take at most this share of the first one's time
LARGEST_COPIED_BYTES = 64 << 20
"""Models with larger linears get no second layout; a call's overhead decides for small ones (256 x
256: 5 us plain, 19 us packed, Zen 4)."""


@dataclass(frozen=True)
class Selection:
    """The choices for every shape of a model."""

    choices: tuple[LinearChoice, ...]
    candidates: Mapping[str, Candidate]

    @property
    def name(self) -> str:
        """Return the chosen candidates and a digest of where each is used."""
        chosen = sorted({choice.chosen for choice in self.choices})
        key = shapes_key(
            [(choice.n, choice.k) for choice in self.choices],
            *((c.n, c.k, c.rows, c.chosen) for c in self.choices),
        )
        return "+".join(chosen) if len(chosen) <= 1 else f"{'+'.join(chosen)}-{key[:8]}"

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """The linear of a weight [out, in] as chosen for its shape."""
        ways = [
            (c.rows, self.candidates[c.chosen])
            for c in self.choices
            if (c.n, c.k) == tuple(weight.shape)
        ]
        return PackedLinear(weight, bias, sorted(ways, key=lambda way: way[0]))


def select(shapes: Sequence[Shape], *, weights: str, profile: Path | None) -> Selection:
    """Return what computes linears of these shapes; `weights`: a key of CANDIDATES."""
    refused = {
        candidate.name: reason
        for candidate in CANDIDATES[weights]
        if (reason := reason_against(candidate))
    }
    usable = {
        candidate.name: candidate
        for candidate in CANDIDATES[weights]
        if candidate.name not in refused
    }
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise CheckpointError(
            f"this build of torch has no linears for {weights} weights on this CPU "
            f"({reasons}); use weights fp32"
        )
    key = profile_key(shapes, weights=weights)
    known = load_profile(profile).find(key) if profile is not None else Entry(key=key)
    wanted = sorted(set(shapes))

    def complete(entry: Entry) -> bool:
        return all(
            (choice := entry.choice(*shape, rows)) is not None and choice.chosen in usable
            for shape in wanted
            for rows in ROW_CLASSES
        )

    if not complete(known):
        twice = psutil.virtual_memory().available > 2.2 * sum(4 * n * k for n, k in shapes)
        affordable = {name: c for name, c in usable.items() if c.copies == 1 or twice}
        refused |= {
            name: "the weights do not fit into memory twice"
            for name in usable
            if name not in affordable
        }
        second_layouts = sum(4 * n * k for n, k in shapes) <= LARGEST_COPIED_BYTES
        found = [
            LinearChoice(
                n=shape[0], k=shape[1], rows=rows, chosen=chosen, seconds=seconds, refused=refused
            )
            for shape in wanted
            for rows, chosen, seconds in _measure(
                shape, affordable, BUDGET_S / len(wanted), second_layouts=second_layouts
            )
        ]
        # of two workers that measure at the same time the first one's choices hold: they are part
        # of the fingerprint
        known = (
            known.with_linears(found)
            if profile is None
            else update_profile(
                profile, key, lambda entry: entry if complete(entry) else entry.with_linears(found)
            )
        )
    return Selection(
        tuple(c for shape in wanted for rows in ROW_CLASSES if (c := known.choice(*shape, rows))),
        usable,
    )


def profile_key(shapes: Sequence[Shape], *, weights: str) -> ProfileKey:
    """Return the key under which a measurement of these linears is stored."""
    software = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return ProfileKey(
        machine=machine_key(),
        software=software,
        weights=weights,
        threads=torch.get_num_threads(),
        shapes=shapes_key(list(shapes)),
    )


def _measure(
    shape: Shape, candidates: Mapping[str, Candidate], budget_s: float, *, second_layouts: bool
) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Yield for each class of rows the chosen candidate and the seconds of each."""
    seconds = {
        name: _time(candidate, shape, budget_s / len(candidates))
        for name, candidate in candidates.items()
    }
    least = [min(times) for times in zip(*seconds.values(), strict=True)]
    best = min(
        seconds, key=lambda name: sum(t / of for t, of in zip(seconds[name], least, strict=True))
    )
    for index, rows in enumerate(ROW_CLASSES):
        times = {name: of[index] for name, of in seconds.items()}
        fastest = min(times, key=times.__getitem__)
        yield (
            rows,
            fastest if second_layouts and times[fastest] < WORTH_A_COPY * times[best] else best,
            times,
        )


@torch.inference_mode()
def _time(candidate: Candidate, shape: Shape, budget_s: float) -> list[float]:
    """Return the least seconds of a product with each of TIMED_ROWS, scaled from a part."""
    deadline = time.perf_counter() + budget_s
    inputs = shape[1]
    outputs = max(1, min(shape[0], TIMED_WEIGHTS // inputs))
    generator = torch.Generator().manual_seed(1)
    product = candidate.pack(
        (torch.randn(outputs, inputs, generator=generator) / 16).to(candidate.stored), None
    )
    seconds = []
    for count in TIMED_ROWS:
        x = torch.randn(count, inputs, generator=generator)
        product(x)
        taken: list[float] = []
        while len(taken) < 2 or (len(taken) < 9 and time.perf_counter() < deadline):
            start = time.perf_counter()
            product(x)
            taken.append(time.perf_counter() - start)
        seconds.append(min(taken) * shape[0] / outputs)
    return seconds
