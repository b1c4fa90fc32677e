"""The sizes of models by their config.json alone are those of the models that transformers builds
of it, for every family that is described."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.launch.planning.designs import design_of, read_config
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.families.registry import FAMILIES
from support.architectures import tiny_config

NEARLY = (0.98, 1.07)
"""What is counted of a tiny model beside its matrices: norms, biases, what fills a cache line."""
HEADS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "global_head_dim": 24,
}
FIELDS = {
    "gemma4_text": {**HEADS, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": HEADS,
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
}
EVERYDAY = ("apertus", "gpt_bigcode", "gpt_neox", "gemma4_unified_text", "gpt_oss", "qwen3_moe")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in EVERYDAY else pytest.mark.slow)
        for kind in sorted(FAMILIES)
    ],
)
def test_the_weights_of_a_described_family_are_counted(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind, FIELDS.get(kind, {}))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = (p for p in decoder_layers(model)[1].parameters() if p.ndim > 1)
    true = sum(p.numel() for p in matrices) + model.get_output_embeddings().weight.numel()
    design = design_of(read_config(tmp_path, "target model"), tmp_path)
    assert NEARLY[0] < design.parameters / true < NEARLY[1]
    mixture = design.mixture
    assert (design.active < design.parameters) == (mixture.count > mixture.chosen)
