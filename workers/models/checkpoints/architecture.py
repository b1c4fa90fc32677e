"""Decides which models can be decoded with token trees, by their configurations and transformers'
class flags, with an error and a remedy for others. Imports neither torch nor transformers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.files import MODEL_FILES, damaged, shown
from dovetail.workers.models.checkpoints.ling import is_ling, why_not_ling
from dovetail.workers.models.checkpoints.quantised.schemes import refuse_scheme

REMEDY = "use a model of another architecture, such as Llama, Qwen3, Mistral, Gemma 2 or Phi-3"
LANGUAGE_MODELS = ("text_config", "llm_config", "language_config", "decoder")  # in other models
SIZES = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size"),
    *("vocab_size", "max_position_embeddings"),
)
COUNTS = (
    *SIZES,
    *("num_key_value_heads", "intermediate_size", "head_dim", "n_embd", "n_layer"),
    *("n_head", "n_positions", "d_model", "n_layers", "n_heads"),
)
LISTED = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
"""Parts of a model of which lists are created while reading -> names of their number."""
MOST_LISTED = 1 << 16
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT_FAMILIES = frozenset(
    {
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        *("lfm2", "lfm2_moe", "lfm3", "olmo_hybrid", "kimi_linear"),
        *("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"),
    }
)
"""Model types whose layers with a state are followed through trees, by the kernels."""
FOLLOWED = (
    "; states are followed through the branches of a token tree for "
    f"{', '.join(sorted(RECURRENT_FAMILIES))} alone, and this model type is not described here"
)
RECURRENT = f"keep a recurrent state{FOLLOWED}"
LATENT_FAMILIES = frozenset(
    {*("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), *("minicpm3", "sarvam_mla", "youtu")}
)
"""Model types whose attention is over latents, by the kernels."""
KERNELS_ALONE = {
    **dict.fromkeys(RECURRENT_FAMILIES, "layers with a state are"),
    **dict.fromkeys(LATENT_FAMILIES, "attention over latents is"),
}
"""Model types that the library does not compute, by which of their parts the kernels' layers do."""
SPARSE = "need a sparse indexer (it chooses the tokens to attend to), which is not supported"
INDEXERS = ("index_topk", "sparse_attention_config", "sparse_num_index_heads")
"""Fields of configurations whose layers have a sparse indexer."""
SUMMED = "attend to summaries of several tokens (compressed attention)"
LAYER_TYPES = {
    "compressed_sparse_attention": SUMMED,
    "conv": f"keep the last inputs of a convolution{FOLLOWED}",
    "heavily_compressed_attention": SUMMED,
    "hybrid": f"keep a recurrent or convolutional state beside attention{FOLLOWED}",
    "indexed_attention": SPARSE,
    "linear_attention": RECURRENT,
    "minimax_m3_sparse": SPARSE,
    "recurrent": RECURRENT,
}
"""Why layers of types with this prefix cannot be decoded with token trees."""
LOOPED = "it runs some layers several times, and caches hold the keys of a layer only once"
ASSISTANT = "it drafts from the states, keys and values of a Gemma 4 model, which is not supported"
BOUNDED = (
    "the decays of its linear attention have a lower bound, and its attention over latents a gate "
    "for each head, which no back end supports"
)
UNREAD = {
    **dict.fromkeys(("bailing_hybrid",), BOUNDED),
    "dory": LOOPED,
    **dict.fromkeys(("eagle3", "mtp"), "it is a draft head, which --draft takes"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), ASSISTANT),
}
"""Why some model types are unsupported although they look supported."""

IGNORED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "hy_v3": {"moe_router_use_sigmoid": True, "route_norm": True, "qk_norm": True},
    "kimi_linear": {"moe_router_activation_func": "sigmoid", "mla_use_nope": True},
    "laguna": {"moe_router_use_sigmoid": True},
}
"""Fields that transformers ignores, by model type -> the values with which it computes."""


def why_no_folder(source: str) -> str:
    """Return why a file is not a model folder, and the remedy."""
    if source.lower().endswith(".safetensors"):
        return "is one file of a model; name its folder"
    return f"is a file; {MODEL_FILES}"


def why_not_there(source: str) -> str:
    """Return why a path is no model, with the first GGUF files of its folder, and the remedy."""
    beside = sorted(file.name for file in Path(source).expanduser().parent.glob("*.gguf"))[:3]
    found = f" (its folder has {', '.join(beside)})" if beside else ""
    names = "an existing folder or GGUF file, or a hub id (OWNER/NAME, or OWNER/NAME/FILE.gguf)"
    return f"is not there{found}: name {names}"


def refuse_elsewhere(content: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` for weights quantised in an unsupported way, or in a file that config.json
    names."""
    if (named := content.get("transformers_weights")) is not None:
        key = f"transformers_weights is {str(named)[:100]!r}"
        raise CheckpointError(f"{file} names other weights ({key}), which are ignored; remove it")
    refuse_scheme(content, file.parent)


def undecodable(file: object, kind: str, why: str) -> CheckpointError:
    """Return the error for a model type that cannot be decoded."""
    return CheckpointError(f"{file}: model type {kind} {why}; {REMEDY}")


def refuse_content(content: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` for a config.json that describes no language model of plain weights."""
    refuse_elsewhere(content, file)
    kind = content.get("model_type")
    if not isinstance(kind, str) or not kind:
        found = "no model_type" if kind is None else f"a model_type of {shown(kind)}"
        raise CheckpointError(f"{file} has {found}; use the config.json of the weights")
    if why := why_not_ling(content) if is_ling(content) else UNREAD.get(kind):
        raise undecodable(file, kind, f"cannot be decoded here: {why}")
    if content.get("vocab_size") is None:
        parts = (content.get(name) for name in LANGUAGE_MODELS)
        if (part := next((part for part in parts if isinstance(part, dict)), None)) is not None:
            own = str(part.get("model_type") or "of no model_type")
            if any(name in part for name in INDEXERS):
                raise undecodable(file, kind, f"has a language model ({own}) whose layers {SPARSE}")
            raise composite(kind, own, file)
        raise CheckpointError(f"{file} of model type {kind} has no vocab_size; {REMEDY}")
    _refuse_sizes(content, file)


def refuse_unknown(content: Mapping[str, Any], file: Path, *, known: bool, version: str) -> None:
    """`CheckpointError` for a model type that the installed transformers does not know."""
    if known:
        return
    kind = shown(content["model_type"])
    if auto_map := content.get("auto_map"):
        named = min(
            map(str, auto_map.values() if isinstance(auto_map, dict) else [auto_map]), default=""
        )
        code = f"needs its own program code (auto_map names {shown(named)}), which is never run"
        raise undecodable(file, kind, code)
    newer = "upgrade that if the model is newer"
    raise undecodable(file, kind, f"is not known to transformers {version} ({newer})")


def composite(kind: str, part: str, file: Path) -> CheckpointError:
    """The error for a model that contains a language model."""
    why = f"is a language model ({part}) with other parts, and cannot be loaded without them"
    return undecodable(file, kind, why)


def _refuse_sizes(content: Mapping[str, Any], file: Path) -> None:
    """`CheckpointError` naming a size that is not a positive whole number: transformers divides by
    some."""
    for name in COUNTS:
        number = content.get(name)
        if isinstance(number, list) and name == "intermediate_size":  # one for each layer
            continue
        if number is not None and (
            not isinstance(number, int) or isinstance(number, bool) or number < 1
        ):
            raise CheckpointError(f"{file}: {name} is {shown(number)}; it must be an integer >= 1")
    for what, name in ((what, name) for what, names in LISTED.items() for name in names):
        number = content.get(name)
        if isinstance(number, int) and number > MOST_LISTED:
            text = f"{name} is {number}, and no model has more than {MOST_LISTED} {what}"
            raise CheckpointError(f"{file}: {text}; use the config.json of the weights")


def refuse_config(config: Any, model_class: Any, file: Path) -> None:
    """`CheckpointError` for an unsupported model, by transformers' configuration and class (or
    None)."""
    refused = partial(undecodable, file, config.model_type)
    if config.is_encoder_decoder:
        raise refused("has an encoder (is_encoder_decoder)")
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "model_type"):
        raise damaged(f"{file}: the configuration of a part is {shown(text)}")
    _refuse_layers(text, model_class, file)
    if text is not config:
        raise composite(config.model_type, text.model_type, file)
    if model_class is None:
        raise refused("has no class in AutoModelForCausalLM")
    for name in SIZES:
        if not isinstance(getattr(config, name, None), int):
            lacks = f"its configuration has no {name}"
            why = why_not(config, model_class) if closed(model_class) else lacks
            raise refused(f"cannot be decoded here: {why}")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise bidirectional(config, "use_bidirectional_attention", file)
    base = getattr(getattr(config, "attn_config", None), "rope_theta", None)
    if base is not None and base != (used := config.rope_parameters["rope_theta"]):
        raise CheckpointError(
            f"{file} has rope_theta {base} in attn_config, which transformers ignores (it uses "
            f"{used}); add rope_theta {base} to rope_parameters"
        )
    for name, used in IGNORED.get(config.model_type, {}).items():
        if (own := getattr(config, name, None)) not in (None, used):
            said = f"{name} is {shown(own)}, which transformers ignores (it computes with {used})"
            raise CheckpointError(f"{file}: {said}; {REMEDY}")


def bidirectional(config: Any, field: str, file: Path) -> CheckpointError:
    """The error for a model with bidirectional attention, by a field of its configuration."""
    said = f"{field} is {str(getattr(config, field)).lower()}"
    return undecodable(file, config.model_type, f"attends in both directions ({said})")


def _refuse_layers(config: Any, model_class: Any, file: Path) -> None:
    """`CheckpointError` for layers other than full or windowed attention, or known states."""
    if config.model_type in RECURRENT_FAMILIES:
        return
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_TYPES)
    if strange:
        why = next(
            (why for name, why in LAYER_TYPES.items() if str(strange[0]).startswith(name)),
            "are of an unknown type",
        )
        raise undecodable(file, config.model_type, f"has layers of type {strange[0]}, which {why}")
    if getattr(model_class, "_is_stateful", False):
        raise undecodable(file, config.model_type, f"has layers that {RECURRENT}")


def refuse_without_kernels(model_type: str, source: str, why: str) -> None:
    """`CheckpointError` for a model type that only the kernels compute; `why`: they do not."""
    if (what := KERNELS_ALONE.get(model_type)) is not None:
        raise CheckpointError(
            f"{source}: model type {model_type}: its {what} not computed by torch's library "
            f"back end, and {why}"
        )


def closed(model_class: Any) -> bool:
    """Return whether a class computes attention by a function that cannot be replaced."""
    return not getattr(model_class, "_supports_attention_backend", False)


def why_not(config: Any, model_class: Any) -> str:
    """Return why a model that failed a trial cannot be decoded, by its configuration and class."""
    if isinstance(getattr(config, "kv_lora_rank", None), int):
        return (
            "it compresses keys and values (multi-head latent attention), which is computed for "
            f"{', '.join(sorted(LATENT_FAMILIES))} and no other model type"
        )
    name = model_class.__name__
    if closed(model_class):
        by_itself = "computes attention, masks or positions by itself"
        return f"transformers' {name} {by_itself}, and token trees need other ones"
    return f"a trial with the attention that token trees need fails within transformers' {name}"
