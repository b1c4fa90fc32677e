"""Configurations of GGUF models with experts and attention only. The choice of experts is mostly in
llama.cpp's code; keys that transformers' model does not support are refused."""

from math import prod

from dovetail.workers.models.checkpoints.gguf.architectures.dense import (
    FULL,
    SLIDING,
    Configuration,
    everywhere,
    expert_counts,
    granite,
    has_bias,
    pattern,
    qwen3vl,
    rotation,
    with_rms,
)
from dovetail.workers.models.checkpoints.gguf.facts import HEADS, KV_HEADS, Facts

SOFTMAX, SIGMOID = 1, 2  # functions that make scores of a router's logits, by llama.cpp's numbers
NOTHING = 0
SCORED = frozenset(("bailingmoe2", "dots1", "exaone-moe", "lfm2moe", "minimax-m2"))
"""Architectures whose files must name the gating function."""
GLM_FLASH = ((47, 154880), (48, 154880))  # layers and tokens of GLM-4.7-Flash
LLAMA4_CHUNK = 8192  # positions of a chunk, and those after which queries grow (llama.cpp's)


def experts_of(facts: Facts, score: int = SOFTMAX) -> Configuration:
    """Return the expert settings that all of these have; `score`: the function for scores."""
    default = None if facts.architecture in SCORED else score
    if (said := facts.whole("expert_gating_func", default)) != score and (default is None or said):
        raise facts.refusal(f"its experts are chosen by gating function {said}")
    width = facts.whole("expert_feed_forward_length", 0)
    counts = expert_counts(facts)
    return {
        "hidden_act": "silu",
        "num_experts": counts.pop("num_local_experts"),
        **counts,
        **({"moe_intermediate_size": width} if width else {}),
    }


def routing_of(facts: Facts) -> Configuration:
    """Return how chosen experts are weighted, and from which groups they are chosen; 0 means 1."""
    groups, experts = facts.whole("expert_group_count", 1) or 1, facts.whole("expert_count")
    used = facts.whole("expert_group_used_count", 1) or int(groups == 1)
    if experts % groups or not 0 < used <= groups < max(2, experts):
        raise facts.refusal(f"a token uses {used} of {groups} groups of its {experts} experts")
    return {
        "n_group": groups,
        "topk_group": used,
        "routed_scaling_factor": facts.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": facts.truth("expert_weights_norm", False),
    }


SHARED = ".ffn_up_shexp.weight"  # suffix of the name of a shared expert's up projection


def shared_width(facts: Facts) -> int:
    """Return the width of the shared expert."""
    name = next((name for name in facts.tensors if name.endswith(SHARED)), f"blk.0{SHARED}")
    return facts.whole("expert_shared_feed_forward_length", facts.need(name).shape[0])


def qwen3moe(facts: Facts) -> Configuration:
    return {
        **with_rms(facts),
        **experts_of(facts),
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def qwen2moe(facts: Facts) -> Configuration:
    """Experts next to a shared one; the weights of the chosen ones are not normalised."""
    return {
        **with_rms(facts),
        **experts_of(facts),
        "model_type": "qwen2_moe",
        "qkv_bias": has_bias(facts, "attn_q"),
        "moe_intermediate_size": facts.whole(
            "expert_feed_forward_length", facts.whole("feed_forward_length")
        ),
        "shared_expert_intermediate_size": shared_width(facts),
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def mellum(facts: Facts) -> Configuration:
    """Layers with a window have their own base of angles, without scaling."""
    found = qwen3moe(facts)
    full, window = found["rope_parameters"], facts.whole("attention.sliding_window", 0)
    base = facts.positive("rope.freq_base_swa", full["rope_theta"])
    return {
        **found,
        "model_type": "mellum",
        "sliding_window": window or None,
        "layer_types": pattern(facts, 4) if window else [FULL] * facts.layers,
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": base}},
    }


def afmoe(facts: Facts) -> Configuration:
    """Three of four layers have a window, and only these are rotated; the first are dense."""
    return {
        **_sigmoids(facts),
        "model_type": "afmoe",
        "mup_enabled": True,
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": pattern(facts, 4),
        "num_shared_experts": facts.whole("expert_shared_count"),
        "num_dense_layers": facts.whole("leading_dense_block_count", 0),
        "route_scale": facts.real("expert_weights_scale", 1.0) or 1.0,
    }


def _sigmoids(facts: Facts) -> Configuration:
    """Experts chosen by sigmoids, whose weights transformers always normalises."""
    if not facts.truth("expert_weights_norm", False):
        raise facts.refusal("its experts' weights are not normalised (expert_weights_norm)")
    return {**with_rms(facts), **experts_of(facts, SIGMOID)}


def hy_v3(facts: Facts) -> Configuration:
    """Experts next to a shared one in layers with a router; the others are dense."""
    found = _sigmoids(facts)
    facts.whole("leading_dense_block_count", 0)  # llama.cpp ignores it, too
    routers = [f"blk.{at}.ffn_gate_inp.weight" in facts.tensors for at in range(facts.layers)]
    return {
        **found,
        "model_type": "hy_v3",
        "num_shared_experts": shared_width(facts) // max(1, found.get("moe_intermediate_size", 1)),
        "mlp_layer_types": ["sparse" if one else "dense" for one in routers],
        "router_scaling_factor": facts.real("expert_weights_scale", 1.0) or 1.0,
    }


def gpt_oss(facts: Facts) -> Configuration:
    """Layers alternate between window and full attention; the ramp of its yarn is not rounded."""
    found = with_rms(facts)
    found["rope_parameters"]["truncate"] = False
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "attention_bias": True,
        "intermediate_size": facts.whole("expert_feed_forward_length"),
        **expert_counts(facts),
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": [FULL if index % 2 else SLIDING for index in layers],
        "swiglu_limit": 7.0,
    }


def olmoe(facts: Facts) -> Configuration:
    return {
        **with_rms(facts),
        **experts_of(facts),
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "pad_token_id": None,
    }


def granitemoe(facts: Facts) -> Configuration:
    """Granite's factors; all rows share an MLP next to the experts, if it has a width."""
    found = {**granite(facts), **experts_of(facts)}
    width = facts.whole("expert_shared_feed_forward_length", 0)
    return {
        **found,
        "model_type": "granitemoeshared" if width else "granitemoe",
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_local_experts": found.pop("num_experts"),
        **({"shared_intermediate_size": width} if width else {}),
    }


def glm4moe(facts: Facts) -> Configuration:
    """The first layers are dense, others have a shared expert; the choice has a correction bias,
    with groups if any."""
    found = {**with_rms(facts), **experts_of(facts, SIGMOID)}
    return {
        **found,
        "model_type": "glm4_moe",
        "n_routed_experts": found.pop("num_experts"),
        "attention_bias": has_bias(facts, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors,
        "n_shared_experts": facts.whole("expert_shared_count"),
        "first_k_dense_replace": facts.whole("leading_dense_block_count", 0),
        **routing_of(facts),
        "num_nextn_predict_layers": 0,
    }


def dots1(facts: Facts) -> Configuration:
    """GLM-4.5's experts, behind attention that norms queries and keys of each head."""
    return {**glm4moe(facts), "model_type": "dots1", "sliding_window": None}


def bailingmoe2(facts: Facts) -> Configuration:
    """GLM-4.5 with head norms; Ling rotates half of a head, Sarvam all of it."""
    facts.whole("expert_shared_feed_forward_length", 0)  # transformers has a product for it
    return glm4moe(facts)


def exaone_moe(facts: Facts) -> Configuration:
    """GLM-4.5's experts; three of four layers have a window, and only these are rotated."""
    found = glm4moe(facts)
    shared_width(facts)  # transformers computes it from the number of experts
    return {
        **found,
        "model_type": "exaone_moe",
        "num_experts": found["n_routed_experts"],
        "num_shared_experts": found["n_shared_experts"],
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": pattern(facts, 4),
    }


def deepseek2(facts: Facts) -> Configuration:
    """Attention over latents. Corrected sigmoid experts are DeepSeek-V3's (and GLM-4.7-Flash's),
    softmax ones DeepSeek-V2's; without the key the latter, but for GLM-4.7-Flash, known by its
    sizes."""
    first = facts.whole("leading_dense_block_count", 0)
    if first >= facts.layers and not facts.whole("expert_count", 0):
        return _youtu(facts)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in facts.tensors)
    sizes = facts.layers, facts.need("token_embd.weight").shape[0]
    default = SIGMOID if sizes in GLM_FLASH else SOFTMAX
    score = facts.whole("expert_gating_func", NOTHING) or default
    if score not in (SOFTMAX, SIGMOID) or corrected != (score == SIGMOID):
        said = "with" if corrected else "without"
        raise facts.refusal(f"its experts are chosen by gating function {score} {said} corrections")
    found = {**latents_of(facts), **experts_of(facts, score)}
    found |= {
        "model_type": "deepseek_v3",
        "n_routed_experts": found.pop("num_experts"),
        "intermediate_size": facts.whole("feed_forward_length"),
        "n_shared_experts": facts.whole("expert_shared_count"),
        "first_k_dense_replace": first,
        **routing_of(facts),
        "num_nextn_predict_layers": 0,
    }
    if score == SIGMOID:
        return found
    if found["norm_topk_prob"]:
        raise facts.refusal("its experts' shares are normalised, unlike DeepSeek-V2's")
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return {**found, "model_type": "deepseek_v2", "topk_method": method}


def _youtu(facts: Facts) -> Configuration:
    """Layers of DeepSeek-V3 without experts; files have values for them all the same."""
    for key in ("expert_used_count", "expert_shared_count", "expert_feed_forward_length"):
        facts.whole(key, 0)
    return {
        **latents_of(facts),
        "model_type": "youtu",
        "hidden_act": "silu",
        "intermediate_size": facts.whole("feed_forward_length"),
    }


def latents_of(facts: Facts, width: int | None = None) -> Configuration:
    """Return the sizes of attention over latents, rotated in pairs of neighbours. Older files give
    heads' widths under the keys that others use for latents."""
    heads, rotated = facts.whole(HEADS), facts.whole("rope.dimension_count")
    rank = facts.whole("attention.kv_lora_rank")
    keys, values = (
        facts.whole("attention.key_length"),
        facts.whole("attention.value_length", width),
    )
    if "attention.key_length_mla" in facts:
        keys = facts.whole("attention.key_length_mla")
        values = facts.whole("attention.value_length_mla")
    if not facts.is_list(KV_HEADS):  # 0 for layers without latents
        facts.whole(KV_HEADS, heads)  # latents have one head
    if min(heads, rotated, keys - rotated, values) < 1:
        raise facts.refusal(f"it has {heads} heads of {keys}, of which {rotated} are rotated")
    rope = rotation(facts, rotated)
    if rope["rope_type"] == "yarn":  # the file has a tenth of it, and one number for both
        magnitude = round(10 * facts.positive("rope.scaling.yarn_log_multiplier"), 6)
        rope |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    asked = any(name.endswith(".attn_q_a.weight") for name in facts.tensors)
    query_rank = facts.whole("attention.q_lora_rank", 0)
    return {
        **everywhere(facts),
        "hidden_size": facts.whole("embedding_length"),
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "q_lora_rank": query_rank if asked else None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": keys - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": values,
        "rope_interleave": True,
        "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": facts.whole("context_length"),
        "rope_parameters": rope,
    }


def ernie4_5_moe(facts: Facts) -> Configuration:
    """Experts from a layer on, in steps; neighbours are rotated together."""
    found = {**with_rms(facts), **experts_of(facts)}
    facts.whole("expert_shared_feed_forward_length", 0)  # transformers has a product for it
    return {
        **found,
        "model_type": "ernie4_5_moe",
        "use_bias": has_bias(facts, "attn_q"),
        "moe_num_experts": found.pop("num_experts"),
        "moe_k": found.pop("num_experts_per_tok"),
        "moe_num_shared_experts": facts.whole("expert_shared_count", 0),
        "moe_layer_start_index": facts.whole("leading_dense_block_count", 0),
        "moe_layer_end_index": found["num_hidden_layers"] - 1,
        "moe_layer_interval": facts.whole("interleave_moe_layer_step"),
    }


def minimax_m2(facts: Facts) -> Configuration:
    """All layers have experts; their selection uses a correction bias."""
    found = {**with_rms(facts), **experts_of(facts, SIGMOID), "model_type": "minimax_m2"}
    return {
        **found,
        "intermediate_size": facts.whole("expert_feed_forward_length"),
        "num_local_experts": found.pop("num_experts"),
    }


def qwen3vlmoe(facts: Facts) -> Configuration:
    """The language model only, as for `qwen3vl`."""
    qwen3vl(facts)
    return qwen3moe(facts)


def hunyuan_moe(facts: Facts) -> Configuration:
    """All layers have experts and a shared one of the same width."""
    found = {**with_rms(facts), **experts_of(facts)}
    width = facts.whole("expert_feed_forward_length")
    shared = facts.whole("expert_shared_count", 1)
    if shared != 1 or shared_width(facts) != width:
        raise facts.refusal(f"its {shared} shared experts differ in width from the others")
    return {
        **found,
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": width,
        "moe_topk": found.pop("num_experts_per_tok"),
        "attention_bias": has_bias(facts, "attn_q"),
    }


def llama4(facts: Facts) -> Configuration:
    """Three of four layers see chunks; others have unrotated, growing queries. No head norms with
    128 experts."""
    found = {**with_rms(facts), **experts_of(facts, SIGMOID)}
    experts, layers = found.pop("num_experts"), range(found["num_hidden_layers"])
    if "attention.sliding_window" in facts:
        raise facts.refusal("it has a window, but Llama 4 has chunks of 8192")
    step = facts.whole("interleave_moe_layer_step")
    return {
        **found,
        "model_type": "llama4_text",
        "num_local_experts": experts,
        "intermediate_size": facts.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.whole("feed_forward_length"),
        "interleave_moe_layer_step": step,
        "moe_layers": [at for at in layers if step and (at + 1) % step == 0],
        "attention_chunk_size": LLAMA4_CHUNK,
        "layer_types": ["chunked_attention" if (at + 1) % 4 else FULL for at in layers],
        "no_rope_layers": [int((at + 1) % 4 > 0) for at in layers],
        "attn_temperature_tuning": True,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "use_qk_norm": experts != 128,
    }


def minicpm3(facts: Facts) -> Configuration:
    """Attention over latents without experts; its factors are constants of llama.cpp."""
    width = prod(facts.need("blk.0.attn_output.weight").shape[1:]) // max(1, facts.whole(HEADS))
    return {
        **latents_of(facts, width),
        "model_type": "minicpm3",
        "hidden_act": "silu",
        "intermediate_size": facts.whole("feed_forward_length"),
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
