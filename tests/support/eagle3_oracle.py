"""EAGLE-3 from its format alone: the whole sequence in fp64 for every token, without a cache."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def eagle3(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Tensor, taps: Tensor, new: int
) -> tuple[Tensor, Tensor]:
    """Return the logits [new, Vd] and tokens [new] of a greedy chain that goes on from tokens [T]
    and the target's streams [T, taps H]. `weights`: all, by plain names."""
    w, heads = {name: tensor.double() for name, tensor in weights.items()}, config["heads"]
    offsets = weights.get("d2t", torch.zeros(len(weights["lm_head.weight"]), dtype=torch.int64))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["eps"]).rsqrt() * w[f"{name}.weight"]

    def attend(x: Tensor, at: str) -> Tensor:
        q, k, v = (x @ w[f"{at}{n}_proj.weight"].T for n in "qkv")
        size, count = q.shape[1] // heads, len(x)
        q, k, v = (part.view(count, -1, size).transpose(0, 1) for part in (q, k, v))
        if f"{at}q_norm.weight" in w:
            q, k = norm(q, f"{at}q_norm"), norm(k, f"{at}k_norm")
        angles = config.get("theta", 1e4) ** (-torch.arange(0, size, 2).double() / size)
        turn = torch.polar(torch.ones(1).double(), torch.arange(count)[:, None] * angles)
        q, k = (torch.complex(*part.chunk(2, -1)) * turn for part in (q, k))
        k, v = (part.repeat_interleave(heads // len(part), 0) for part in (k, v))
        scores = (q @ k.mH).real / size**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return mixed.transpose(0, 1).flatten(1) @ w[f"{at}o_proj.weight"].T

    def mlp(x: Tensor, layer: str) -> Tensor:
        x = norm(x, f"{layer}post_attention_layernorm")
        gate, up = (x @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return (silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T

    taps, found = taps.double(), list[Tensor]()
    if config.get("fc_norm"):
        parts = enumerate(taps.chunk(config["taps"], -1))
        taps = torch.cat([norm(part, f"fc_norm.{i}") for i, part in parts], -1)
    states = (norm(taps, "input_norm") if config.get("norm_before_fc") else taps) @ w["fc.weight"].T
    for _ in range(new):
        e, g = w["embed_tokens.weight"][tokens], norm(states, "layers.0.hidden_norm")
        x = torch.cat([norm(e, "layers.0.input_layernorm"), g], -1)
        x = attend(x, "layers.0.self_attn.") + (g if config["norm_before_residual"] else states)
        x = x + mlp(x, "layers.0.")
        for layer in (f"layers.{i}." for i in range(1, config.get("layers", 1))):
            x = x + attend(norm(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
            x = x + mlp(x, layer)
        final = norm(x, "norm")
        found.append(final[-1] @ w["lm_head.weight"].T)
        best = found[-1].argmax()
        tokens = torch.cat([tokens, (best + offsets[best])[None]])
        states = torch.cat([states, (final if config.get("norm_output") else x)[-1:]])
    return torch.stack(found), tokens[-new:]
