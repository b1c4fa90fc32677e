"""A draft that is sure of itself and knows nothing: a small random model with the vocabulary of a
target."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPREAD = 0.25
"""The spread of the weights, a dozen times the usual one, so that logits lie far apart and the
tokens, which are as good as drawn at random, look certain."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
KEPT = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def write_adversary(folder: Path, target: Path, *, seed: int = 0) -> Path:
    """The draft for the target in a folder of its own, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = json.loads((target / "config.json").read_text(encoding="utf-8"))
    kept = {name: facts[name] for name in KEPT if facts.get(name) is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                **SHAPE,
                **kept,
                initializer_range=SPREAD,
                tie_word_embeddings=False,
                architectures=["LlamaForCausalLM"],
            )
        )
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    return folder
