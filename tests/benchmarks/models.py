"""The models that are measured: random Llama checkpoints in the shapes of real ones, and the tree
that is verified."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dovetail.protocol.tree import TokenTree
from support.models import write_tokenizer

VOCABULARY = 512
"""Small, so that the head costs next to nothing: llama.cpp's own benchmark computes it for one row,
a verification for all."""
CONTEXT = 4096
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; `layers` is how many of them are built, enough for the matrices to be
    far larger than the caches of a processor."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int


SHAPES = {
    "7b": Shape(hidden=4096, intermediate=11008, heads=32, kv_heads=32, layers=3),
    "1b": Shape(hidden=2048, intermediate=8192, heads=32, kv_heads=8, layers=4),
    "small": Shape(hidden=512, intermediate=1408, heads=8, kv_heads=4, layers=4),
}
"""Llama-2-7B, Llama-3.2-1B, and one for a try of seconds."""


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


@contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """Yield the folder that models are written to: the one given, kept for the next run, or one
    that goes with this run."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
    else:
        with TemporaryDirectory(prefix="dovetail-benchmark-") as folder:
            yield Path(folder)


def draw_tree(nodes: int, *, seed: int = 0) -> TokenTree:
    """A tree that branches as drafts do: each node hangs on one of the last few, so that it is a
    few levels deep for 16 nodes."""
    chance = random.Random(seed)
    parents = tuple(chance.randrange(max(-1, node - 5), node) for node in range(nodes))
    return TokenTree(tokens=tuple(token_row(nodes)), parents=parents)


def tree_mask(tree: TokenTree) -> torch.Tensor:
    """bool [N + 1, N + 1]: the root's row, then each node's, sees the root, the node's ancestors
    and itself."""
    mask = torch.zeros(len(tree) + 1, len(tree) + 1, dtype=torch.bool)
    mask[0, 0] = True
    for node, parent in enumerate(tree.parents):
        mask[node + 1] = mask[parent + 1]
        mask[node + 1, node + 1] = True
    return mask


def token_row(count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the tokens of a text, the same for every engine."""
    return [(7 * i + 3) % vocabulary for i in range(count)]
