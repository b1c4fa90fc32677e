"""The memory and the time of a model in a GGUF file, counted and measured before it is loaded."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.calibration.devices import keys_of
from dovetail.workers.calibration.products import product_seconds
from dovetail.workers.calibration.target import open_subject
from dovetail.workers.models.checkpoints.footprint import (
    linears_bytes,
    numbers_by_type,
    read_tensors,
)
from dovetail.workers.models.checkpoints.gguf.view import view_of
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.design import calibration_key, read_design
from support.architectures import write_tiny
from support.gguf_files import BLOCKED, write_gguf
from support.kernels import needs_kernels


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path) -> Path:
    """A tiny model in all types of blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    write_tiny("llama", folder / "llama", **sizes)
    turn = cycle(BLOCKED)

    def kinds(_: str, shape: tuple[int, ...]) -> Type:
        return next(turn) if shape[-1] % 256 == 0 else Type.F16

    write_gguf(folder / "llama", folder / "model.gguf", kinds)
    return folder / "model.gguf"


@needs_kernels
def test_what_blocks_take_is_counted_before_they_are_loaded(tmp_path: Path) -> None:
    file = write(tmp_path)
    loaded = load_language_model(str(file), weights="file", device="cpu")
    back_end: Any = loaded.back_end
    matrices = [back_end._head._matrix]
    for layer in back_end._layers:
        matrices += layer.plan.matrices
    taken = sum(matrix.nbytes for matrix in matrices)
    assert linears_bytes(read_tensors(view_of(file))) == pytest.approx(taken, rel=0.01)


@needs_kernels
def test_a_measurement_of_a_file_holds_for_its_types_of_blocks_alone(tmp_path: Path) -> None:
    file = write(tmp_path)
    settings = TargetSettings(model=str(view_of(file)), weights="file")
    design = read_design(settings)
    subject = open_subject(settings, design, memory_bytes=1 << 30, profile=None)
    assert calibration_key(subject.model, subject.whole) in [*keys_of(settings)]
    exact = settings.model_copy(update={"activations": "fp32"})
    assert calibration_key(subject.model, subject.whole) not in [*keys_of(exact)]
    other = tmp_path / "other.gguf"
    write_gguf(tmp_path / "llama", other, lambda *_: Type.F16)
    moved = settings.model_copy(update={"model": str(view_of(other))})
    assert calibration_key(subject.model, subject.whole) not in [*keys_of(moved)]
    with pytest.raises(UserError, match=r"GiB of blocks of .* do not fit"):
        open_subject(settings, design, memory_bytes=1 << 10, profile=None)


@needs_kernels
def test_products_of_the_types_of_a_file_take_longer_with_more_rows(tmp_path: Path) -> None:
    file = write(tmp_path)
    numbers = numbers_by_type(view_of(file))
    assert numbers.total() == read_design(TargetSettings(model=str(view_of(file)))).weights
    assert {*numbers} <= {*BLOCKED, Type.F16}
    curve = product_seconds("file", view_of(file))
    assert curve is not None
    assert 0 < curve.at(1) < curve.at(64)
