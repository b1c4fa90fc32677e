"""Our products over the blocks of GGUF files on a GPU, computed by the CPU statement by statement,
compiled for every GPU that they are for, and in whole models on the pretended one."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.kernels import Kind
from dovetail.workers.kernels.blocks import Part
from dovetail.workers.models.backends.blob import Lying
from dovetail.workers.models.backends.device.choice import Products, against_kernels, products_on
from dovetail.workers.models.backends.device.own_blocks import (
    CONTESTS,
    FORMATS,
    against_blocks,
    blocks_on,
    own_blocks,
    random_blocks,
)
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import ResidentDraft, Staging
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.view import view_of
from dovetail.workers.models.loading import load_language_model
from pretended.device import PretendedTransfer, device
from support.architectures import write_tiny
from support.cases import everyday
from support.cuda_compilers import ARCHITECTURES, NVRTC, needs_a_compiler, needs_nvrtc
from support.decoded import decode
from support.emulated import UNITS, Emulated, emulated, given_to_pretended
from support.gguf_files import BLOCKED, write_gguf
from support.kernels import needs_kernels

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
F16, Q4_K, Q6_K = 1, 12, 14
PATHS = [*((Kind.BLOCKS, units) for units in UNITS), (Kind.EXACT_BLOCKS, "vectors")]
"""Rows in int8 on every path of the functions, and in fp32 on the only one."""
ROUNDED = 0.08  # see `test_substitute.py`
FORMATS_IN = f"{own_blocks.__module__}.FORMATS"


@needs_a_compiler
@needs_kernels
@pytest.mark.parametrize("type", everyday(FORMATS, Q4_K))
@pytest.mark.parametrize(("kind", "units"), PATHS)
def test_a_row_has_the_bytes_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, type: int, kind: Kind, units: str
) -> None:
    """The threads of a block go on in either order, for one format or the other."""
    if list(FORMATS).index(type) % 2:
        monkeypatch.setenv("DT_BACKWARDS", "1")
    matrix = random_blocks([Part(type, 20)], 1280, torch.linspace(-1, 1, 20), 1, kind)
    memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)
    own = own_blocks(emulated(UNITS[units] + CONTESTS[kind].source), Lying.of(matrix), memory)
    assert against_kernels(own, matrix, CPU) == ""


@needs_a_compiler
@needs_kernels
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", CONTESTS)
def test_parts_of_several_types_are_one_matrix(biased: bool, kind: Kind) -> None:
    bias = torch.linspace(-1, 1, 90) if biased else None
    parts = [Part(Q4_K, 40), Part(F16, 17), Part(Q6_K, 33)]
    matrix = random_blocks(parts, 256, bias, 2, kind)
    memory = torch.zeros(64 + matrix.nbytes, dtype=torch.uint8)
    memory[64:] = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes]
    own = own_blocks(emulated(CONTESTS[kind].source), Lying.of(matrix, 64), memory)
    assert against_kernels(own, matrix, CPU) == ""


@needs_a_compiler
@needs_kernels
def test_a_format_that_is_wrong_on_a_device_is_not_computed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FORMATS_IN, {Q6_K: FORMATS[Q6_K]})

    class Wrong(Emulated):
        def launch(self, name: str, grid: tuple[int, int], threads: int, arguments: object) -> None:
            changed = list(arguments)  # type: ignore[call-overload]
            if name == f"blocks_{KINDS[Q6_K].name}":
                changed[7] -= 1
            super().launch(name, grid, threads, changed)

    products = Products(CPU, lambda source: Wrong(emulated(source)._library))
    matrix = random_blocks([Part(Q6_K, 16)], 256, None, 3)
    memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)
    with pytest.raises(SettingsError, match=r"cpu: no product multiplies blocks.*Q6_K.*; use"):
        blocks_on(products, CPU, Lying.of(matrix), memory)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give the pretended GPU our functions, as if they were proved; the names of those that run."""
    monkeypatch.setattr(f"{Products.__module__}.Products._choose", lambda *_: (True, "it is ours"))
    yield from given_to_pretended(monkeypatch)


MULTIPLIED = [kind for kind in BLOCKED if kind in FORMATS]


def written(folder: Path, kinds: Sequence[Type] = MULTIPLIED) -> Path:
    """Write a tiny model as a GGUF file in types of blocks, all that a GPU multiplies."""
    write_tiny("llama", folder / "model", **WIDE)
    turn = cycle(kinds)
    file = folder / "model.gguf"
    write_gguf(
        folder / "model", file, lambda _, shape: next(turn) if shape[-1] % 256 == 0 else Type.F16
    )
    return file


@needs_a_compiler
@needs_kernels
@pytest.mark.parametrize("weights", everyday(["file", "int4"], "file"))
@pytest.mark.parametrize(("activations", "off"), [("int8", 0.03), ("fp32", 1e-5)])
def test_layers_in_blocks_are_computed_on_a_device_from_the_bytes_of_the_file(
    tmp_path: Path, launches: list[str], weights: str, activations: str, off: float
) -> None:
    source = str(written(tmp_path) if weights == "file" else tmp_path / "model")
    if weights == "int4":
        write_tiny("llama", tmp_path / "model", **WIDE)
    loaded = partial(
        load_language_model, source, weights=weights, device="cpu", activations=activations
    )
    whole = loaded()
    places = [Place.CPU, Place.STREAMED, Place.RESIDENT]
    staging = Staging(places, PretendedTransfer())
    split = loaded(stage=lambda *_: staging, cache="fp32")
    launches.clear()
    expected, found = decode(whole), decode(split)
    assert float((found - expected).abs().max() / expected.abs().max()) < off
    assert {name for name in launches if name.startswith("blocks_")}
    assert ("round_32" in launches) == (activations == "int8")
    assert ("exact_blocks" in products_on(device()).mark) == (activations == "fp32")


@needs_a_compiler
@needs_kernels
@pytest.mark.usefixtures("launches")
def test_types_that_no_gpu_multiplies_are_refused_by_name(tmp_path: Path) -> None:
    source = str(written(tmp_path, [Type.Q4_K, Type.IQ3_S, Type.IQ2_XXS]))
    staging = Staging([Place.CPU, Place.CPU, Place.RESIDENT], PretendedTransfer())
    with pytest.raises(SettingsError, match=r"no product multiplies blocks of IQ\w+"):
        load_language_model(
            source, weights="file", device="cpu", stage=lambda *_: staging, cache="fp32"
        )
    assert "IQ2_XXS and IQ3_S" in against_blocks(device(), [Type.Q4_K, Type.IQ3_S, Type.IQ2_XXS])


@pytest.mark.slow
@needs_a_compiler
@needs_kernels
def test_a_draft_in_blocks_is_computed_from_them_and_its_levels_are_captured(
    tmp_path: Path, launches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    settings = DraftSettings(kind="small", model=str(view_of(file)), device="pretended")
    engine = open_draft_worker(settings, name="draft", threads=1, target="").engine
    assert isinstance(engine.model.back_end, ResidentDraft)
    assert engine.model.back_end.captures
    assert "multiplies blocks of GGUF files" in capsys.readouterr().err
    launches.clear()
    expected = decode(load_language_model(str(file), weights="stored", device="cpu"))
    found = decode(engine.model)
    assert float((found - expected).norm() / expected.norm()) < ROUNDED
    assert launches.count("round_32") > 0


@pytest.mark.slow
@needs_kernels
def test_a_draft_whose_blocks_cannot_be_multiplied_becomes_fp16_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    settings = DraftSettings(kind="small", model=str(view_of(file)), device="pretended")
    engine = open_draft_worker(settings, name="draft", threads=1, target="").engine
    assert engine.model.weights == "fp16"
    assert "is converted to fp16 instead of staying in blocks: " in capsys.readouterr().err


@needs_nvrtc
@pytest.mark.parametrize("architecture", everyday(ARCHITECTURES, 61))
def test_the_functions_compile_for_every_gpu(architecture: int) -> None:
    assert not isinstance(NVRTC, str)
    for contest in CONTESTS.values():
        code = NVRTC.compile(contest.source, architecture)
        assert isinstance(code, bytes), code
        for type in FORMATS:
            assert f"blocks_{KINDS[type].name}".encode() in code
