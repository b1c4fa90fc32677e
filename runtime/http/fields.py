"""What all bodies have in common: which fields they refuse.

The tables have fields of other servers that are unsupported here: those with values that have no
effect, and those that never have one. From the references of OpenAI's API, vLLM, llama-server,
SGLang, TGI and their routers. Fields in neither table are refused as unknown, as by OpenAI: the
name may be misspelt, or the field may change the output."""

import json
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from dovetail.runtime.http.errors import ApiError

DEEPEST = 64  # nesting of values for a chat template: pydantic's serializer fails at 255
V = TypeVar("V")
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    **dict.fromkeys(("audio", "prediction", "moderation", "web_search_options"), ()),
    "max_completion_tokens": (),
    "reasoning_effort": ("none",),
    "reasoning": ({},),
    "verbosity": ("medium",),
    "suffix": ("",),
    "top_logprobs": (0,),
    "echo": (False,),
    # structured output that is not served
    "format": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "structural_tag": (),
    # samplers
    **dict.fromkeys(("samplers", "logits_processors", "bad_words"), ([],)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "penalize_nl", "watermark"), (False,)),
    **dict.fromkeys(("length_penalty", "typical_p", "typ_p", "tfs_z"), (1,)),
    **dict.fromkeys(("do_sample", "custom_logit_processor", "allowed_token_ids"), ()),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "smoothing_factor"), (0,)),
    **dict.fromkeys(("dynatemp_range", "mirostat", "mirostat_mode", "xtc_probability"), (0,)),
    **dict.fromkeys(("dry_multiplier", "no_repeat_ngram_size"), (0,)),
    "top_n_sigma": (0, -1),
    "repeat_last_n": (-1,),
    "min_keep": (0, 1),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    # the length and the end of a reply
    "thinking_token_budget": (-1,),
    **dict.fromkeys(("min_new_tokens", "n_keep", "n_discard"), (0,)),
    "t_max_predict_ms": (0, -1),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    # the prompt
    **dict.fromkeys(("system_prompt", "input_prefix", "input_suffix"), ("",)),
    **dict.fromkeys(("chat_template", "add_special_tokens", "enable_thinking", "thinking"), ()),
    **dict.fromkeys(("truncate", "truncate_prompt_tokens", "prompt_embeds", "lora_path"), ()),
    **dict.fromkeys(("adapter_id", "kv_transfer_params"), ()),
    "chat_template_content_format": ("auto", "string"),
    **dict.fromkeys(("documents", "transforms", "input_extra", "image_data", "lora"), ([],)),
    "continue_final_message": (False,),
    "safe_prompt": (False,),
    "add_generation_prompt": (True,),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "options"), ({},)),
    **dict.fromkeys(("sampling_params", "parameters"), ({},)),
    # annotations of the reply
    "prompt_logprobs": (),
    "separate_reasoning": (),
    "n_probs": (0,),
    "top_n_tokens": (0,),
    **dict.fromkeys(("post_sampling_probs", "return_token_ids", "return_tokens"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_hidden_states"), (False,)),
    **dict.fromkeys(("return_full_text", "timings_per_token"), (False,)),
    **dict.fromkeys(("decoder_input_details", "details", "raw_output"), (False,)),
    **dict.fromkeys(("thinking_forced_open", "parse_tool_calls"), (False,)),
    "skip_special_tokens": (True,),
    "response_fields": ([],),
    "reasoning_format": ("none", "auto"),
}
"""Unsupported fields, or those of the other kind, with values without effect."""

RENAMED: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "random_seed": "seed",
    "thinking_budget_tokens": "thinking_token_budget",
    "reasoning_budget": "thinking_token_budget",
    "reasoning_budget_tokens": "thinking_token_budget",
}
"""Fields of other servers that are accepted -> those of the same meaning."""

INSTEAD: Mapping[str, str] = {
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_probs": "logprobs, in a chat with top_logprobs",
    "top_n_tokens": "logprobs, in a chat with top_logprobs",
    "system": "a message with the role system",
    "system_prompt": "a message with the role system",
    "options": "its fields, next to messages",
    "sampling_params": "its fields, next to prompt",
    "parameters": "its fields, next to prompt",
    "inputs": "prompt",
}
"""Fields of other servers -> fields to send here instead."""

BENIGN = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "priority"),
        *("request_id", "rid", "cache_prompt", "id_slot", "slot_id"),
        *("spaces_between_special_tokens", "include_reasoning", "xtc_threshold", "dry_base"),
        *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau"),
        *("mirostat_eta", "dynatemp_exponent", "smoothing_curve", "speculative.n_max"),
        *("speculative.n_min", "speculative.p_min", "keep_alive"),
        "guided_decoding_backend",
    )
)
"""Fields that change no reply: accounts, routing, numbers of unused samplers."""


def renamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with our names of fields; raise `ApiError` if two names of one differ. The
    window of penalties, `repeat_last_n`, is ignored without `repeat_penalty`."""
    fields: dict[str, Any] = {}
    for name, value in body.items():
        here = RENAMED.get(name, name)
        if value is not None and fields.get(here) not in (None, value):
            other = next(one for one in body if one != name and RENAMED.get(one, one) == here)
            text = f"{other} and {name} mean the same, but differ: leave one out"
            raise ApiError(400, text, param=name)
        if fields.get(here) is None:
            fields[here] = value
    if fields.get("repetition_penalty") in (None, 1) and fields.get("repeat_last_n") in (0, 64):
        del fields["repeat_last_n"]
    return fields


def check_fields(
    body: Mapping[Any, Any],
    known: Collection[str],
    *,
    benign: Collection[str] = BENIGN,
    param: str = "",
) -> None:
    """Accept a body whose fields are `known`, `benign` or without effect; else raise `ApiError`.
    `param`: the field of which the body is the value."""
    for name, value in body.items():
        if name in known or name in benign or value is None:
            continue
        shown = str(name)[:64]
        if name not in UNSERVED:
            text = (
                f"{param}{'.' * bool(param)}{shown} is not a known field here: "
                f"{_remedy(name, param, 'correct its name, or leave it out')}"
            )
            raise ApiError(400, text, param=param or shown, code="unknown_parameter")
        if param or not any(
            value == nothing and isinstance(value, bool) == isinstance(nothing, bool)
            for nothing in UNSERVED[name]
        ):
            raise ApiError(
                400,
                f"{param}{'.' * bool(param)}{shown} is not supported: "
                f"{_remedy(name, param, 'leave it out')}",
                param=param or shown,
                code="unsupported_parameter",
            )


def _remedy(name: str, param: str, otherwise: str) -> str:
    """Return what to send instead of a field, or of one within the field `param`."""
    return f"send {INSTEAD[name]}" if name in INSTEAD and not param else otherwise


def whole(value: Any, deep: int = 2) -> Any:
    """Convert integral floats (some clients send 10.0) to int, also in lists and lists of lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if deep and isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [whole(one, deep - 1) for one in value]
    return value


def plain(values: V) -> V:
    """Return values that fit into UTF-8 JSON within `DEEPEST` levels; else raise `ValueError`."""
    layer: list[Any] = [values] if isinstance(values, dict | list) else []
    for _ in range(DEEPEST):
        parts = (one.values() if isinstance(one, dict) else one for one in layer)
        layer = [part for found in parts for part in found if isinstance(part, dict | list)]
    if layer:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    try:
        json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:  # includes UnicodeEncodeError
        text = "NaN, Infinity and lone surrogates are not valid JSON in UTF-8"
        raise ValueError(text) from None
    return values


class Body(BaseModel):
    """A body. Fields without effect are accepted, though the API document does not list them."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )
    place: ClassVar[str] = ""  # the field whose value it is
    benign: ClassVar[frozenset[str]] = BENIGN

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        body = cls._named(body)
        if cls._is_read(body):
            check_fields(body, cls.model_fields, benign=cls.benign, param=cls.place)
        return {name: whole(value) for name, value in body.items()}

    @classmethod
    def _named(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields under our names."""
        return body

    @classmethod
    def _is_read(cls, _body: dict[str, Any]) -> bool:
        """True if unknown fields are the first error to report."""
        return True
