"""Chooses between our functions and torch's on a device. Ours are used if they are proved there
(the bytes of the CPU kernels, for any number of rows) and take no longer than torch's for 1, 4 and
16 rows together. Both are first tested in another process (`trying.py`); timings are cached with
the compiled functions, and every start repeats the proof."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial

import torch
from torch import Tensor

from dovetail.workers import kernels
from dovetail.workers.devices.base import Capture, Device, Program
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.devices.nvidia import compiled
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.coded import Coded
from dovetail.workers.models.backends.blob import Lying, Matrix, unpack
from dovetail.workers.models.backends.device.own import SOURCE, OwnMatrix, own_matrix
from dovetail.workers.models.backends.device.products import (
    Product,
    narrowed,
    product,
    rounded_product,
)
from dovetail.workers.models.backends.device.trying import tried

SHAPE = (83, 333)  # [out, in] of the proof: two panels, one narrow, and not a multiple of any step
ROWS = (1, 3, 4, 5, 17, 33, 70)  # rows of the proof: every function, full and partly filled
TIMED_SHAPE = (4096, 4096)
TIMED_ROWS = (1, 4, 16)
TIMED_BYTES = 128 << 20  # weights that are read in turn, so that none is cached
TIMES = 3
STORED = {Kind.FP16: torch.float16, Kind.BF16: torch.bfloat16, Kind.INT8: torch.float32}
"""The type of a packed matrix."""
SMALL = 0x3B  # a lower byte: the upper half of a number is that of a small number


class Function(IntEnum):
    """Our functions other than products; the numbers differ from those of `Kind` and `Coded`."""

    ATTENTION = 100
    PARTS = 101
    ROUNDED_FP16 = 102
    ROUNDED_BF16 = 103
    BLOCKS = 104
    EXACT_BLOCKS = 105

    @property
    def rounds(self) -> bool:
        """Return whether this is a product only for drafts, which may round inputs."""
        return self in (Function.ROUNDED_FP16, Function.ROUNDED_BF16)


@dataclass(frozen=True)
class Contest:
    """A computation for comparing our functions with torch's on a device."""

    kind: IntEnum
    does: str  # its description in a sentence
    source: str  # the functions of ours, in CUDA C++
    against: Callable[[Program, torch.device], str]  # the error of ours; empty: it is right
    pairs: Callable[[Program, torch.device], Iterator[tuple[Product, Callable[[], Product]]]]
    """Yields matrices of `TIMED_SHAPE`, each with our product and a function that makes torch's."""
    torchs: bool = True  # False: torch cannot compute it, so there is no speed to compare with

    @property
    def name(self) -> str:
        return self.kind.name.lower()


class Products:
    """The products of one device; ours if they have been chosen."""

    def __init__(
        self,
        device: torch.device,
        functions: Callable[[str], Program | str],
        trial: Callable[[str, str], bytes | str] = tried,
    ) -> None:
        """`functions` compiles a source for the device, or returns why not; `trial`:
        `trying.tried`."""
        self.device, self.functions, self._trial = device, cache(functions), trial
        self._chosen: dict[IntEnum, bool] = {}
        self.said: dict[IntEnum, str] = {}  # kind of matrix -> the product in use, and why
        self.told: set[IntEnum] = set()  # the kinds that a worker has reported

    def owner(self, contest: Contest) -> Program | None:
        """Return our functions if they are chosen, which the first call decides; else None."""
        if contest.kind not in self._chosen:
            chosen, why = self._choose(contest)
            self._chosen[contest.kind] = chosen
            whose = "dovetail's own" if chosen else "torch's" if contest.torchs else "no"
            self.said[contest.kind] = f"{self.device}: {whose} {contest.does}: {why}"
        program = self.functions(contest.source)
        return program if self._chosen[contest.kind] and not isinstance(program, str) else None

    def lay_out(self, lying: Lying, memory: Tensor, *, rounded: bool = False) -> Matrix | OwnMatrix:
        """Return a matrix of a blob on the device: as it is for our product, else laid out for
        torch, which frees `memory`. `rounded`: torch may round inputs to the weights' type."""
        contest = (ROUNDED if rounded else {}).get(lying.kind, CONTESTS.get(lying.kind))
        program = None if contest is None else self.owner(contest)
        return unpack(lying, memory) if program is None else own_matrix(program, lying, memory)

    @property
    def mark(self) -> str:
        """Return our functions' part of a fingerprint: their bytes differ from torch's."""
        chosen = [kind for kind, own in self._chosen.items() if own]
        chosen = [kind for kind in chosen if not isinstance(kind, Coded)]  # drafts' alone
        chosen = [kind for kind in chosen if not (isinstance(kind, Function) and kind.rounds)]
        ours = sorted(kind.name.lower() for kind in chosen)
        return f"+own-{'-'.join(ours)}" if ours else ""

    def _choose(self, contest: Contest) -> tuple[bool, str]:
        program = self.functions(contest.source)
        if isinstance(program, str):
            return False, program
        if program.timed:
            chosen, said = self._faster(program, contest)
            if not chosen:
                return False, said
        else:
            said = "it is proved, and times are meaningless here"
        try:
            if wrong := contest.against(program, self.device):
                return False, f"dovetail's own is not proved here: {wrong}"
        except RuntimeError as error:  # an error of torch or the driver: torch's products are used
            return False, f"dovetail's own cannot be proved here: {first_line(error)}"
        return True, said

    def _faster(self, program: Program, contest: Contest) -> tuple[bool, str]:
        """Return whether ours takes no longer than torch's, and both times or why they are
        unknown."""
        name, rows = f"{program.key}-{contest.name}.json", ", ".join(map(str, TIMED_ROWS))
        if (known := compiled.find(name)) is None:
            found = self._trial(str(self.device), contest.name)
            if isinstance(found, str):
                return False, f"dovetail's own is not proved here: {found}"
            compiled.keep(name, found)
            known = found
        ours, torchs = json.loads(known)
        if isinstance(torchs, str):
            return True, f"{said_in_ms(ours)} ms for {rows} rows, torch cannot do it ({torchs})"
        said = f"{said_in_ms(ours)} ms for {rows} rows, torch's {said_in_ms(torchs)}"
        return sum(ours) <= sum(torchs), said


@cache
def products_on(device: torch.device) -> Products:
    """Return the products of a device of this process."""
    return Products(device, partial(kind_of(device).program, device))


def choice_on(device: torch.device) -> Products | None:
    """Return the products of a device; None: torch's, on a CPU or without kernels for a proof."""
    return None if device.type == "cpu" or not kernels.available() else products_on(device)


def tell_products(device: torch.device, name: str) -> None:
    """Report on stderr, once each, which products a worker uses on a device, and why."""
    products = products_on(device)
    new, missing = products.said.keys() - products.told, products.functions(SOURCE)
    if isinstance(missing, str):
        lines = [] if products.told else [f"{device}: torch computes everything: {missing}"]
    else:
        lines = [products.said[kind] for kind in new]
    for line in lines:
        print(f"{name}: {line}", file=sys.stderr)
    products.told |= new


def measured(
    program: Program, device: Device, contest: Contest
) -> tuple[Sequence[float], Sequence[float] | str]:
    """Return seconds of ours and torch's for each of `TIMED_ROWS`; a sentence if torch refuses.
    Raises `torch.OutOfMemoryError`."""
    pairs = list(contest.pairs(program, device.torch_device))
    ours = [product_seconds([own for own, _ in pairs], rows, device) for rows in TIMED_ROWS]
    try:
        theirs = [make() for _, make in pairs]
        torchs = [product_seconds(theirs, rows, device) for rows in TIMED_ROWS]
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return ours, first_line(error)
    return ours, torchs


def product_seconds(
    products: Sequence[Product], rows: int, device: Device, width: int | None = None
) -> float:
    """Return the least mean seconds of a product of `rows` rows over some matrices of
    `TIMED_SHAPE`."""
    inputs = TIMED_SHAPE[1] if width is None else width
    x, best = torch.ones(rows, inputs, device=device.torch_device), math.inf
    clock = device.kind.clock
    run = launched_at_once(products, x, device.capture)
    for turn in range(TIMES + 1):
        start = clock()
        run()[0, 0].item()
        if turn:  # in the first one libraries choose their kernels
            best = min(best, (clock() - start) / len(products))
    return best


def launched_at_once(
    products: Sequence[Product], x: Tensor, capture: Capture | None
) -> Callable[[], Tensor]:
    """Return a function that multiplies x by each matrix, captured if possible to save launches."""

    def run() -> Tensor:
        return [multiply(x) for multiply in products][-1]

    return run if capture is None else capture(run)


def said_in_ms(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * one:.3g}" for one in seconds)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ---- 16 bits, int8


def against_matrix(kind: Kind, program: Program, device: torch.device) -> str:
    """Describe where our product differs from the kernels'; empty if the bytes are the same."""
    generator = torch.Generator().manual_seed(1)
    matrix = PackedMatrix(kind, *SHAPE, bias=torch.randn(SHAPE[0], generator=generator))
    matrix.pack(torch.randn(SHAPE, generator=generator).to(STORED[kind]))
    memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes].to(device)
    own = own_matrix(program, Lying(kind, *SHAPE, 0, matrix.nbytes, True), memory)
    return against_kernels(own, matrix, device) or against_kernels(
        replace(own, wide=not own.wide), matrix, device
    )


def against_kernels(own: Product, matrix: PackedMatrix, device: torch.device) -> str:
    """Return for how many rows a product differs from the kernels' bytes; empty if none."""
    x = torch.randn(max(ROWS), matrix.k, generator=torch.Generator().manual_seed(2))
    x[1] = 0.0
    for rows in ROWS:
        expected = matrix.linear(x[:rows].contiguous())
        found = own(x[:rows].to(device)).cpu()
        if not torch.equal(found, expected):
            apart = float((found - expected).abs().max() / expected.abs().max())
            return f"{rows} rows differ from the C++ kernels' by {apart:.1e}"
    return ""


def _pairs(
    kind: Kind, program: Program, device: torch.device, *, rounded: bool = False
) -> Iterator[tuple[Product, Callable[[], Product]]]:
    size = PackedMatrix(kind, *TIMED_SHAPE).nbytes
    for _ in range(-(-TIMED_BYTES // size)):
        memory = torch.randint(0, SMALL, (size,), dtype=torch.uint8, device=device)
        lying = Lying(kind, *TIMED_SHAPE, 0, size, False)

        def torchs(lying: Lying = lying, memory: Tensor = memory) -> Product:
            matrix = unpack(lying, memory)
            if rounded:
                return lambda x: rounded_product(matrix, x, narrowed)
            return lambda x: product(matrix, x)

        yield own_matrix(program, lying, memory), torchs


CONTESTS: Mapping[IntEnum, Contest] = {
    kind: Contest(
        kind,
        f"product multiplies {kind.name.lower()} weights",
        SOURCE,
        partial(against_matrix, kind),
        partial(_pairs, kind),
    )
    for kind in STORED
}
"""The types of weights for which we have a product; fp32 is torch's."""

ROUNDED: Mapping[IntEnum, Contest] = {
    kind: Contest(
        function,
        f"product multiplies a draft's {kind.name.lower()} weights",
        SOURCE,
        partial(against_matrix, kind),
        partial(_pairs, kind, rounded=True),
    )
    for kind, function in ((Kind.FP16, Function.ROUNDED_FP16), (Kind.BF16, Function.ROUNDED_BF16))
}
"""The types of 16 bits again, for drafts: torch's products may round their inputs."""
