"""Linears of the library back end. Each candidate lays out a weight and multiplies fp32 rows with
it; comparison with torch's own linear finds those that work, then a measurement of a second or two
chooses one for each shape and class of rows, which is cached."""

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.profile import (
    Entry,
    LinearChoice,
    ProfileKey,
    cpu_flags,
    load_profile,
    machine_key,
    shapes_key,
    update_profile,
)

Product = Callable[[Tensor], Tensor]  # x [T, in] -> [T, out], both fp32

LEAST_ROWS = 4  # fewer rows are padded: oneDNN is slower for 1 to 3 (7B, Zen 4: 54 ms, 40 ms)
BATCH_HINT = 16
"""Rows of a layout: 4 to 64 are alike for oneDNN, 1 is slow; MKL takes one number."""
EXACT, HALF_ROUNDED, TENSOR_ROUNDED = 1e-5, 2e-2, 5e-2
"""Largest accepted difference to torch's linear: fp32 gives 1e-6, bf16 rows 5e-3, int8 1e-2."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute linears whose weights are of the type `stored`."""

    name: str
    stored: torch.dtype  # the type of the weight that `pack` takes
    tolerance: float
    copies: int  # copies of the weight in memory: MKL needs the original, too
    pack: Callable[[Tensor, Tensor | None], Product]


def _padded(rows: Tensor, count: int) -> Tensor:
    return pad(rows, (0, 0, 0, count - rows.shape[0])) if rows.shape[0] < count else rows


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: linear(x, weight, bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)

    def product(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            _padded(x, LEAST_ROWS), packed, bias, "none", [], ""
        )
        return y[: x.shape[0]]

    return product


def _mkl(weight: Tensor, bias: Tensor | None) -> Product:
    """Packed for BATCH_HINT rows; passes with more rows use torch's own linear."""
    weight = weight.contiguous()
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, BATCH_HINT)

    def product(x: Tensor) -> Tensor:
        if x.shape[0] > BATCH_HINT:
            return linear(x, weight, bias)
        y: Tensor = torch.ops.mkl._mkl_linear(
            _padded(x, BATCH_HINT), packed, weight, bias, BATCH_HINT
        )
        return y[: x.shape[0]]

    return product


def _onednn_bf16(weight: Tensor, bias: Tensor | None) -> Product:
    product = _onednn(weight, None if bias is None else bias.bfloat16())
    return lambda x: product(x.bfloat16()).float()


def _plain_bf16(weight: Tensor, bias: Tensor | None) -> Product:
    offset = None if bias is None else bias.bfloat16()
    return lambda x: linear(x.bfloat16(), weight, offset).float()


def _fbgemm_fp16(weight: Tensor, bias: Tensor | None) -> Product:
    """Keep 16 bits, compute in fp32; torch deprecates FBGEMM without a replacement."""
    offset = torch.zeros(weight.shape[0]) if bias is None else bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())

    def product(x: Tensor) -> Tensor:
        y: Tensor = torch.fbgemm_linear_fp16_weight_fp32_activation(x.contiguous(), packed, offset)
        return y

    return product


def _int8_per_tensor(weight: Tensor, bias: Tensor | None) -> Product:
    """torch's dynamic quantisation: one scale for all rows, so rows depend on each other."""
    if platform.machine() == "x86_64" and "avx" not in cpu_flags():
        raise RuntimeError("an illegal instruction without AVX")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised: nn.Sequential = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            nn.Sequential(module), {nn.Linear}, dtype=torch.qint8
        )
    return quantised


CANDIDATES = {
    "fp32": (
        Candidate("onednn", torch.float32, EXACT, 1, _onednn),
        Candidate("mkl", torch.float32, EXACT, 2, _mkl),
        Candidate("plain", torch.float32, EXACT, 1, _plain),
    ),
    "fp16": (Candidate("fbgemm-fp16", torch.float16, EXACT, 1, _fbgemm_fp16),),
    "bf16": (
        Candidate("onednn-bf16", torch.bfloat16, HALF_ROUNDED, 1, _onednn_bf16),
        Candidate("plain-bf16", torch.bfloat16, HALF_ROUNDED, 1, _plain_bf16),
    ),
    "int8-per-tensor": (
        Candidate("torch-int8", torch.float32, TENSOR_ROUNDED, 1, _int8_per_tensor),
    ),
}
"""The candidates for weights of each type; without measurements the first is used."""


def reason_against(candidate: Candidate) -> str:
    """Return how a candidate differs from torch's linear at odd shapes; empty if it agrees."""
    generator = torch.Generator().manual_seed(1)
    for outputs, inputs in ((96, 80), (33, 17)):
        weight = torch.randn(outputs, inputs, generator=generator).to(candidate.stored)
        for bias in (None, torch.randn(outputs, generator=generator)):
            for rows in (1, LEAST_ROWS, BATCH_HINT, BATCH_HINT + 1):
                if against := _disagreement(
                    candidate, weight, bias, torch.randn(rows, inputs, generator=generator)
                ):
                    return against
    return ""


@torch.inference_mode()
def _disagreement(candidate: Candidate, weight: Tensor, bias: Tensor | None, x: Tensor) -> str:
    with warnings.catch_warnings():  # the deprecation is also reported at the call, once a process
        warnings.simplefilter("ignore")
        try:
            y = candidate.pack(weight, bias)(x)
        except (RuntimeError, AttributeError) as error:
            return f"not in this build of torch or on this CPU ({str(error).splitlines()[0][:99]})"
    expected = linear(x, weight.float(), bias)
    difference = float((y - expected).abs().max() / expected.abs().max())
    return "" if difference <= candidate.tolerance else f"differs from torch by {difference:.1e}"


class PackedLinear(nn.Module):
    """A linear whose weight exists only in its candidates' layouts, one for each class of rows."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, ways: Sequence[tuple[int, Candidate]]
    ) -> None:
        """`ways`: most rows of each class, ascending, and its candidate; the last takes all
        others."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        made: dict[str, Product] = {}
        for _, candidate in ways:
            if candidate.name not in made:
                made[candidate.name] = candidate.pack(
                    weight.detach().to(candidate.stored),
                    None if bias is None else bias.detach().float(),
                )
        self._ways = [(rows, made[candidate.name]) for rows, candidate in ways]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        product = next((p for most, p in self._ways if count <= most), self._ways[-1][1])
        return product(rows).view(*x.shape[:-1], self.out_features)


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
    """Return the choices for linears of these shapes; `weights`: a key of CANDIDATES."""
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
        # if two workers measure at the same time, the first one's choices apply: they are part of
        # the fingerprint
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
