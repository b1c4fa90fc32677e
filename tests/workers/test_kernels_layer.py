"""The layer kernels against the slow obvious versions, and their promise: a token's bytes depend on
nothing but the tokens that it sees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix, layer
from dovetail.workers.kernels.layer import (
    DecoderLayer,
    LayerPass,
    activate,
    normalise,
    rotary_table,
)
from dovetail.workers.kernels.layer_plan import (
    CODES,
    LANES,
    Activation,
    CacheRows,
    LayerPlan,
    Norm,
    NormKind,
    new_cache,
    stored_width,
)
from dovetail.workers.models.segment import Paths
from support.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_as_before")]


# ---- fp32 arithmetic as the kernels have it, on numpy ----

Floats = np.ndarray[Any, np.dtype[np.float32]]
F = np.float32


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a b + c rounded once: the product is exact in float64, and a sum that was inexact there is
    made odd before it is rounded again."""
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.ascontiguousarray(total).view(np.int64)
    nudge = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits & 1 == 0), bits + nudge, bits).view(np.float64).astype(F)


def lane_sum(lanes: Floats) -> np.float32:
    for step in (8, 4, 2, 1):
        lanes = lanes[:step] + lanes[step : 2 * step]
    return F(lanes[0])


def in_lanes(x: Floats) -> Floats:
    """[ceil(n / 16), 16], filled up with zeros."""
    return np.pad(x, (0, -len(x) % LANES)).reshape(-1, LANES)


def exp(x: Floats) -> Floats:
    c = np.minimum(np.maximum(x, F(-87)), F(88))
    n = np.rint(c * F(1.44269504))
    r = fma(n, F(2.12194440e-4), fma(n, F(-0.693359375), c))
    p = np.full_like(r, F(1.9875691500e-4))
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = fma(p, r, F(coefficient))
    p = fma(r * r, p, r) + F(1)
    return np.where(x < F(-87), F(0), p * ((n.astype(np.int32) + 127) << 23).view(F)).astype(F)


def tanh(x: Floats) -> Floats:
    z = x * x
    p = np.full_like(x, F(-5.70498872745e-3))
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fma(p, z, F(coefficient))
    return np.where(
        np.abs(x) < F(0.625), fma(p * z, x, x), F(1) - F(2) / (exp(x + x) + F(1))
    ).astype(F)


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    squares = np.zeros(LANES, F)
    for lanes in in_lanes(x):
        squares = fma(lanes, lanes, squares)
    scale = F(1) / np.sqrt(lane_sum(squares) / F(len(x)) + F(epsilon))
    return x * scale * weight


def attention_row(
    query: Floats,
    keys: Floats,
    values: Floats,
    *,
    scale: float,
    softcap: float,
    window: int,
    sink: float | None = None,
) -> Floats:
    """One query row [head_dim] over keys and values [n, head_dim] in the order of their
    positions; `sink`: a score without a value."""
    n = len(keys)
    scores = np.zeros(n, F)
    for d in range(len(query)):
        scores = fma(query[d], keys[:, d], scores)
    scores = scores * F(scale)
    if softcap:
        scores = tanh(scores / F(softcap)) * F(softcap)
    first = max(0, n - window) if window else 0
    top = scores[first:].max() if sink is None else max(scores[first:].max(), F(sink))
    weights = np.where(np.arange(n) < first, F(0), exp(scores - top)).astype(F)
    total = np.zeros(LANES, F)
    for lanes in in_lanes(weights):
        total = total + lanes
    mixed = np.zeros(values.shape[1], F)
    for p in range(n):
        mixed = fma(weights[p], values[p], mixed)
    whole = lane_sum(total) if sink is None else lane_sum(total) + exp(np.array([F(sink) - top]))[0]
    return mixed * (F(1) / whole) + F(0)


def in_codes(x: Floats) -> tuple[Floats, Any]:
    """8-bit codes of x [..., n] and the scale of each block of 32: a 127th of its largest
    number, rounded up to the upper half of a float. Their products are what a cache of codes holds;
    a block with a number that is not finite has the scale NaN."""
    blocks = np.pad(x, [*((x.ndim - 1) * [(0, 0)]), (0, -x.shape[-1] % 32)])
    blocks = blocks.reshape(*x.shape[:-1], -1, 32)
    least = (np.abs(blocks).max(-1, keepdims=True) / F(127)).astype(F)
    scales = ((least.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(F)
    finite = np.isfinite(blocks).all(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        codes = np.rint(np.where(finite, blocks, 0) / np.where(finite & (scales > 0), scales, F(1)))
    scales = np.where(finite, scales, F("nan"))
    numbers = (codes * scales).astype(F).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return numbers, (codes.astype(np.int8), scales[..., 0])


# ---- rows by themselves ----


@pytest.mark.parametrize("width", [16, 20, 64, 100, 4096])
def test_an_rms_norm_has_the_bytes_of_its_written_order(width: int) -> None:
    x, weight = torch.randn(3, width) * 5, torch.randn(width)
    expected = np.stack([rms_norm(row, weight.numpy(), 1e-5) for row in x.numpy()])
    for isa in kernels.isas():
        kernels.use_isa(isa)
        found = normalise(NormKind.RMS, Norm(weight), x, 1e-5)
        assert found.numpy().tobytes() == expected.tobytes(), isa
    torch.testing.assert_close(
        found, nn.functional.rms_norm(x, (width,), weight, 1e-5), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("width", [16, 20, 100, 768])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_norm_is_torchs(width: int, biased: bool) -> None:
    x, weight, bias = (
        torch.randn(5, width) * 3 + 2,
        torch.randn(width),
        torch.randn(width) if biased else None,
    )
    expected = nn.functional.layer_norm(
        x.double(), (width,), weight.double(), bias.double() if bias is not None else None, 1e-5
    ).float()
    found = _on_all_isas(lambda: normalise(NormKind.LAYER_NORM, Norm(weight, bias), x, 1e-5))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [7, 64, 1500])
@pytest.mark.parametrize("activation", list(Activation))
def test_an_activation_is_torchs(activation: Activation, width: int) -> None:
    gated, numbers = activation.gated, (1.7, 0.9)
    x = torch.randn(5, width * (1 + gated)) * 6
    x[0, :7] = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e-30, 1e38, -1e38])
    gate, up = (
        (x[:, :width].double(), x[:, width:].double()) if gated else (x.double(), torch.tensor(1.0))
    )
    function = {
        Activation.SILU_GATED: lambda v: nn.functional.silu(1.7 * v),
        Activation.RELU: nn.functional.relu,
        Activation.RELU2: lambda v: nn.functional.relu(v).square(),
        Activation.RELU2_GATED: lambda v: nn.functional.relu(v).square(),
        Activation.GELU: nn.functional.gelu,
        Activation.XIELU: lambda v: (
            torch.where(v > 0, 1.7 * v * v, 0.9 * (torch.expm1(v.clamp(max=-1e-6)) - v)) + 0.5 * v
        ),
        Activation.SWIGLU_CLAMPED: lambda v: (
            v.clamp(max=0.9) * torch.sigmoid(1.7 * v.clamp(max=0.9))
        ),
    }.get(activation, lambda v: nn.functional.gelu(v, approximate="tanh"))
    if activation is Activation.SWIGLU_CLAMPED:
        up = up.clamp(-0.9, 0.9) + 1
    found = _on_all_isas(lambda: activate(activation, x, numbers))
    torch.testing.assert_close(found, (function(gate) * up).float(), rtol=2e-6, atol=1e-6)


def test_an_activation_of_what_is_not_a_number_is_not_a_number() -> None:
    assert bool(activate(Activation.SILU_GATED, torch.full((1, 32), float("nan"))).isnan().all())


def test_rotary_angles_are_those_of_float64_at_the_float_angle() -> None:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    table = rotary_table(frequencies, 5000, scaling=1.5)
    angles = (torch.arange(5000).float()[:, None] * frequencies).double()
    torch.testing.assert_close(table.cosines, (angles.cos().float() * 1.5), rtol=1.2e-7, atol=0)
    torch.testing.assert_close(table.sines, (angles.sin().float() * 1.5), rtol=1.2e-7, atol=0)


# ---- attention ----


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 0
    softcap: float = 0.0
    sink: float | None = None
    """The first head's; each other one's is 1 more than that of the head before it."""
    cache: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def make_layer(shape: Shape, **changes: Any) -> DecoderLayer:
    """A layer whose attention has this shape; its matrices are there for their shapes."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    plan = LayerPlan(
        index=1,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        qkv=PackedMatrix(Kind.FP32, shape.width, 16),
        output=PackedMatrix(Kind.FP32, 16, shape.heads * shape.head_dim),
        gate_up=PackedMatrix(Kind.FP32, 32, 16),
        down=PackedMatrix(Kind.FP32, 16, 16),
        attention_norm=Norm(torch.ones(16)),
        mlp_norm=Norm(torch.ones(16)),
        rotary=rotary_table(frequencies, 3000),
        window=shape.window,
        softcap=shape.softcap,
        scale=0.3,
        sinks=None if shape.sink is None else shape.sink + torch.arange(shape.heads).float(),
    )
    return DecoderLayer(replace(plan, **changes))


class Cache:
    """The caches of two layers, full of what nobody may look at."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        self.keys, self.values = new_cache(
            layers=2,
            kv_heads=shape.kv_heads,
            head_dim=stored_width(shape.head_dim, shape.cache),
            capacity=capacity,
            dtype=shape.cache,
        )
        for tensor in (self.keys, self.values):
            tensor.fill_(-1 if shape.cache is CODES else float("nan"))  # scales that are NaN

    def rows(
        self, start: int, paths: Sequence[Sequence[int]] | int, prefix: int | None = None
    ) -> CacheRows:
        if isinstance(paths, int):
            return CacheRows(self.keys, self.values, start, paths)
        return CacheRows(
            self.keys,
            self.values,
            start,
            len(paths),
            Paths.of(start if prefix is None else prefix, paths),
        )

    def slot(self, slot: int) -> tuple[bytes, bytes]:
        """Key and value that stand in a slot of layer 1."""
        return self.keys[1, :, slot // LANES, :, slot % LANES].numpy().tobytes(), self.values[
            1, :, slot
        ].numpy().tobytes()


def attend(
    layer: DecoderLayer, qkv: Tensor, positions: Sequence[int], *segments: CacheRows
) -> Tensor:
    """Place and attend, on a copy of qkv."""
    rows, qkv = LayerPass(torch.tensor(positions), segments), qkv.clone()
    layer.place(rows, qkv)
    return layer.attend(rows, qkv)


def in_chunks(
    layer: DecoderLayer, shape: Shape, qkv: Tensor, chunk: int, capacity: int = 2048
) -> tuple[Tensor, Cache]:
    cache = Cache(shape, capacity)
    outputs = [
        attend(
            layer, part, range(i * chunk, i * chunk + len(part)), cache.rows(i * chunk, len(part))
        )
        for i, part in enumerate(qkv.split(chunk))
    ]
    return torch.cat(outputs), cache


SHAPES = [
    Shape(),
    Shape(heads=2, kv_heads=2, head_dim=128),
    Shape(heads=8, kv_heads=1, head_dim=64),
    Shape(heads=3, kv_heads=3, head_dim=20),
    Shape(heads=4, kv_heads=2, head_dim=24, window=5),
    Shape(heads=2, kv_heads=1, head_dim=80, softcap=2.0),
    Shape(heads=2, kv_heads=1, head_dim=96, window=37, softcap=30.0),
    Shape(heads=16, kv_heads=2, head_dim=256),
]
SUNKEN = Shape(heads=4, kv_heads=2, head_dim=24, window=5, sink=-1.0)
ROUNDED = [
    Shape(cache=torch.float16),
    Shape(heads=3, kv_heads=3, head_dim=20, window=37, softcap=2.0, cache=torch.float16),
    Shape(heads=2, kv_heads=2, head_dim=256, cache=CODES),
    Shape(heads=10, kv_heads=2, head_dim=84, window=37, softcap=2.0, cache=CODES),
]
LONG = (Shape(), ROUNDED[1])  # the shapes whose trees stand behind long texts every day


@pytest.mark.parametrize("shape", [*SHAPES, SUNKEN, *ROUNDED], ids=str)
def test_attention_has_the_bytes_of_its_written_order(shape: Shape) -> None:
    layer, qkv = make_layer(shape, rotary=None), torch.randn(53, shape.width)
    query, key, value = (
        part.unflatten(1, (-1, shape.head_dim)).numpy()
        for part in qkv.split([n * shape.head_dim for n in (shape.heads, *2 * [shape.kv_heads])], 1)
    )
    if shape.cache is torch.float16:
        key, value = (part.astype(np.float16).astype(np.float32) for part in (key, value))
    if shape.cache is CODES:
        key, value = (in_codes(part)[0] for part in (key, value))
    groups = shape.heads // shape.kv_heads
    found, _ = in_chunks(layer, shape, qkv, 53)
    for row in (0, 1, 15, 16, 40, 52):
        for head in range(shape.heads):
            keys, values = key[: row + 1, head // groups], value[: row + 1, head // groups]
            expected = attention_row(
                query[row, head],
                keys,
                values,
                scale=0.3,
                softcap=shape.softcap,
                window=shape.window,
                sink=None if shape.sink is None else shape.sink + head,
            )
            assert (
                found[row].unflatten(0, (shape.heads, -1))[head].numpy().tobytes()
                == expected.tobytes()
            ), (row, head)


@pytest.mark.parametrize("shape", [*SHAPES, *ROUNDED], ids=str)
def test_a_prompt_has_the_same_bytes_in_chunks_of_any_size(shape: Shape) -> None:
    layer, qkv = make_layer(shape), torch.randn(600, shape.width)
    expected, expected_cache = in_chunks(layer, shape, qkv, 1)
    for chunk in (7, 64, 256, 512):
        found, cache = in_chunks(layer, shape, qkv, chunk)
        assert found.numpy().tobytes() == expected.numpy().tobytes(), chunk
        assert all(cache.slot(slot) == expected_cache.slot(slot) for slot in range(600))


@pytest.mark.parametrize("shape", [*SHAPES, *ROUNDED], ids=str)
def test_every_instruction_set_and_thread_count_gives_the_same_bytes(shape: Shape) -> None:
    layer, qkv = make_layer(shape), torch.randn(150, shape.width)
    expected, _ = in_chunks(layer, shape, qkv, 64)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        for threads in (1, 2, 3):
            kernels.set_threads(threads)
            assert (
                in_chunks(layer, shape, qkv, 64)[0].numpy().tobytes() == expected.numpy().tobytes()
            ), (isa, threads)


def test_a_cache_of_halves_has_the_nearest_one_and_none_that_is_infinite() -> None:
    edges = [0.0, -0.0, 2.0**-24, 2.0**-25, 2.0**-14, 65504.0, 65519.9, 65520.0, 1e30, -1e38]
    numbers = torch.arange(-(2**31), 2**31, 104729).int().view(torch.float32)
    numbers = torch.cat([torch.tensor(edges), numbers[numbers.isfinite()]])
    shape = Shape(heads=1, kv_heads=1, head_dim=64, cache=torch.float16)
    layer = make_layer(shape, rotary=None)
    qkv = torch.zeros(-(-len(numbers) // 64), shape.width)
    qkv[:, 64:128].view(-1, 64).copy_(
        torch.nn.functional.pad(numbers, (0, 64 * len(qkv) - len(numbers))).view(-1, 64)
    )
    qkv[:, 128:] = qkv[:, 64:128]
    expected = qkv[:, 64:128].clamp(-65504.0, 65504.0).half().view(torch.int16)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        cache = Cache(shape, len(qkv))
        layer.place(LayerPass(torch.zeros(len(qkv)).long(), [cache.rows(0, len(qkv))]), qkv.clone())
        keys = cache.keys[1, 0].transpose(1, 2).flatten(0, 1)[: len(qkv)]
        for found in (keys, cache.values[1, 0, : len(qkv)]):
            assert torch.equal(found.contiguous().view(torch.int16), expected), isa


def test_a_cache_of_codes_has_the_nearest_ones_and_scales_of_which_none_is_too_small() -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(64, 40, generator=generator) * 2.0 ** torch.arange(-140, 116, 4)[:, None]
    numbers[0], numbers[1, 5], numbers[2, 39], numbers[3] = 0.0, torch.inf, torch.nan, 3.4e38
    numbers[4, 1:33], numbers[5] = 0.0, -1e-45
    shape = Shape(heads=1, kv_heads=1, head_dim=40, cache=CODES)
    layer, qkv = make_layer(shape, rotary=None), torch.zeros(64, shape.width)
    qkv[:, 40:80], qkv[:, 80:] = numbers, numbers.flip(0)
    whole, (codes, scales) = in_codes(numbers.numpy())
    assert np.isnan(whole[1:3]).any(1).all()
    expected = np.concatenate(
        [
            codes.reshape(64, -1)[:, :40],
            (scales.astype(F).view(np.uint32) >> 16).astype(np.uint16).view(np.int8),
        ],
        1,
    )
    for isa in kernels.isas():
        kernels.use_isa(isa)
        cache = Cache(shape, 64)
        layer.place(LayerPass(torch.zeros(64).long(), [cache.rows(0, 64)]), qkv.clone())
        keys, values = cache.keys[1, 0].transpose(1, 2).flatten(0, 1), cache.values[1, 0].flip(0)
        for found in (keys, values):
            assert found.numpy().tobytes() == expected.tobytes(), isa


def test_attention_over_codes_is_that_of_float64_over_numbers_in_8_bits() -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=64, cache=CODES)
    layer, qkv = make_layer(shape, rotary=None), torch.randn(300, shape.width)
    found, _ = in_chunks(layer, shape, qkv, 64)
    query, key, value = (
        part.unflatten(1, (-1, 64)).transpose(0, 1).double()
        for part in qkv.split([6 * 64, 2 * 64, 2 * 64], 1)
    )

    def attention(key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.double().repeat_interleave(3, 0) for part in (key, value))
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.3
        )
        return mixed.transpose(0, 1).flatten(1)

    rounded = (torch.from_numpy(in_codes(part.float().numpy())[0]) for part in (key, value))
    torch.testing.assert_close(found.double(), attention(*rounded), rtol=1e-5, atol=1e-5)
    off = (found.double() - attention(key, value)).norm() / found.norm()
    assert 1e-3 < off < 2e-2


TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 5, 0, 9, 8, 4, 12, 14, 15, 13]  # parents; the root first


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """Root, ..., node."""
    return [*(lineage(parents, parents[node]) if parents[node] >= 0 else ()), node]


@pytest.mark.parametrize(
    ("shape", "prefix"),
    [
        pytest.param(
            shape,
            prefix,
            id=f"{prefix}-{shape}",
            marks=[pytest.mark.slow] if prefix == 515 and shape not in LONG else [],
        )
        for shape in (*SHAPES, *ROUNDED)
        for prefix in (1, 47, 515)
    ],
)
def test_a_tree_row_has_the_bytes_of_one_token_at_a_time_in_any_slot(
    shape: Shape, prefix: int
) -> None:
    layer, prompt, nodes = (
        make_layer(shape),
        torch.randn(prefix, shape.width),
        torch.randn(len(TREE), shape.width),
    )
    paths = [lineage(TREE, node) for node in range(len(TREE))]
    for order in (list(range(len(TREE))), torch.randperm(len(TREE)).tolist()):
        _, cache = in_chunks(layer, shape, prompt, 256)
        slot_of = {node: prefix + at for at, node in enumerate(order)}
        segment = cache.rows(prefix, [[slot_of[n] for n in paths[node]] for node in order])
        found = attend(
            layer, nodes[order], [prefix + len(paths[node]) - 1 for node in order], segment
        )
        for node in (0, 2, 4, 11, 16, 17):
            alone, alone_cache = in_chunks(layer, shape, torch.cat([prompt, nodes[paths[node]]]), 1)
            assert found[order.index(node)].numpy().tobytes() == alone[-1].numpy().tobytes(), node
            assert cache.slot(slot_of[node]) == alone_cache.slot(prefix + len(paths[node]) - 1)


def test_a_matrix_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"down is a matrix \(99, 16\)"):
        make_layer(Shape(), down=PackedMatrix(Kind.FP32, 99, 16))


def _on_all_isas(function: Any) -> Tensor:
    """Return what the function returns, which must be the same bytes on every instruction set."""
    results = []
    for isa in kernels.isas():
        kernels.use_isa(isa)
        results.append(function())
    assert len({result.numpy().tobytes() for result in results}) == 1
    return results[-1]


@pytest.mark.parametrize(("kv_heads", "pairs"), [(0, 8), (3, 8), (4, 9), (2, 1024)])
def test_an_attention_that_would_read_or_turn_what_is_not_there_is_refused(
    kv_heads: int, pairs: int
) -> None:
    with pytest.raises(ValueError, match="4 heads of 16"):
        DecoderLayer(
            LayerPlan(
                index=0,
                heads=4,
                kv_heads=kv_heads,
                head_dim=16,
                qkv=PackedMatrix(Kind.FP32, (4 + 2 * kv_heads) * 16, 64),
                output=PackedMatrix(Kind.FP32, 64, 64),
                gate_up=None,
                down=None,
                attention_norm=None,
                mlp_norm=None,
                rotary=rotary_table(torch.ones(pairs), 8),
            )
        )


def test_a_library_whose_layers_have_other_fields_is_refused_with_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer._functions.cache_clear()
    monkeypatch.setattr(layer, "sizeof", lambda _: 1)
    with pytest.raises(UserError, match=r"built from other sources.*kernels\.build"):
        activate(Activation.SILU_GATED, torch.ones(1, 4))
