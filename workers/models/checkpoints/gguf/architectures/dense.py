"""The configurations of GGUF files of models without experts and states, and of Mixtral, and what
those of all of llama.cpp's architectures have in common. Constants of llama.cpp's code without a
key in the file (Gemma's query scale, SmolLM 3's unrotated layers) are constants here, too."""

import math
from collections.abc import Callable, Mapping
from itertools import takewhile
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

from dovetail.workers.models.checkpoints.gguf.facts import HEADS, KV_HEADS, Facts
from dovetail.workers.models.checkpoints.gguf.files import numbers_of
from dovetail.workers.models.checkpoints.gguf.kinds import BF16, F16, F32

Configuration = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
BASE = 10000.0  # the default base of rotation: llama.cpp's, for every architecture
UNTIED = frozenset(
    (
        *("apertus", "dots1", "exaone-moe", "gpt-oss", "gptneox", "internlm2", "mellum"),
        *("minimax-m2", "nemotron", "olmo2", "olmoe", "phi2", "qwen2moe", "stablelm"),
    )
)
"""Architectures that llama.cpp does not load without output.weight; elsewhere the embedding
replaces it."""
ROTATED_IN_PART = frozenset(
    (
        *("phi3", "glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe", "minimax-m2", "chatglm"),
        *("stablelm", "phi2", "gptneox", "nemotron", "granitehybrid", "bailingmoe2", "dflash"),
    )
)
"""Architectures whose model in transformers can rotate a part of a head."""


def common(facts: Facts, kv_heads: int | None = None) -> Configuration:
    """Return what all architectures but GPT-2's have; `kv_heads`: if the file has a list."""
    sizes = sizes_of(facts)
    return {
        **sizes,
        "num_key_value_heads": facts.whole(KV_HEADS, sizes["num_attention_heads"])
        if kv_heads is None
        else kv_heads,
        "intermediate_size": facts.whole(
            "feed_forward_length"
            if "feed_forward_length" in facts
            else "expert_feed_forward_length"
        ),
        "rope_parameters": rotation(facts, sizes["head_dim"]),
    }


def sizes_of(facts: Facts) -> Configuration:
    """Return sizes that do not differ from layer to layer."""
    return {**everywhere(facts), **widths_of(facts)}


def widths_of(facts: Facts) -> Configuration:
    """Return the sizes of layers that do not differ from layer to layer."""
    hidden, heads = facts.whole("embedding_length"), facts.whole(HEADS)
    if not 0 < heads <= hidden:
        raise facts.refusal(f"it has {heads} heads in a width of {hidden}")
    head = facts.whole("attention.key_length", hidden // heads)
    if facts.whole("attention.value_length", hidden // heads) != head:
        raise facts.refusal("its values are of another width than its keys")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "head_dim": head,
        "max_position_embeddings": facts.whole("context_length"),
    }


def everywhere(facts: Facts) -> Configuration:
    """Return what all architectures have in common."""
    if facts.architecture in UNTIED:
        facts.need("output.weight")
    matrix = facts.tensors.get("blk.0.ffn_down.weight")
    kinds = {F16: "float16", BF16: "bfloat16"}
    return {
        "dtype": kinds.get(F32 if matrix is None else matrix.kind, "float32"),
        "vocab_size": facts.need("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in facts.tensors,
    }


def rotation(facts: Facts, head: int) -> Configuration:
    """Return the rotation of queries and keys: base, scaling, and factors of `rope_freqs`."""
    rotated = facts.whole("rope.dimension_count", head)
    found: Configuration = {
        "rope_type": "default",
        "rope_theta": facts.positive("rope.freq_base", BASE),
    }
    if not 0 < rotated <= head or rotated % 2:
        raise facts.refusal(f"it rotates {rotated} numbers of a head of {head}")
    if rotated != head and facts.architecture not in ROTATED_IN_PART:
        raise facts.refusal(f"it rotates {rotated} numbers of a head of {head}, not all")
    if facts.architecture in ROTATED_IN_PART:  # for some, transformers has its own share
        found["partial_rotary_factor"] = rotated / head
    factor = facts.real("rope.scaling.factor", facts.real("rope.scale_linear", 1.0) or 1.0)
    default = "linear" if factor != 1.0 else "none"
    kind = facts.text("rope.scaling.type", default)
    if kind == "none":  # Hunyuan's, whose scaling is in its base
        facts.whole("rope.scaling.original_context_length", 0)
    if kind in ("none", "longrope") and factor != 1.0:
        raise facts.refusal(f"its rotation has a scaling of kind {kind} and the factor {factor}")
    if "rope_freqs.weight" in facts.tensors:
        if kind != "none":
            raise facts.refusal(f"it has both rope_freqs and a scaling of kind {kind}")
        return {**found, **factors_of(facts, "rope_freqs.weight", "rope_freqs.weight")}
    if kind == "linear":
        return {
            **found,
            "rope_type": "linear",
            "factor": facts.positive("rope.scaling.factor", factor),
        }
    if kind == "yarn":
        return {**found, **_yarn(facts)}
    if kind not in ("none", "longrope"):
        raise facts.refusal(f"its rotation is scaled in the way {kind[:50]!r}, not known here")
    return found


def factors_of(facts: Facts, short: str, long: str, attention: float = 1.0) -> Configuration:
    """Factors of frequencies, one table for texts up to the original length and one beyond."""
    lists = [numbers_of(facts.model, facts.need(name).name) for name in (short, long)]
    same = short == long
    return {
        "rope_type": "longrope",
        "short_factor": lists[0],
        "long_factor": lists[1],
        "attention_factor": attention,
        "original_max_position_embeddings": facts.whole("context_length")
        if same
        else _original(facts),
    }


def _original(facts: Facts) -> int:
    """Return the context length before the rotation was scaled."""
    return facts.whole("rope.scaling.original_context_length", facts.whole("context_length"))


def _yarn(facts: Facts) -> Configuration:
    if facts.real("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise facts.refusal("its yarn mixes by a factor other than 1 (yarn_ext_factor)")
    found: Configuration = {
        "rope_type": "yarn",
        "factor": facts.positive("rope.scaling.factor"),
        "original_max_position_embeddings": _original(facts),
        "beta_fast": facts.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    usual = 0.1 * math.log(found["factor"]) + 1 if found["factor"] > 1 else 1.0
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        own = (1.0, usual) if "yarn" in key else (1.0,)  # llama.cpp replaces it by the usual value
        if key in facts and min(abs(facts.real(key) - factor) for factor in own) > 1e-5:
            raise facts.refusal(f"its yarn scales attention by {facts.real(key)} (key {key})")
    return found


def with_rms(facts: Facts) -> Configuration:
    """Return what architectures with RMS norms have in common."""
    return {**common(facts), "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon")}


def pattern(facts: Facts, every: int) -> list[str]:
    """Return the types of layers: all but every n-th have a window; n = 0: all."""
    key, layers = "attention.sliding_window_pattern", range(facts.layers)
    if facts.is_list(key):
        windows = facts.numbers(key)[: len(layers)]
    else:
        every = facts.whole(key, every)
        windows = [int(every == 0 or (index + 1) % every > 0) for index in layers]
    if len(windows) != len(layers):
        raise facts.refusal(f"it has window flags for {len(windows)} layers")
    return [SLIDING if window else FULL for window in windows]


def has_bias(facts: Facts, name: str) -> bool:
    """Return whether a linear of the first layer has a bias; queries may be fused with keys."""
    names = (name, "attn_qkv") if name == "attn_q" else (name,)
    return any(f"blk.0.{one}.bias" in facts.tensors for one in names)


EPSILON = "attention.layer_norm_epsilon"
ATTENTION_BIAS, MLP_BIAS = {"attention_bias": "attn_q"}, {"mlp_bias": "ffn_down"}


def plain(
    model_type: str,
    act: str = "silu",
    biases: Mapping[str, str] = MappingProxyType({}),
    *,
    epsilon: str = "",
    **more: Any,
) -> Callable[[Facts], Configuration]:
    """Return the function of an architecture with only these fields. `biases`: field -> the linear
    that may have one; `epsilon`: the field of layer norms, else it has RMS norms."""

    def make(facts: Facts) -> Configuration:
        return {
            **(common(facts) if epsilon else with_rms(facts)),
            "model_type": model_type,
            "hidden_act": act,
            **({epsilon: facts.epsilon(EPSILON)} if epsilon else {}),
            **{field: has_bias(facts, name) for field, name in biases.items()},
            **more,
        }

    return make


qwen2, qwen3 = plain("qwen2"), plain("qwen3")
_nemotron = plain("nemotron", "relu2", ATTENTION_BIAS | MLP_BIAS, epsilon="norm_eps")
_gptneox = plain("gpt_neox", "gelu", {"attention_bias": "attn_qkv"}, epsilon="layer_norm_eps")


def nemotron(facts: Facts) -> Configuration:
    facts.epsilon("attention.layer_norm_rms_epsilon", 0.0)  # files contain it twice
    return _nemotron(facts)


def gptneox(facts: Facts) -> Configuration:
    return {
        **_gptneox(facts),
        "use_parallel_residual": facts.truth("use_parallel_residual"),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    }


def llama(facts: Facts) -> Configuration:
    """Llama and Mistral; with experts, Mixtral."""
    found = plain("llama", biases=ATTENTION_BIAS | MLP_BIAS)(facts)
    if not facts.whole("expert_count", 0):
        facts.whole("expert_used_count", 0)
        return found
    return {**found, **expert_counts(facts), "model_type": "mixtral"}


def expert_counts(facts: Facts) -> Configuration:
    """Return the number of a layer's experts, and of those that a token uses."""
    count, used = facts.whole("expert_count"), facts.whole("expert_used_count")
    if not 0 < used <= count:
        raise facts.refusal(f"a token uses {used} of its {count} experts (expert_used_count)")
    return {"num_local_experts": count, "num_experts_per_tok": used}


def _add_factors(facts: Facts, rope: Configuration) -> None:
    """Add the file's rope_factors, if there are any, to its rotation."""
    attention = facts.real("rope.scaling.attn_factor", 1.0)
    if "rope_factors_short.weight" in facts.tensors:
        names = "rope_factors_short.weight", "rope_factors_long.weight"
        if (kind := rope["rope_type"]) != "default":
            raise facts.refusal(f"it has both rope_factors and a scaling of kind {kind}")
        rope.update(factors_of(facts, *names, attention))
    elif attention != 1.0:
        raise facts.refusal(f"it scales attention by {attention} and has no rope_factors")


def phi3(facts: Facts) -> Configuration:
    found = with_rms(facts)
    original = facts.whole("rope.scaling.original_context_length", 0)
    _add_factors(facts, found["rope_parameters"])
    return {
        **found,
        "model_type": "phi3",
        "hidden_act": "silu",
        "original_max_position_embeddings": original or found["max_position_embeddings"],
        "sliding_window": facts.whole("attention.sliding_window", 0) or None,
        "pad_token_id": None,
    }


def olmo2(facts: Facts) -> Configuration:
    """OLMo 2, or OLMo 3 if there are windows, whose layers do not scale their rotation."""
    found = {**with_rms(facts), "model_type": "olmo2", "hidden_act": "silu"}
    if not (window := facts.whole("attention.sliding_window", 0)):
        return found
    full = found["rope_parameters"]
    base = facts.positive("rope.freq_base_swa", full["rope_theta"])
    return {
        **found,
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": pattern(facts, 4),
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": base}},
        "pad_token_id": None,
    }


def smollm3(facts: Facts) -> Configuration:
    rotated = [int((index + 1) % 4 > 0) for index in range(facts.layers)]
    fields: Configuration = {
        "use_sliding_window": False,
        "no_rope_layers": rotated,
        "pad_token_id": None,
    }
    return plain("smollm3", **fields)(facts)


def granite(facts: Facts) -> Configuration:
    found = with_rms(facts)
    _no_states(facts)
    return {
        **found,
        **granite_factors(facts, found["head_dim"], None),
        "model_type": "granite",
        "hidden_act": "silu",
        "intermediate_size": facts.whole(
            "expert_shared_feed_forward_length", found["intermediate_size"]
        ),
        "attention_bias": has_bias(facts, "attn_q"),
    }


def granite_factors(facts: Facts, head: int, logits: float | None) -> Configuration:
    """Return Granite's factors; `logits`: the default of theirs."""
    return {
        "attention_multiplier": facts.real("attention.scale", 0.0) or head**-0.5,
        "embedding_multiplier": facts.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": facts.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": facts.positive("logit_scale", logits),
    }


def _no_states(facts: Facts) -> None:
    """Remove what files of Granite 4 without states state about states and experts."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        facts.whole(f"ssm.{key}", 0)
    if facts.architecture == "granite" and facts.whole("expert_count", 0):
        raise facts.refusal("it has keys of experts, but its architecture has none")
    facts.whole("expert_used_count", 0)
    if not facts.truth("rope.scaling.finetuned", True):
        raise facts.refusal("it rotates nothing (rope.scaling.finetuned)")


def mistral3(facts: Facts) -> Configuration:
    """Mistral Small 3, and Ministral 3, whose queries grow with their position."""
    found = {**with_rms(facts), "hidden_act": "silu", "sliding_window": None}
    if "attention.temperature_scale" not in facts:
        return {**found, "model_type": "mistral"}
    rope = found["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise facts.refusal("its queries grow, and its rotation is not scaled by yarn")
    rope["llama_4_scaling_beta"] = facts.real("attention.temperature_scale")
    if magnitude := facts.real("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": magnitude}
    return {**found, "model_type": "ministral3", "rope_parameters": rope}


def qwen2vl(facts: Facts) -> Configuration:
    """The language model only: for text, all sections of the rotation have equal positions."""
    facts.numbers("rope.dimension_sections")
    return qwen2(facts)


def qwen3vl(facts: Facts) -> Configuration:
    """The language model only: for text, all sections of the rotation have equal positions."""
    facts.numbers("rope.dimension_sections")
    facts.whole("n_deepstack_layers", 0)
    return qwen3(facts)


def glm4(facts: Facts) -> Configuration:
    """Files of its models that read images order the rows of heads differently."""
    if any(facts.numbers("rope.dimension_sections", [])):
        raise facts.refusal("it is the language model of a model that reads images")
    return plain("glm4", biases=ATTENTION_BIAS, pad_token_id=None)(facts)


def exaone4(facts: Facts) -> Configuration:
    """If there is a window, three of four layers have it, and only they rotate."""
    found = {**with_rms(facts), "model_type": "exaone4", "hidden_act": "silu"}
    window = facts.whole("attention.sliding_window", 0)
    kinds = pattern(facts, 4)
    return {
        **found,
        "sliding_window": window or None,
        "layer_types": kinds if window else [FULL] * len(kinds),
    }


LOCAL_BASE = 10000.0  # the default base of rotation of layers with a window
FINAL_CAP = 30.0  # the default cap of logits of Gemma 2 and 4; Gemma 3 has none
BIG_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models: other scale of queries
UNROTATED = 1e30  # frequencies of numbers that are not rotated are divided by this
EXPERTS = "expert_feed_forward_length"


def gemma2(facts: Facts) -> Configuration:
    found = with_rms(facts)
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        **_gemmas(facts, found),
        "model_type": "gemma2",
        "sliding_window": facts.whole("attention.sliding_window", 4096),
        "layer_types": [FULL if index % 2 else SLIDING for index in layers],
        "attn_logit_softcapping": facts.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.real("final_logit_softcapping", FINAL_CAP),
    }


def gemma3(facts: Facts) -> Configuration:
    """Five of six layers have a window, and their own rotation that is not scaled."""
    found = with_rms(facts)
    window = facts.whole("attention.sliding_window", 0)
    layers = range(found["num_hidden_layers"])
    cap = facts.real("final_logit_softcapping", 0.0)
    base = facts.positive("rope.freq_base_swa", LOCAL_BASE)
    return {
        **found,
        **_gemmas(facts, found),
        "model_type": "gemma3_text",
        "sliding_window": window or found["max_position_embeddings"],
        "layer_types": [SLIDING if window and (index + 1) % 6 else FULL for index in layers],
        "rope_parameters": {
            FULL: found["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": base},
        },
        "final_logit_softcapping": cap or None,
    }


def _gemmas(facts: Facts, found: Configuration) -> Configuration:
    """The scale of queries, by the head's width or the largest model's share, and the
    activation."""
    large = found["num_hidden_layers"] == BIG_GEMMA[facts.architecture]
    width = found["hidden_size"] // found["num_attention_heads"] if large else found["head_dim"]
    return {"query_pre_attn_scalar": width, "hidden_activation": "gelu_pytorch_tanh"}


def gemma4(facts: Facts) -> Configuration:
    """Windowed layers have other heads and rotations; the last may share keys, and each have own
    inputs."""
    facts.numbers("attention.sliding_window_pattern")
    found = _sharing(facts, 6)
    kinds, head, shared = found["layer_types"], found["head_dim"], found["num_kv_shared_layers"]
    local = facts.whole("attention.key_length_swa")
    whole_values = facts.whole("attention.value_length_swa") == local
    rotated = (
        facts.whole("rope.dimension_count", head),
        facts.whole("rope.dimension_count_swa", local),
    )
    if not whole_values or rotated != (head, local):
        raise facts.refusal(f"its {rotated} rotated numbers do not fit")
    widths = facts.each("feed_forward_length")
    wide = widths[-1] == 2 * widths[0]
    expected = [
        widths[0] * (1 + (wide and at >= facts.layers - shared)) for at in range(len(kinds))
    ]
    if widths != expected:
        raise facts.refusal(f"its MLPs have the widths {sorted(set(widths))}")
    key_heads = dict(zip(kinds, facts.each(KV_HEADS), strict=True))
    if facts.each(KV_HEADS) != [key_heads[kind] for kind in kinds]:
        raise facts.refusal("layers of one kind have several numbers of key heads")
    last = [at for at in range(facts.layers - shared) if kinds[at] == FULL]
    found["rope_parameters"][FULL] = _proportional(facts, head)
    return {
        **found,
        "model_type": "gemma4_text",
        "intermediate_size": widths[0],
        "use_double_wide_mlp": wide,
        "head_dim": local,
        "global_head_dim": head,
        "num_key_value_heads": key_heads.get(SLIDING, key_heads.get(FULL)),
        "num_global_key_value_heads": key_heads.get(FULL),
        "attention_k_eq_v": any(f"blk.{at}.attn_v.weight" not in facts.tensors for at in last),
        **_experts(facts),
    }


def gemma3n(facts: Facts) -> Configuration:
    """Several states per token; the last layers share keys, and each has own inputs."""
    found = _sharing(facts, 5)
    found["rope_parameters"][FULL] = rotation(facts, found["head_dim"])
    deviations = facts.reals("activation_sparsity_scale")  # -inf: all gates stay
    return {
        **found,
        "model_type": "gemma3n_text",
        "num_key_value_heads": facts.whole(KV_HEADS, found["num_attention_heads"]),
        "intermediate_size": facts.each("feed_forward_length"),
        "activation_sparsity_pattern": [NormalDist().cdf(one) for one in deviations],
        "altup_active_idx": facts.whole("altup.active_idx"),
        "altup_num_inputs": facts.whole("altup.num_inputs"),
        "laurel_rank": facts.need("blk.0.laurel_l.weight").shape[0],
    }


def _sharing(facts: Facts, every: int) -> Configuration:
    """Fields of Gemma 3n and 4; by default one of `every` layers is full, the others windowed."""
    shared = facts.whole("attention.shared_kv_layers", 0)
    if not 0 <= shared < facts.layers:
        raise facts.refusal(f"{shared} of its {facts.layers} layers share keys")
    base = facts.positive("rope.freq_base_swa", LOCAL_BASE)
    inputs = {}
    if own := facts.whole("embedding_length_per_layer_input"):
        table = facts.need("per_layer_token_embd.weight")
        inputs["vocab_size_per_layer_input"] = table.shape[0]
    return {
        **sizes_of(facts),
        "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": shared,
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": pattern(facts, every),
        "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": base}},
        "final_logit_softcapping": facts.real("final_logit_softcapping", FINAL_CAP) or None,
        "hidden_size_per_layer_input": own,
        **inputs,
    }


def _proportional(facts: Facts, head: int) -> Configuration:
    """The rotation of full layers: only the first numbers of a head, with the whole's
    frequencies."""
    factors = numbers_of(facts.model, facts.need("rope_freqs.weight").name)
    rotated = len(list(takewhile(lambda factor: factor == 1.0, factors)))
    if len(factors) != head // 2 or any(factor < 0.99 * UNROTATED for factor in factors[rotated:]):
        raise facts.refusal("its rope_freqs have values other than 1 and infinity")
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": 2 * rotated / head,
        "rope_theta": facts.positive("rope.freq_base", BASE),
    }


def _experts(facts: Facts) -> Configuration:
    """Experts next to the MLP; files of models without experts may still have their number."""
    count, used = facts.whole("expert_count", 0), facts.whole("expert_used_count", 0)
    width = facts.whole(EXPERTS, 0)
    if "blk.0.ffn_gate_inp.weight" not in facts.tensors:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": used,
        "moe_intermediate_size": width,
    }


def minicpm(facts: Facts) -> Configuration:
    """Granite; older files lack its factors, and are refused. MiniCPM 4 has rope_factors."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        facts.positive(key)
    found = granite(facts)
    _add_factors(facts, found["rope_parameters"])
    return found


def granite_swa(facts: Facts) -> Configuration:
    """Granite with sinks and windows; some layers are not rotated. There may be experts, and next
    to them a shared MLP."""
    facts.numbers("attention.sliding_window_pattern")  # llama.cpp has no default
    found = granite(facts)
    flags, base = "attention.rope_pattern", found["rope_parameters"]["rope_theta"]
    rotated = facts.each(flags) if flags in facts else [1] * facts.layers
    found |= {
        "model_type": "granite_swa",
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": pattern(facts, 4),
        "layer_rope_theta": [base if one else 0 for one in rotated],
    }
    if not facts.whole("expert_count", 0):
        return found
    return {
        **found,
        "model_type": "granitemoe_swa",
        "intermediate_size": facts.whole("feed_forward_length"),
        **expert_counts(facts),
        "shared_intermediate_size": facts.whole("expert_shared_feed_forward_length", 0),
    }


OLMO_EPSILON = 1e-5  # the epsilon of OLMo's norms, a constant of transformers


def gpt2(facts: Facts) -> Configuration:
    return {
        **everywhere(facts),
        "model_type": "gpt2",
        "n_embd": facts.whole("embedding_length"),
        "n_layer": facts.whole("block_count"),
        "n_head": facts.whole(HEADS),
        "n_positions": facts.whole("context_length"),
        "n_inner": facts.whole("feed_forward_length"),
        "layer_norm_epsilon": facts.epsilon("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def starcoder(facts: Facts) -> Configuration:
    """One key head for all queries, or as many as query heads."""
    heads = facts.whole(HEADS)
    key_heads = facts.whole(KV_HEADS, heads)
    if key_heads not in (1, heads):
        raise facts.refusal(f"it has {key_heads} heads of keys for {heads} of queries")
    return {
        **gpt2(facts),
        "model_type": "gpt_bigcode",
        "multi_query": key_heads == 1,
        "activation_function": "gelu_pytorch_tanh",
    }


def stablelm(facts: Facts) -> Configuration:
    """Halves are parallel if an MLP has no norm, whatever the file's flag."""
    facts.truth("use_parallel_residual", True)
    return {
        **common(facts),
        "model_type": "stablelm",
        "hidden_act": "silu",
        "layer_norm_eps": facts.epsilon(EPSILON),
        "use_qkv_bias": has_bias(facts, "attn_q"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in facts.tensors,
        "qk_layernorm": False,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    }


def olmo(facts: Facts) -> Configuration:
    """Norms have no weights."""
    if (epsilon := facts.epsilon(EPSILON)) != OLMO_EPSILON:
        raise facts.refusal(f"its norms have the epsilon {epsilon}, not OLMo's {OLMO_EPSILON}")
    return {**common(facts), "model_type": "olmo", "hidden_act": "silu", "pad_token_id": None}


def command_r(facts: Facts) -> Configuration:
    """The large ones have norms of queries and keys; the head is the embedding."""
    return {
        **plain("cohere", biases=ATTENTION_BIAS, epsilon="layer_norm_eps")(facts),
        "logit_scale": facts.real("logit_scale", 0.0) or 1.0,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors,
    }


def cohere2(facts: Facts) -> Configuration:
    """Three of four layers have a window, and only they rotate."""
    return {
        **plain("cohere2", biases=ATTENTION_BIAS, epsilon="layer_norm_eps")(facts),
        "logit_scale": facts.positive("logit_scale"),
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": pattern(facts, 4),
    }
