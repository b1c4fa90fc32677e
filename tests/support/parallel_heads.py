"""P-EAGLE heads with random weights in the layout of speculators, and a slow version."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from support.heads import VARIANTS, head_tensors, write_head
from support.models import VOCABULARY

MASK, DIM = 5, 16


def write_parallel_head(folder: Path) -> Path:
    """Write a head for `tiny_llama`."""
    own = {"mask_token_id": MASK, "num_hidden_layers": 2}
    variant = replace(VARIANTS["eagle3"], taps=(0, 1, 2), config=own)
    file = write_head(folder, variant, gain=1.0) / "model.safetensors"
    second = head_tensors(replace(VARIANTS["dovetail-3"], blocks=2, gain=1.0), seed=4)
    mask = torch.randn(1, 1, 192, generator=torch.Generator().manual_seed(9))
    layer = {name: tensor for name, tensor in second.items() if name.startswith("layers.1.")}
    save_file({**load_file(file), **layer, "mask_hidden": mask}, file)
    return folder


def logits_of(folder: Path, embedding: Tensor, log: Sequence[int], given: Tensor) -> Tensor:
    """Return logits [D, V], float64, of the positions after `log` [n], from the features [n - 1, W]
    of the positions before the root: all rows in one causal pass."""
    tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    eps, levels = json.loads((folder / "config.json").read_text())["rms_norm_eps"], 8

    def norm(x: Tensor, name: str) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * tensors[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    mask = tensors["mask_hidden"].view(1, -1).expand(levels - 1, -1)
    g = linear(torch.cat([given.double(), mask]), "fc")
    tokens = torch.tensor([*log[1:], *[MASK] * (levels - 1)])
    count = len(tokens)
    angles = torch.arange(count)[:, None] * 1e4 ** (-torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)

    def layer(at: str, x: Tensor, states: Tensor) -> Tensor:
        def turned(name: str) -> Tensor:
            a, b = linear(x, f"{at}self_attn.{name}_proj").view(count, -1, DIM).chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        q, k, v = turned("q"), turned("k"), linear(x, f"{at}self_attn.v_proj").view(count, -1, DIM)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5).masked_fill(later, float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        states = states + linear(mixed, f"{at}self_attn.o_proj")
        u = norm(states, f"{at}post_attention_layernorm")
        wide = silu(linear(u, f"{at}mlp.gate_proj")) * linear(u, f"{at}mlp.up_proj")
        return states + linear(wide, f"{at}mlp.down_proj")

    e = norm(embedding[tokens], "midlayer.input_layernorm")
    y = layer("midlayer.", torch.cat([e, norm(g, "midlayer.hidden_norm")], 1), g)
    y = layer("layers.1.", norm(y, "layers.1.input_layernorm"), y)
    ids = load_file(folder / "model.safetensors")["d2t"]
    found = torch.full((levels, VOCABULARY), float("-inf")).double()
    found[:, ids + torch.arange(len(ids))] = linear(norm(y[-levels:], "norm"), "lm_head")
    return found
