"""The sizes of models by their config.json alone are those of the models that transformers builds
of it, for every family that is described."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dovetail.launch.planning.designs import design_of, read_config
from dovetail.workers.models.checkpoints.composite import KINDS, VOCABULARIES
from dovetail.workers.models.checkpoints.configured import decoder_layers, full_config
from dovetail.workers.models.checkpoints.loader import random_skeleton
from dovetail.workers.models.families.registry import FAMILIES
from support.architectures import VARIED, shrunk, tiny_config
from support.cases import everyday

NEARLY = (0.98, 1.07)
"""The bounds of the count over the true one: a tiny model has norms, biases and filled cache lines
beside its matrices."""
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 88, "qk_nope_head_dim": 24, "v_head_dim": 40}
WIDER = {"minicpm3": LATENT, "youtu": LATENT}
"""Sizes for models that are so small else that what is missing to whole vectors shows."""
EVERYDAY = (
    *("apertus", "gpt_bigcode", "gpt_neox", "gemma4_text small", "gpt_oss", "phi4_multimodal"),
    *("dbrx", "opt", "qwen3_moe"),
)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in EVERYDAY else pytest.mark.slow)
        for kind in (*sorted(FAMILIES), "gemma4_text small")
    ],
)
def test_the_weights_of_a_described_family_are_counted(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind.split()[0], VARIED.get(kind, {}) | WIDER.get(kind, {}))
    config.save_pretrained(tmp_path)
    true = count(config.to_dict())
    design = design_of(read_config(tmp_path, "target model"), tmp_path)
    assert NEARLY[0] < design.parameters / true < NEARLY[1]
    mixture = design.mixture
    assert (design.active < design.parameters) == (mixture.count > mixture.chosen)


@pytest.mark.parametrize("kind", everyday(sorted(FAMILIES), "phi4_multimodal"))
def test_what_a_described_family_has_beside_its_layers_is_what_a_text_goes_through(
    kind: str, tmp_path: Path
) -> None:
    config = tiny_config(kind, {})
    config.save_pretrained(tmp_path)
    served = random_skeleton(tmp_path, layers=None, stored=torch.float16).model
    within = set(decoder_layers(served)[1].modules())
    model, passed = AutoModelForCausalLM.from_config(config).eval(), set[str]()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: passed.add(name))
    with torch.inference_mode():
        model(torch.zeros((1, 2), dtype=torch.long), use_cache=False)
    weighed = {
        name
        for name, module in served.named_modules()
        if module not in within and any(True for _ in module.parameters(recurse=False))
    }
    assert weighed <= passed


@pytest.mark.parametrize("kind", everyday(KINDS, "gemma3"))
def test_of_several_parts_the_language_model_alone_is_counted(kind: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind](**shrunk(CONFIG_MAPPING[kind]().to_dict()))
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    config.save_pretrained(tmp_path / "whole")
    config.text_config.save_pretrained(tmp_path / "alone")
    whole, alone = (
        design_of(read_config(tmp_path / name, "target model"), tmp_path / name).sizes("half")
        for name in ("whole", "alone")
    )
    assert whole == alone


SPARSE: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        }
    },
    "lfm2": {
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_hidden_layers": 16,
        "vocab_size": 65536,
    },
    "qwen2": {
        "vocab_size": 9,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 4,
    },
}
"""Configurations as they are published, which leave the rest to transformers."""


@pytest.mark.parametrize("kind", SPARSE)
def test_what_a_configuration_leaves_to_transformers_is_counted(kind: str, tmp_path: Path) -> None:
    content = {"model_type": kind, **SPARSE[kind]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    design = design_of(read_config(tmp_path, "target model"), tmp_path)
    assert NEARLY[0] < design.parameters / count(full_config(tmp_path / "config.json")) < NEARLY[1]


def count(fields: Mapping[str, Any]) -> int:
    """The numbers of the matrices that are multiplied with, of the model that transformers builds
    of all fields of a configuration."""
    config = CONFIG_MAPPING[fields["model_type"]].from_dict({**fields})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = [p for p in model.named_parameters() if p[1].ndim > 1 and "embed" not in p[0]]
    head = model.get_output_embeddings().weight
    return sum(p.numel() for _, p in matrices if p is not head) + int(head.numel())


def test_a_vocabulary_that_is_left_out_is_the_one_that_transformers_takes() -> None:
    for kind, known in VOCABULARIES.items():
        assert CONFIG_MAPPING[kind]().vocab_size == known


@pytest.mark.parametrize(
    ("kind", "uncoded"),
    [
        ("gemma4_text", "inputs of their own"),
        ("cohere2", ""),
        ("youtu", "attention over latents"),
        ("qwen3_5_text", "states"),
        ("mixtral", "experts"),
        ("qwen3", ""),
    ],
)
def test_a_plan_knows_which_layers_are_not_in_fixed_shapes_on_a_gpu(
    kind: str, uncoded: str, tmp_path: Path
) -> None:
    tiny_config(kind, {}).save_pretrained(tmp_path)
    design = design_of(read_config(tmp_path, "target model"), tmp_path)
    assert design.uncoded == uncoded
