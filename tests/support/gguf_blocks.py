"""Block drafters written as GGUF files, with the names and keys of llama.cpp."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from support.block_heads import MASK, Drafter, config_of, tensors_of
from support.gguf_files import _add

NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": "selector_hidden",
}


def write_gguf_drafter(file: Path, drafter: Drafter, **more: Any) -> Path:
    """Write a file; `more`: keys to add or replace; None removes one."""
    config, own = config_of(drafter), drafter.config
    facts = {
        "block_count": drafter.layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_sections": [config["head_dim"] // 2, 0, 0, 0],
        "target_layers": [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]],
        "block_size": drafter.block,
        "attention.causal": own.get("is_causal", False),
        "attention.sliding_window": own.get("sliding_window"),
        "attention.sliding_window_pattern": [bool(window) for _, window in drafter.sees],
        "attention.value_scale": own.get("attention_value_scale"),
        "embedding_scale": own.get("input_embedding_scale"),
    }
    if drafter.kind == "dspark":
        facts |= {"sample_from_anchor": drafter.anchor, "has_confidence_head": True}
    if drafter.kind == "dflash2":
        facts |= {"conv_kernel_size": 2, "selector_rank": 8}
        facts |= {key: own[key] for key in ("conv_group_size", "selector_top_k")}
        facts |= {"logit_scale": own["output_multiplier"]}
        facts |= {"final_logit_softcapping": own["final_logit_softcapping"]}
    writer = gguf.GGUFWriter(file, "dflash")
    for key, value in (facts | more).items():
        if value is not None:
            _add(writer, f"dflash.{key}", value)
    _add(writer, "tokenizer.ggml.mask_token_id", MASK)
    for name, tensor in tensors_of(drafter).items():
        block, stem = "", name.removesuffix(".weight").removesuffix(".bias")
        if stem.startswith("layers."):
            _, index, stem = stem.split(".", 2)
            block = f"blk.{index}."
        end = name[len(name.removesuffix(".weight").removesuffix(".bias")) :]
        if name == "d2t":
            writer.add_tensor("d2t", (tensor + torch.arange(len(tensor))).numpy())
        else:
            writer.add_tensor(f"{block}{NAMES[stem]}{end}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
