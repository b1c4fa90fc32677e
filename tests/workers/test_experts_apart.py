"""Models with experts in stages: split, streamed, or with their experts on the CPU and the rest of
each layer on a device; the same bytes where the CPU stands for the device, the same function where
torch computes there."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import MemorySettings, SplitSettings, TargetSettings
from dovetail.workers.devices.base import Transfer
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.placement import (
    Demand,
    Place,
    needed_bytes,
    place_layers,
)
from dovetail.workers.models.backends.sizes import Matrices, mixed, sizes_of, with_host_experts
from dovetail.workers.models.backends.staged import Staged, Staging
from dovetail.workers.models.backends.stages.engines import TorchEngine
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import host_footprint
from dovetail.workers.models.checkpoints.loader import expert_shapes, linear_shapes, open_skeleton
from dovetail.workers.models.families.mixtures import FAMILIES
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.serving.spread import spread_of
from pretended.device import POSSIBLE, PretendedTransfer
from support.architectures import write_tiny
from support.cases import everyday
from support.kernels import needs_kernels

pytestmark = needs_kernels

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
C, R, S = Place.CPU, Place.RESIDENT, Place.STREAMED


@dataclass(frozen=True)
class Way:
    """One way to place four layers."""

    places: Sequence[Place]
    host_experts: bool = False


WAYS = {
    "split": Way([C, C, R, R]),
    "streamed": Way([S, S, R, S]),
    "mixer": Way([R] * 4, host_experts=True),
    "split mixer": Way([C, R, S, S], host_experts=True),
}
TYPES = {"fp32": torch.float32, "half": torch.bfloat16, "int8": torch.float32}
KINDS = (*FAMILIES, "gpt_oss")
TOLERANCE = {"fp32": 1e-4, "half": 1e-4, "int8": 5e-2}
"""The largest difference of logits that rounding may make, as a share of the largest logit."""


def load(
    folder: Path, weights: str, way: Way | None = None, transfer: Transfer | None = None
) -> LanguageModel:
    if way is None:
        return load_language_model(str(folder), weights=weights, device="cpu", backend="kernels")
    staging = Staging(way.places, transfer or HostTransfer(), host_experts=way.host_experts)
    return load_language_model(str(folder), weights=weights, device="cpu", stage=lambda *_: staging)


def decode(model: LanguageModel) -> Tensor:
    """Logits of a prompt, and of a tree behind it."""
    cache = model.new_cache(16)
    prompt = model.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(cache, 0, 10)])
    cache.keep(range(10), 10)
    paths = Paths.of(10, [[10], [10, 11], [10, 12], [10, 12, 13]])
    tree = model.forward(
        torch.tensor([30, 7, 8, 22]), torch.tensor([10, 11, 11, 12]), [Segment(cache, 10, 4, paths)]
    )
    return torch.cat([prompt, tree])


@pytest.mark.parametrize("kind", everyday(KINDS, "qwen3_moe", "llama4_text"))
def test_wherever_the_experts_are_the_bytes_are_the_same(kind: str, tmp_path: Path) -> None:
    weights = [*TYPES][[*FAMILIES, "gpt_oss"].index(kind) % 3]
    write_tiny(kind, tmp_path / "m", dtype=TYPES[weights])
    expected = decode(load(tmp_path / "m", weights))
    for name, way in WAYS.items():
        found = load(tmp_path / "m", weights, way)
        for _ in range(2):  # the second time the buffers go on where the first ended
            assert torch.equal(decode(found), expected), name


@pytest.mark.skipif(not POSSIBLE, reason="this version of torch cannot be told of a device")
@pytest.mark.parametrize("kind", everyday(KINDS, "gpt_oss"))
def test_torch_computes_the_function_of_the_kernels_experts(kind: str, tmp_path: Path) -> None:
    check_torch(kind, "streamed", tmp_path)


@pytest.mark.skipif(not POSSIBLE, reason="this version of torch cannot be told of a device")
def test_torch_computes_the_rest_of_a_layer_whose_experts_are_on_the_cpu(tmp_path: Path) -> None:
    check_torch("gpt_oss", "split mixer", tmp_path)


def check_torch(kind: str, name: str, folder: Path) -> None:
    weights = [*TYPES][[*FAMILIES, "gpt_oss"].index(kind) % 2]
    write_tiny(kind, folder / "m", dtype=TYPES[weights])
    expected = decode(load(folder / "m", weights))
    model = load(folder / "m", weights, WAYS[name], PretendedTransfer())
    assert isinstance(model.back_end, Staged)
    assert isinstance(model.back_end.engine, TorchEngine)
    difference = float((decode(model) - expected).abs().max())
    assert difference <= TOLERANCE[weights] * float(expected.abs().max())


def test_experts_on_the_cpu_take_none_of_the_devices_memory(tmp_path: Path) -> None:
    write_tiny("mixtral", tmp_path / "m")
    model = open_skeleton(open_checkpoint(str(tmp_path / "m"))).model
    matrices = Matrices(linear_shapes(model), expert_shapes(model))
    sizes = mixed(sizes_of(model.config.to_dict(), "fp32"), "fp32", matrices)
    apart = with_host_experts(sizes)
    of_experts = 4 * sum(n * k for n, k in matrices.experts) // 4
    assert of_experts <= sizes.experts <= 1.05 * of_experts < sizes.layer
    assert needed_bytes(sizes, 4, 4) - needed_bytes(apart, 4, 4) == 4 * sizes.experts
    on_host, plain = (host_footprint(one, 4, 4).weights for one in (apart, sizes))
    assert on_host - plain == 4 * sizes.experts
    room = needed_bytes(apart, 4, 4)
    placed = place_layers(
        sizes, Demand("cuda:0", device_bytes=room, streams=False, host_experts=True)
    )
    assert str(placed) == "cuda:0 0-3 (4 resident) and head, its experts on the cpu"
    assert place_layers(sizes, Demand("cuda:0", device_bytes=room, streams=False)).first > 0


def test_the_settings_leave_experts_to_the_cpu(tmp_path: Path) -> None:
    write_tiny("mixtral", tmp_path / "m")
    model = open_skeleton(open_checkpoint(str(tmp_path / "m"))).model
    config = read_json(tmp_path / "m" / "config.json")
    split = SplitSettings(device="cpu", parts="mixer")
    spread = spread_of(TargetSettings(split=split), MemorySettings(), open_device("cpu", 1), 1)
    assert spread is not None
    with pytest.raises(SettingsError, match="leaves experts to the CPU, and the model has none"):
        spread.stage(config, "fp32")
    matrices = Matrices(linear_shapes(model), expert_shapes(model))
    assert spread.stage(config, "fp32", matrices).host_experts
    alone = TargetSettings(split=SplitSettings(parts="mixer"))
    with pytest.raises(SettingsError, match=r"target\.split\.parts = 'mixer' needs a device"):
        spread_of(alone, MemorySettings(), open_device("cpu", 1), 1)
