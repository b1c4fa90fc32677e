"""P-EAGLE heads with random weights in the layout of speculators, and a slow version."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from support.heads import VARIANTS, write_head
from support.models import VOCABULARY

MASK, DIM = 5, 16


def write_parallel_head(folder: Path) -> Path:
    """Write a head for `tiny_llama`."""
    variant = replace(VARIANTS["eagle3"], taps=(0, 1, 2), config={"mask_token_id": MASK})
    file = write_head(folder, variant, gain=1.0) / "model.safetensors"
    mask = torch.randn(1, 1, 192, generator=torch.Generator().manual_seed(9))
    save_file({**load_file(file), "mask_hidden": mask}, file)
    return folder


def logits_of(folder: Path, embedding: Tensor, log: Sequence[int], given: Tensor) -> Tensor:
    """Return logits [D, V], float64, of the positions behind `log` [n], from the features [n - 1,
    W] of the positions before the root: all rows in one causal pass."""
    tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    eps, levels = json.loads((folder / "config.json").read_text())["rms_norm_eps"], 8

    def norm(x: Tensor, name: str) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * tensors[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    mask = tensors["mask_hidden"].view(1, -1).expand(levels - 1, -1)
    g = linear(torch.cat([given.double(), mask]), "fc")
    tokens = torch.tensor([*log[1:], *[MASK] * (levels - 1)])
    at, count = "midlayer.self_attn.", len(tokens)
    x = torch.cat(
        [norm(embedding[tokens], "midlayer.input_layernorm"), norm(g, "midlayer.hidden_norm")], 1
    )
    angles = torch.arange(count)[:, None] * 1e4 ** (-torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(name: str) -> Tensor:
        a, b = linear(x, f"{at}{name}_proj").view(count, -1, DIM).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    q, k, v = turned("q"), turned("k"), linear(x, f"{at}v_proj").view(count, -1, DIM)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5).masked_fill(later, float("-inf"))
    y = g + linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), f"{at}o_proj")
    u, mlp = norm(y, "midlayer.post_attention_layernorm"), "midlayer.mlp."
    y = y + linear(
        silu(linear(u, f"{mlp}gate_proj")) * linear(u, f"{mlp}up_proj"), f"{mlp}down_proj"
    )
    ids = load_file(folder / "model.safetensors")["d2t"]
    found = torch.full((levels, VOCABULARY), float("-inf")).double()
    found[:, ids + torch.arange(len(ids))] = linear(norm(y[-levels:], "norm"), "lm_head")
    return found
