"""The states of a session by a config.json alone are those of the model that is loaded of it, for
every family that has some, and are found in configurations as they are published."""

from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.planning.designs import read_config
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.backends.sizes import TREE_ROWS, has_sizes, sizes_of
from dovetail.workers.models.checkpoints.architecture import RECURRENT_FAMILIES
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.recurrent.sizes import state_sizes
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
    told, found = sizes.states * sizes.layers, cache.base_bytes + TREE_ROWS * rows
    assert 0 <= told - found <= 8 * rows + sizes.layers


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
    "wrong",
    [{"mamba_n_heads": 0}, {"mamba_d_state": "many"}, {"attn_layer_indices": 3}],
    ids=str,
)
def test_a_configuration_with_a_state_of_no_size_is_one_without_sizes(
    wrong: dict[str, Any],
) -> None:
    config = tiny_config("bamba", VARIED["bamba"]).to_dict()
    assert has_sizes(config)
    assert not has_sizes(config | wrong)
