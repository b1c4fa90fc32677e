"""Small block drafters with random weights in the layouts of the public checkpoints, and a slow
version of each, written from its format: the whole context again in every round, one dense softmax
over it and the block, in fp64."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from support.heads import write_files
from support.models import VOCABULARY

H, WIDE, HEADS, KV, DIM, TAPS, MASK, RANK = 64, 96, 4, 2, 16, (1, 2), 5, 8


@dataclass(frozen=True)
class Drafter:
    """A block drafter to write; `config` adds keys or changes them."""

    kind: str  # dflash, dspark, dflash2
    block: int = 5
    layers: int = 2
    anchor: bool = False
    sees: tuple[tuple[bool, int], ...] = ((False, 0), (False, 0))  # (causal, window) by layer
    config: dict[str, Any] = field(default_factory=dict)
    draft_vocabulary: int = VOCABULARY
    mask_row: bool = False


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
DRAFTERS = {
    "dflash-z-lab": Drafter("dflash"),
    "dflash-mixed": Drafter("dflash", sees=((True, 4), (False, 0)), config=SLIDING),
    "dflash-swa": Drafter(
        "dflash", sees=((True, 3),) * 2, config={"use_swa": True, "swa_window_size": 3}
    ),
    "dflash-two-sided": Drafter(
        "dflash",
        sees=((False, 4), (False, 0)),
        config={**SLIDING, "sliding_window_non_causal": True},
    ),
    "dflash-causal": Drafter("dflash", sees=((True, 0),) * 2, config={"is_causal": True}),
    "dflash-speculators": Drafter(
        "dflash",
        anchor=True,
        draft_vocabulary=20,
        config={"sample_from_anchor": True, "speculators_model_type": "dflash"},
    ),
    "dflash-mask-row": Drafter("dflash", mask_row=True, config={"attention_value_scale": 0.5}),
    "dspark-deepspec": Drafter("dspark", anchor=True, block=4),
    "dspark-speculators": Drafter(
        "dspark", draft_vocabulary=20, config={"speculators_model_type": "dspark"}
    ),
    "dflash2": Drafter(
        "dflash2",
        config={
            "conv_group_size": 16,
            "selector_top_k": 6,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 5.0,
            "input_embedding_scale": 1.5,
        },
    ),
}


def write_drafter(folder: Path, name: str | Drafter, *, seed: int = 0) -> Path:
    """Write model.safetensors and config.json."""
    chosen = DRAFTERS[name] if isinstance(name, str) else name
    write_files(folder, tensors_of(chosen, seed=seed), config_of(chosen))
    return folder


def tensors_of(drafter: Drafter, *, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by their public names."""
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int, gain: float = 1.5) -> Tensor:
        return torch.randn(shape, generator=random) * (gain / shape[-1] ** 0.5)

    def norm(size: int) -> Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=random)

    found = {"fc.weight": some(H, H * len(TAPS)), "hidden_norm.weight": norm(H)}
    found["norm.weight"] = norm(H)
    for i in range(drafter.layers):
        at = f"layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = norm(H)
        shapes = {
            "q_proj": (HEADS * DIM, H),
            "k_proj": (KV * DIM, H),
            "v_proj": (KV * DIM, H),
            "o_proj": (H, HEADS * DIM),
        }
        found |= {f"{at}self_attn.{name}.weight": some(*shape) for name, shape in shapes.items()}
        found |= {f"{at}self_attn.{n}_norm.weight": norm(DIM) for n in "qk"}
        found |= {f"{at}mlp.{n}_proj.weight": some(WIDE, H) for n in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = some(H, WIDE)
        for name in ("attention_conv", "mlp_conv") if drafter.kind == "dflash2" else ():
            found[f"{at}{name}.base_kernel"] = 0.5 * torch.randn(2, 2, H, generator=random)
            found[f"{at}{name}.kernel_projection.weight"] = some(2 * 2 * H // 16, H, gain=0.5)
    if drafter.draft_vocabulary < VOCABULARY:
        ids = torch.randperm(VOCABULARY, generator=random)[: drafter.draft_vocabulary].sort().values
        found["d2t"] = ids - torch.arange(len(ids))
        found["lm_head.weight"] = some(len(ids), H)
    if drafter.mask_row:
        found["mask_embedding"] = some(H)
    if drafter.kind == "dspark":
        found["markov_head.markov_w1.weight"] = some(VOCABULARY, RANK, gain=4.0)
        found["markov_head.markov_w2.weight"] = some(drafter.draft_vocabulary, RANK, gain=4.0)
        found["confidence_head.proj.weight"] = some(1, H + RANK)
        found["confidence_head.proj.bias"] = some(1)
    if drafter.kind == "dflash2":
        for side in ("predecessor", "successor"):
            found[f"candidate_selector.{side}_codebook"] = some(VOCABULARY, RANK, gain=4.0)
        found["candidate_selector.hidden_projection.weight"] = some(RANK, H)
    return found


def config_of(drafter: Drafter) -> dict[str, Any]:
    """Return config.json in z-lab's layout, or that of speculators."""
    layer = {
        "hidden_size": H,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "num_hidden_layers": drafter.layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    if "speculators_model_type" in drafter.config:
        own = {"aux_hidden_state_layer_ids": list(TAPS), "mask_token_id": MASK}
        own |= {"block_size": drafter.block, "draft_vocab_size": drafter.draft_vocabulary}
        return {"transformer_layer_config": layer, **own, **drafter.config}
    inner = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]}
    return {**layer, "block_size": drafter.block, "dflash_config": inner, **drafter.config}


@dataclass
class Oracle:
    """A drafter by the formulas."""

    drafter: Drafter
    tensors: dict[str, Tensor]
    embedding: Tensor  # float64 [V, H]
    output: Tensor  # float64 [V, H], of the target

    def get(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * self.get(f"{name}.weight")

    def block(self, log: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [D, V] and final states [D, H] of the block after `log` [n], from the
        features [n - 1, W] of the positions before the root."""
        drafter, n = self.drafter, len(log)
        context = self.norm(features.double() @ self.get("fc.weight").T, "hidden_norm")
        x = self.embedding[[log[-1], *[MASK] * (drafter.block - 1)]].clone()
        if drafter.mask_row:
            x[1:] = self.get("mask_embedding")
        x = x * drafter.config.get("input_embedding_scale", 1.0)
        positions = torch.arange(n - 1 + drafter.block).double()
        for i, (causal, window) in enumerate(drafter.sees):
            at = f"layers.{i}."
            u, conv = self._conv(self.norm(x, f"{at}input_layernorm"), f"{at}attention_conv")
            rows = torch.cat([context, u])
            q, k = (self._heads(rows, f"{at}self_attn.{s}", positions) for s in "qk")
            v = (rows @ self.get(f"{at}self_attn.v_proj.weight").T).view(len(rows), KV, DIM)
            k, v = (part.repeat_interleave(HEADS // KV, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[n - 1 :], k) / DIM**0.5
            away = positions[n - 1 :, None] - positions[None]
            hidden = (away >= window if window else away > n + drafter.block) | (
                causal & (away < 0)
            )
            scores = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", scores, v).flatten(1)
            mixed = mixed @ self.get(f"{at}self_attn.o_proj.weight").T
            x = x + conv(mixed * drafter.config.get("attention_value_scale", 1.0))
            u, conv = self._conv(self.norm(x, f"{at}post_attention_layernorm"), f"{at}mlp_conv")
            gate, up = (u @ self.get(f"{at}mlp.{s}_proj.weight").T for s in ("gate", "up"))
            x = x + conv((silu(gate) * up) @ self.get(f"{at}mlp.down_proj.weight").T)
        states = self.norm(x, "norm")[0 if drafter.anchor else 1 :]
        if "d2t" in self.tensors:
            logits = torch.full((len(states), VOCABULARY), float("-inf")).double()
            ids = self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))
            logits[:, ids] = states @ self.get("lm_head.weight").T
        else:
            logits = states @ self.output.T
        logits = logits * drafter.config.get("output_multiplier", 1.0)
        if cap := drafter.config.get("final_logit_softcapping"):
            logits = (logits / cap).tanh() * cap
        return logits, states

    def _heads(self, rows: Tensor, name: str, positions: Tensor) -> Tensor:
        x = (rows @ self.get(f"{name}_proj.weight").T).view(len(rows), -1, DIM)
        x = self.norm(x, f"{name}_norm")
        angles = positions[:, None] * 1e4 ** (-torch.arange(0, DIM, 2).double() / DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _conv(self, u: Tensor, name: str) -> tuple[Tensor, Any]:
        if self.drafter.kind != "dflash2":
            return u, lambda y: y
        dyn = (u @ self.get(f"{name}.kernel_projection.weight").T).view(len(u), 2, 2, -1)
        kernel = self.get(f"{name}.base_kernel") + dyn.repeat_interleave(16, -1)

        def side(which: int, y: Tensor) -> Tensor:
            before = torch.cat([torch.zeros_like(y[:1]), y[:-1]])
            return kernel[:, which, 0] * y + kernel[:, which, 1] * before

        return side(0, u), lambda y: side(1, y)

    def pairs(self, previous: int, state: Tensor) -> Tensor:
        """Return what the token `previous` adds to the logits [V] of a state [H]."""
        found = torch.zeros(VOCABULARY).double()
        if self.drafter.kind == "dspark":
            before = self.get("markov_head.markov_w1.weight")[previous]
            bias = self.get("markov_head.markov_w2.weight") @ before
            ids = torch.arange(len(bias)) + self.tensors.get("d2t", 0)
            return found.index_add(0, ids, bias)
        if self.drafter.kind == "dflash2":
            before = self.get("candidate_selector.predecessor_codebook")[previous]
            weighed = before * (self.get("candidate_selector.hidden_projection.weight") @ state)
            return self.get("candidate_selector.successor_codebook") @ weighed
        return found

    @property
    def candidates(self) -> int:
        """The likeliest tokens of a position that may follow another."""
        most: int = self.drafter.config.get("selector_top_k", VOCABULARY)
        return most
