"""Which candidate computes which linears: found by a self-test, then a short measurement for each shape and class of rows, and remembered.

The measurement takes a second or two for a whole model, whatever its size. Knows shapes; the weights themselves are packed elsewhere.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.profile import Entry, LinearChoice, ProfileKey, load_profile, machine_key, shapes_key, update_profile
from dovetail.workers.models.linear import CANDIDATES, Candidate, PackedLinear, reason_against

Shape = tuple[int, int]
"""[out, in] of a linear."""

ROW_CLASSES = (3, 64, 1 << 20)
"""The most rows of each class: one token at a time, the verification of a tree, a chunk of a prompt."""
TIMED_ROWS = (1, 16, 128)
BUDGET_S = 1.5
"""For the measurements of all shapes of a model together."""
TIMED_WEIGHTS = 1 << 24
"""Of a larger matrix so many weights are timed, 64 MiB of fp32, beyond the caches of nearly all CPUs."""
WORTH_A_COPY = 0.9
"""A second layout of the same weights must take at most this share of the first one's time for a class of rows."""
LARGEST_COPIED = 1 << 18
"""Only smaller matrices get a second layout: there a call's own overhead decides, 5 us plain and 19 us packed for 256 x 256 and one row (Zen 4)."""


@dataclass(frozen=True)
class Selection:
    """What was chosen for every shape of a model."""

    choices: tuple[LinearChoice, ...]
    candidates: Mapping[str, Candidate]

    @property
    def name(self) -> str:
        """The chosen candidates and a digest of where each is used, since each rounds in its own way."""
        chosen = sorted({choice.chosen for choice in self.choices})
        key = shapes_key([(choice.n, choice.k) for choice in self.choices], *((c.n, c.k, c.rows, c.chosen) for c in self.choices))
        return "+".join(chosen) if len(chosen) <= 1 else f"{'+'.join(chosen)}-{key[:8]}"

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """The linear of a weight [out, in] as chosen for its shape."""
        ways = [(c.rows, self.candidates[c.chosen]) for c in self.choices if (c.n, c.k) == tuple(weight.shape)]
        return PackedLinear(weight, bias, sorted(ways, key=lambda way: way[0]))


def select(shapes: Sequence[Shape], *, weights: str, profile: Path | None) -> Selection:
    """What to compute linears of these shapes (as often as they occur) with; `weights`: a key of CANDIDATES. Remembered in `profile`, if there is one."""
    refused = {candidate.name: reason for candidate in CANDIDATES[weights] if (reason := reason_against(candidate))}
    usable = {candidate.name: candidate for candidate in CANDIDATES[weights] if candidate.name not in refused}
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise CheckpointError(f"this build of torch has no linears for {weights} weights on this CPU ({reasons}); use weights fp32")
    key = profile_key(shapes, weights=weights)
    known = load_profile(profile).find(key) if profile is not None else Entry(key=key)
    wanted = sorted(set(shapes))
    if not all(_is_usable(known.choice(*shape, rows), usable) for shape in wanted for rows in ROW_CLASSES):
        copies = 2 if _fits_twice(shapes) else 1
        found = [choice for shape in wanted for choice in _measure(shape, usable, refused, copies, BUDGET_S / len(wanted))]
        known = known.with_linears(found) if profile is None else update_profile(profile, key, lambda entry: entry.with_linears(found))
    return Selection(tuple(c for shape in wanted for rows in ROW_CLASSES if (c := known.choice(*shape, rows))), usable)


def profile_key(shapes: Sequence[Shape], *, weights: str) -> ProfileKey:
    """Where a measurement of these linears holds."""
    software = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return ProfileKey(machine=machine_key(), software=software, weights=weights, threads=torch.get_num_threads(), shapes=shapes_key(list(shapes)))


def _is_usable(choice: LinearChoice | None, usable: Mapping[str, Candidate]) -> bool:
    return choice is not None and choice.chosen in usable


def _fits_twice(shapes: Sequence[Shape]) -> bool:
    """Whether the free memory holds all weights in fp32 twice over."""
    free: int = psutil.virtual_memory().available
    return free > 2.2 * sum(4 * n * k for n, k in shapes)


def _measure(shape: Shape, usable: Mapping[str, Candidate], refused: Mapping[str, str], copies: int, budget_s: float) -> list[LinearChoice]:
    """Time every candidate with a matrix of this shape and choose for each class of rows."""
    affordable = {name: candidate for name, candidate in usable.items() if candidate.copies <= copies}
    seconds = {name: _time(candidate, shape, budget_s / len(affordable)) for name, candidate in affordable.items()}
    best = min(seconds, key=lambda name: sum(t / min(others) for t, others in zip(seconds[name], zip(*seconds.values(), strict=True), strict=True)))
    chosen = []
    for index, rows in enumerate(ROW_CLASSES):
        fastest = min(seconds, key=lambda name: seconds[name][index])
        second_layout = shape[0] * shape[1] <= LARGEST_COPIED and seconds[fastest][index] < WORTH_A_COPY * seconds[best][index]
        times = {name: of[index] for name, of in seconds.items()}
        against = {**refused, **{name: "does not fit into memory" for name in usable if name not in affordable}}
        chosen.append(LinearChoice(n=shape[0], k=shape[1], rows=rows, chosen=fastest if second_layout else best, seconds=times, refused=against))
    return chosen


@torch.inference_mode()
def _time(candidate: Candidate, shape: Shape, budget_s: float) -> list[float]:
    """The least seconds of a product with each of TIMED_ROWS, scaled to the whole matrix where only a part of it is timed."""
    deadline = time.perf_counter() + budget_s
    inputs = shape[1]
    outputs = max(1, min(shape[0], TIMED_WEIGHTS // inputs))
    generator = torch.Generator().manual_seed(1)
    product = candidate.pack((torch.randn(outputs, inputs, generator=generator) / 16).to(candidate.stored), None)
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
