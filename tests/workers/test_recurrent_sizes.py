"""The states of a session by a config.json alone are those of the model that is loaded of it, for
every family that has some, and are found in configurations as they are published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.planning.designs import design_of, read_config
from dovetail.launch.planning.planner import Engine, Hardware, Machine
from dovetail.protocol.calibration import STATELESS, LeastTime, StateTraffic
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.backends.sizes import TREE_ROWS, has_sizes, sizes_of, state_sizes
from dovetail.workers.models.checkpoints.architecture import RECURRENT_FAMILIES
from dovetail.workers.models.loading import load_language_model
from support.architectures import VARIED, tiny_config, write_tiny
from support.kernels import needs_kernels

EVERYDAY = ("qwen3_5_text", "lfm2_moe", "falcon_h1", "nemotron_h")


@needs_kernels
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in EVERYDAY else pytest.mark.slow)
        for kind in sorted(RECURRENT_FAMILIES)
    ],
)
def test_what_a_session_takes_is_told_by_the_configuration(kind: str, tmp_path: Path) -> None:
    """Within a byte of each layer, and within some rows of factors, which are so many about."""
    folder = tmp_path / "model"
    write_tiny(kind, folder, **VARIED[kind])
    sizes = sizes_of(read_config(folder, "model"), "fp32", "fp32")
    model = load_language_model(str(folder), weights="fp32", device="cpu", backend="kernels")
    cache = model.new_cache(16)
    assert isinstance(cache, BlockedCache)
    assert cache.states is not None
    assert sizes.layers == model.layers
    assert 0 <= sizes.row * sizes.layers - cache.row_bytes <= 2 * sizes.layers
    rows = 4 * sum(shape.row for shape in cache.states.shapes)
    assert 0 <= sizes.factors * sizes.layers - rows <= sizes.layers
    told, found = sizes.states * sizes.layers, cache.base_bytes + TREE_ROWS * rows
    assert 0 <= told - found <= 8 * rows + sizes.layers


def test_a_pass_moves_states_once_and_factors_with_every_row() -> None:
    limits = {"size": 6e9, "operations": 12e9, "bandwidth_gb_s": 50.0, "gflop_s": 1000.0}
    states = StateTraffic(states=64e6, row=1.6e6)
    plain, own = LeastTime.of(**limits), LeastTime.of(**limits, states=states)
    for rows in (1, 4, 16):
        assert own.reading_s(rows) - plain.reading_s(rows) == pytest.approx(
            (64e6 * 9 / 8 + rows * 1.6e6) / 50e9
        )
    assert own.row_s - plain.row_s == pytest.approx(7 * 16e6 / 1e12)
    rows = own.crossover
    assert own.reading_s(rows) == pytest.approx(rows * own.row_s, rel=1e-3)


def test_plans_and_limits_count_the_states_of_a_pass(tmp_path: Path) -> None:
    write_tiny("falcon_h1", tmp_path, **VARIED["falcon_h1"])
    design = design_of(read_config(tmp_path, "model"), tmp_path)
    target = design.target("fp32", "cuda:0")
    engine = Engine(bandwidth_gb_s=1.0, gflop_s=1e9)
    hardware = Hardware("a machine", engine, None, engine)
    found, without = (
        Machine.of(hardware, one, 4.0).host for one in (target, replace(target, states=STATELESS))
    )
    assert found is not None
    assert without is not None
    moved = 4 * (128 * 12 * 9 / 8 + 1 * (176 + 32 + 128 + 16))
    assert found.layer_s(1) - without.layer_s(1) == pytest.approx(moved / 1e9)
    assert design.weighed is not None
    assert design.weighed.states.states == 4 * target.states.states == 4 * 4 * 128 * 12


DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
BAMBA = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("config", "layers", "attending", "state"),
    [
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4}
            | DELTA,
            *(36, 12, 32 * 128 * 128),
        ),
        (
            {"model_type": "bamba", "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}
            | BAMBA
            | {"hidden_size": 4096},
            *(29, 3, 8192 * 128),
        ),
        (
            {"model_type": "falcon_h1", "num_hidden_layers": 24, "mamba_d_ssm": 3072}
            | BAMBA
            | {"mamba_n_heads": 48, "mamba_d_state": 256},
            *(24, 24, 3072 * 256),
        ),
        (
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M-M-M-M*-ME",
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "ssm_state_size": 128,
            },
            *(5, 1, 8192 * 128),
        ),
        ({"model_type": "lfm2", "num_hidden_layers": 6, "full_attn_idxs": [2, 5]}, 4, 2, 0),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"]}
            | BAMBA,
            *(2, 1, 4096 * 128),
        ),
    ],
)
def test_layers_with_a_state_are_found_in_published_configurations(
    config: dict[str, Any], layers: int, attending: int, state: int
) -> None:
    sizes = state_sizes({"hidden_size": 2048} | config)
    assert sizes is not None
    assert (sizes.layers, sizes.attending, sizes.state) == (layers, attending, state)


@pytest.mark.parametrize(
    "wrong", [{"mamba_n_heads": 0}, {"mamba_d_state": "many"}, {"attn_layer_indices": 3}], ids=str
)
def test_a_configuration_with_a_state_of_no_size_is_one_without_sizes(
    wrong: dict[str, Any],
) -> None:
    config = tiny_config("bamba", VARIED["bamba"]).to_dict()
    assert has_sizes(config)
    assert not has_sizes(config | wrong)
