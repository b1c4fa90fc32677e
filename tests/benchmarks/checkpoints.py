"""The random checkpoints that are measured, and the mask of the tree that is verified. Imports
torch and transformers, which takes seconds: what may do without imports it when it writes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.models import CONTEXT, VOCABULARY, Shape
from dovetail.protocol.tree import TokenTree
from support.models import write_tokenizer

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def configuration(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=shape.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def write_model(folder: Path, shape: Shape, dtype: torch.dtype, *, seed: int = 0) -> Path:
    """A random checkpoint in `folder`, a shard for every layer and one for the rest, with a
    tokenizer; one that is there already is taken as it is."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration(shape)
    config.dtype, config.architectures = dtype, ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).state_dict()
    files = {
        name: f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors"
        for name in parameters
    }
    for file in dict.fromkeys(files.values()):
        drawn = {
            name: _draw(parameters[name].shape, generator).to(dtype)
            for name in parameters
            if files[name] == file
        }
        save_file(drawn, folder / file, metadata={"format": "pt"})
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    return folder


def _draw(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms are ones; matrices of the usual scale, 1/sqrt(inputs), so that numbers stay ordinary
    however deep the model."""
    return (
        torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[1] ** 0.5
    )


def tree_mask(tree: TokenTree) -> torch.Tensor:
    """bool [N + 1, N + 1]: the root's row, then each node's, sees the root, the node's ancestors
    and itself."""
    mask = torch.zeros(len(tree) + 1, len(tree) + 1, dtype=torch.bool)
    mask[0, 0] = True
    for node, parent in enumerate(tree.parents):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, node + 1] = True
    return mask
