"""The placement of layers: a function of sizes alone, within its limits, and of the sizes that the
loader really makes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import MemorySettings, SplitSettings, TargetSettings, cache_of
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels.layer_plan import CODES, LANES
from dovetail.workers.models.backends.blob import gather
from dovetail.workers.models.backends.blocked_cache import BlockedCache, cache_for
from dovetail.workers.models.backends.placement import (
    BUFFERS,
    Demand,
    Place,
    coded_bytes,
    needed_bytes,
    place_layers,
)
from dovetail.workers.models.backends.sizes import (
    Matrices,
    Sizes,
    has_sizes,
    mixed,
    sizes_of,
    with_host_experts,
)
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.context import LONGEST
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import host_footprint
from dovetail.workers.models.checkpoints.loader import expert_shapes, linear_shapes, open_skeleton
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.spread import spread_of
from support.architectures import VARIED, write_tiny
from support.cases import everyday
from support.kernels import needs_kernels
from support.models import FAMILIES

SIZES = Sizes(
    layers=8,
    layer=100,
    matrix=40,
    head=50,
    embedding=60,
    row=1,
    context=10,
    state=0,
    inner=0,
    groups=1,
    logits=0,
)
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "float16",
}


def test_without_limits_everything_is_resident() -> None:
    assert place_layers(SIZES, Demand("cuda:0")).places == (Place.RESIDENT,) * 8


def test_the_last_layers_are_split_off() -> None:
    placement = place_layers(SIZES, Demand("cuda:0", computed=3))
    assert placement.places == (Place.CPU,) * 5 + (Place.RESIDENT,) * 3
    assert placement.first == 5
    assert str(placement) == "cpu 0-4, cuda:0 5-7 (3 resident) and head"


def test_resident_layers_stand_evenly_between_streamed_ones() -> None:
    placement = place_layers(SIZES, Demand("cuda:0", resident=2))
    assert [index for index, place in enumerate(placement.places) if place is Place.RESIDENT] == [
        3,
        7,
    ]
    assert (placement.resident, placement.streamed, placement.buffers) == (2, 6, BUFFERS)


@pytest.mark.parametrize(("room", "computed"), [(489, 1), (887, 1), (888, 2), (3281, 7), (3282, 8)])
def test_a_split_takes_as_many_layers_as_there_is_room_for(room: int, computed: int) -> None:
    placement = place_layers(SIZES, Demand("cpu", streams=False, device_bytes=room))
    assert len(placement.places) - placement.first == computed == placement.resident
    assert placement.device_bytes <= room


@given(room=st.integers(2690, 4500))
def test_a_streamed_target_keeps_as_many_layers_as_there_is_room_for(room: int) -> None:
    placement = place_layers(SIZES, Demand("cpu", device_bytes=room))
    assert placement.first == 0
    assert placement.device_bytes == needed_bytes(SIZES, 8, placement.resident, "cpu") <= room
    assert placement.resident == 8 or needed_bytes(SIZES, 8, placement.resident + 1, "cpu") > room


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (Demand("cuda:0", device_bytes=300), ("cuda:0 would need", "memory.vram leaves")),
        (
            Demand("cuda:0", computed=4, resident=4, device_bytes=300),
            ("4 of 4 layers resident", "target.split.layers"),
        ),
        (Demand("cuda:0", computed=9), ("target.split.layers = 9", "the model has 8 layers")),
        (
            Demand("cuda:0", computed=3, resident=4),
            ("target.resident = 4", "cuda:0 computes 3 layers"),
        ),
        (
            Demand("cuda:0", computed=3, host_bytes=500),
            ("5 layers, the embedding and a pass", "memory.ram"),
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(
    demand: Demand, words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        place_layers(SIZES, demand)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_7b_model_has_the_sizes_that_it_is_known_for() -> None:
    half, int8 = sizes_of(LLAMA_7B, "half"), sizes_of(LLAMA_7B, "int8")
    assert half.layer == pytest.approx(202_383_360 * 2, rel=1e-3)
    assert int8.layer == pytest.approx(202_383_360, rel=3e-3)
    assert half.row == 2 * 4096 * 4
    assert half.layers * half.layer + half.head + half.embedding == pytest.approx(13.5e9, rel=0.01)


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}
LLAMA_8B = {
    **LLAMA_7B,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
HALF_AS_MANY_HEADS = {**LLAMA_7B, "num_key_value_heads": 16, "vocab_size": 4096}
"""The large target of `tests/gpu`."""


@pytest.mark.parametrize(
    "config", [QWEN_7B, LLAMA_8B, HALF_AS_MANY_HEADS], ids=["Qwen2.5-7B", "Llama-3.1-8B", "grown"]
)
def test_the_models_of_subspec_fit_into_8_gb_with_their_substitutes(
    config: Mapping[str, Any],
) -> None:
    sizes = sizes_of(config, "half", cache_of("auto", "half"))
    room = 8 * 10**9 - coded_bytes(sizes, "half", 4)
    assert place_layers(sizes, Demand("cuda:0", device_bytes=room)).device_bytes <= room


def test_a_shorter_context_leaves_more_room_to_layers() -> None:
    whole, short = (sizes_of({**LLAMA_7B, LONGEST: longest}, "half") for longest in (None, 1024))
    assert (whole.context, short.context) == (4096, 1024)
    saved = needed_bytes(whole, 32, 0) - needed_bytes(short, 32, 0)
    assert saved >= 32 * whole.row * 3072


def test_a_configuration_without_sizes_is_told_from_one_with_them() -> None:
    assert has_sizes(LLAMA_7B)
    assert has_sizes(
        {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 96,
            "vocab_size": 48,
        }
    )
    for name in LLAMA_7B.keys() - {"model_type", "dtype"}:
        assert not has_sizes({key: value for key, value in LLAMA_7B.items() if key != name})


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 0},
        {"num_hidden_layers": -1},
        {"num_attention_heads": True},
        {"num_key_value_heads": [4]},
        {"num_key_value_heads": 5},
        {"head_dim": {"a": 1}},
        {"head_dim": -4},
        {"vocab_size": 1 << 40},
        {"intermediate_size": "11008"},
    ],
    ids=str,
)
def test_a_configuration_with_numbers_that_no_model_has_is_one_without_sizes(
    wrong: dict[str, object],
) -> None:
    assert not has_sizes({**LLAMA_7B, **wrong})


@needs_kernels
@pytest.mark.parametrize(
    ("weights", "dtype"),
    everyday(
        [("fp32", torch.float32), ("half", torch.float16), ("int8", torch.float32)],
        ("int8", torch.float32),
    ),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_by_the_configuration_are_those_that_are_loaded(
    tmp_path: Path, family: str, weights: str, dtype: torch.dtype
) -> None:
    """Within a bias, which is counted whether there is one, and the norms."""
    folder = FAMILIES[family](tmp_path, dtype=dtype)
    cache = cache_of("auto", weights)
    sizes = sizes_of(json.loads((folder / "config.json").read_text()), weights, cache)
    model = load_language_model(
        str(folder), weights=weights, device="cpu", backend="kernels", cache=cache
    )
    plan = model._back_end._layers[0].plan  # type: ignore[attr-defined]
    blob, norms = gather(plan).memory.numel(), 4 * 4 * model.hidden_size
    outputs = plan.qkv.n + plan.output.n + plan.gate_up.n + plan.down.n
    assert blob + norms <= sizes.layer <= blob + norms + 4 * outputs + 4 * 64
    rows = model.new_cache(LANES)
    assert isinstance(rows, BlockedCache)
    assert sizes.row * sizes.layers == rows.row_bytes
    codes = cache_for([layer.plan for layer in model._back_end._layers], LANES, CODES)  # type: ignore[attr-defined]
    sizes_of_codes = sizes_of(json.loads((folder / "config.json").read_text()), weights, "q8")
    assert sizes_of_codes.row * sizes.layers == codes.row_bytes
    assert (sizes.layers, sizes.context) == (model.layers, model.context)


@needs_kernels
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_wide_layers_that_read_keys_of_others_are_counted(weights: str, tmp_path: Path) -> None:
    write_tiny("gemma4_text", tmp_path, **VARIED["gemma4_text small"])
    asked = Demand("cpu", computed=3)
    found: list[Sizes] = []

    def stage(config: Mapping[str, Any], weights: str, matrices: Matrices) -> Staging:
        found.append(mixed(sizes_of(config, weights), weights, matrices))
        return Staging(place_layers(found[0], asked).places, HostTransfer())

    model = load_language_model(str(tmp_path), weights=weights, device="cpu", stage=stage)
    whole = load_language_model(str(tmp_path), weights=weights, device="cpu", cache="fp32")
    (sizes,), layers = found, whole.back_end._layers  # type: ignore[attr-defined]
    blobs = [gather(layer.plan).memory.numel() for layer in layers]
    assert sum(blobs) <= sizes.layers * sizes.layer <= 1.3 * sum(blobs)
    assert max(blobs) == blobs[-1] <= sizes.layer + sizes.wider <= 1.3 * max(blobs)
    split, together = model.new_cache(LANES), whole.new_cache(LANES)
    assert split.row_bytes - together.row_bytes == sizes.lent


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


@pytest.mark.parametrize(
    "named", [{"experts_on_cpu": True}, {"parts": "mixer"}], ids=["new", "old"]
)
def test_the_settings_leave_experts_to_the_cpu(tmp_path: Path, named: dict[str, Any]) -> None:
    write_tiny("mixtral", tmp_path / "m")
    model = open_skeleton(open_checkpoint(str(tmp_path / "m"))).model
    config = read_json(tmp_path / "m" / "config.json")
    split = SplitSettings(device="cpu", **named)
    spread = spread_of(TargetSettings(split=split), MemorySettings(), open_device("cpu", 1), 1)
    assert spread is not None
    with pytest.raises(SettingsError, match="leaves experts to the CPU, and the model has none"):
        spread.stage(config, "fp32")
    matrices = Matrices(linear_shapes(model), expert_shapes(model))
    assert spread.stage(config, "fp32", matrices).host_experts
    alone = TargetSettings(split=SplitSettings(**named))
    with pytest.raises(SettingsError, match=r"target\.split\.experts_on_cpu needs a device"):
        spread_of(alone, MemorySettings(), open_device("cpu", 1), 1)
