"""A model over memory nodes: the same bytes for any number of shards, and each page of a matrix
where the threads are that read it. Here shards share the node and the cores that there are;
tests/qemu has nodes of their own."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix, shards
from dovetail.workers.kernels.blocks import BlockMatrix, Part
from dovetail.workers.kernels.coded import CodedMatrix
from dovetail.workers.kernels.experts import stacked_matrices
from dovetail.workers.kernels.shards import Shard
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from support.architectures import VARIED, VOCABULARY, write_tiny
from support.gguf_files import coded
from support.kernels import needs_kernels, spread_over

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_as_before")]

COUNTS = (1, 2, 4, 8)
INPUTS = 512
STORED = {Kind.FP16: torch.float16, Kind.BF16: torch.bfloat16}


def draw(n: int, k: int = INPUTS) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n))


def plain(kind: Kind) -> PackedMatrix:
    matrix = PackedMatrix(kind, 500, INPUTS, bias=draw(500, 1)[:, 0].contiguous())
    matrix.pack(draw(500).to(STORED.get(kind, torch.float32)))
    return matrix


def of_codes(bits: int) -> PackedMatrix:
    generator = torch.Generator().manual_seed(bits)
    matrix = CodedMatrix(bits, 300, INPUTS)
    codes = torch.randint(0, 1 << bits, (300, INPUTS), dtype=torch.uint8, generator=generator)
    scales = torch.rand(300, matrix.groups, generator=generator).half()
    matrix.pack_codes(codes, scales, -scales)
    return matrix


def of_blocks(how: Kind) -> PackedMatrix:
    """Parts of two types of blocks, and one of plain numbers between them."""
    parts = [Part(Type.Q4_K, 100), Part(Type.F16, 120), Part(Type.Q6_K, 90)]
    matrix = BlockMatrix(how, parts, INPUTS)
    for index, part in enumerate(parts):
        if part.type == Type.F16:
            matrix.pack_part(index, draw(part.count).half())
            continue
        seeds = np.random.default_rng(index)
        numbers = seeds.standard_normal((part.count, INPUTS), np.float32)
        matrix.pack_part(index, coded(numbers, Type(part.type), seeds)[0].reshape(part.count, -1))
    return matrix


MATRICES: dict[str, Callable[[], PackedMatrix]] = {
    **{kind.name: lambda kind=kind: plain(kind) for kind in Kind if kind <= Kind.INT8},
    **{f"codes of {bits}": lambda bits=bits: of_codes(bits) for bits in (8, 4, 3, 2)},
    **{kind.name: lambda kind=kind: of_blocks(kind) for kind in (Kind.BLOCKS, Kind.EXACT_BLOCKS)},
}


@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
def test_a_product_has_the_same_bytes_over_any_number_of_shards(
    make: Callable[[], PackedMatrix],
) -> None:
    whole, x = make(), draw(130)
    expected = whole.linear(x)
    for count in COUNTS:
        for threads in (count, 3):
            with spread_over(count, threads):
                matrix = make()
                assert bytes(matrix.memory) == bytes(whole.memory), count
                for rows in (1, 17, 130):
                    assert torch.equal(matrix.linear(x[:rows]), expected[:rows]), (count, rows)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("qwen3_moe", "int8"),
        ("deepseek_v3", "fp32"),
        ("falcon_h1", "fp32"),
        *(
            pytest.param(kind, weights, marks=pytest.mark.slow)
            for kind, weights in (
                *(("qwen3_moe", weights) for weights in ("fp32", "half", "int4")),
                ("gemma4_text", "half"),
                ("qwen3_5_moe_text", "int8"),
            )
        ),
    ],
)
def test_a_model_gives_the_same_bytes_over_any_number_of_shards(
    kind: str, weights: str, tmp_path: Path
) -> None:
    """Experts, latents, mixers with a state, and layers whose heads differ; a prompt, a session
    that grows, and a tree."""
    dtype = torch.float16 if weights == "half" else torch.float32
    write_tiny(kind, tmp_path, dtype=dtype, **VARIED[kind])
    with spread_over(4):
        model = load_language_model(str(tmp_path), weights=weights, device="cpu", backend="kernels")
    expected = in_pieces(model)
    for count in COUNTS[1:]:
        with spread_over(count):
            assert all(map(torch.equal, in_pieces(model), expected)), count


def in_pieces(model: LanguageModel) -> list[Tensor]:
    """The logits of a text, the last rows of which are a tree, in a cache that grows."""
    text = torch.randint(3, VOCABULARY, (90,), generator=torch.Generator().manual_seed(3))
    cache, found = model.new_cache(8), []
    for start, stop in ((0, 8), (8, 9), (9, 70)):
        cache.resize(stop)
        found.append(
            model.forward(
                text[start:stop], torch.arange(start, stop), [Segment(cache, start, stop - start)]
            )
        )
        cache.keep(range(start, stop), stop - start)
    cache.resize(90)
    paths = Paths.of(70, [[*range(70 + row % 2, 70 + row, 2), 70 + row] for row in range(20)])
    positions = torch.tensor([70 + row // 2 for row in range(20)])
    return [*found, model.forward(text[70:], positions, [Segment(cache, 70, 20, paths)])]


def test_pages_are_looked_for_where_they_should_lie() -> None:
    """Node 0 is that of all memory here, and where the kernel has it, all pages lie on it."""
    if not Path("/sys/devices/system/node/node1").exists():
        with spread_over(2, node=0):
            PackedMatrix(Kind.FP32, 2000, 3000)
            stacked_matrices(Kind.INT8, 8, 96, 64)
            placed = shards.placed()
        assert placed.home == placed.looked
        assert placed.looked or placed.refused


def test_a_page_is_written_by_the_shard_that_has_most_of_it() -> None:
    """Memory of shards is theirs, to the page: nothing of it is left untouched."""
    with spread_over(3):
        matrix = PackedMatrix(Kind.FP32, 4800, 300)
        resident = resident_pages(matrix.struct.packed, matrix.nbytes)
    assert all(resident)


def resident_pages(start: int, size: int) -> list[bool]:
    """Return, for each page of some memory, whether it is resident: bit 63 of its entry in
    /proc/self/pagemap."""
    page = os.sysconf("SC_PAGE_SIZE")
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(start // page * 8)
        entries = file.read(-(-size // page) * 8)
    return [bool(entries[at + 7] & 0x80) for at in range(0, len(entries), 8)]


def test_threads_and_their_caller_are_on_the_cores_of_their_shard() -> None:
    cores = sorted(os.sched_getaffinity(0))
    before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    kernels.set_threads(4)
    shards.set_shards([Shard(cores[:1]), Shard(cores[-1:])])
    try:
        shards.settle()
        ours = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
        matrix = plain(Kind.FP32)
        matrix.linear(draw(3))
        found = sorted(sorted(os.sched_getaffinity(thread)) for thread in ours)
        assert found == sorted([cores[:1], cores[-1:], cores[-1:]])
        assert os.sched_getaffinity(0) == {cores[0]}
    finally:
        shards.set_shards(())
    assert os.sched_getaffinity(0) == set(cores)


def test_cores_that_are_not_there_are_refused_and_nothing_changes() -> None:
    with pytest.raises(UserError, match="Invalid argument"):
        shards.set_shards([Shard((0,)), Shard((1023,))])
    with pytest.raises(UserError, match="17 shards are not possible"):
        shards.set_shards([Shard((0,))] * 17)
    assert shards.count() == 1
