"""Fields of a body that mean something elsewhere and are not served here: which of their values ask
for nothing, and which fields never ask for anything.

From the references of OpenAI's API, vLLM, llama-server, SGLang, TGI and the routers before them.
What is in neither table is not known to anybody here, and is refused as OpenAI refuses it: it may
be a misspelt name, or change what comes out.
"""

from collections.abc import Collection, Mapping
from typing import Any

from dovetail.runtime.http.errors import ApiError

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "reasoning": ({},),
    "verbosity": ("medium",),
    "suffix": ("",),
    "top_logprobs": (0,),
    "max_completion_tokens": (),
    "echo": (False,),
    # structured output, by whatever name
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "json_schema": ({},),
    "regex": ("",),
    "ebnf": ("",),
    "format": ("",),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # samplers
    "samplers": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "do_sample": (),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "repeat_penalty": (1,),
    "repeat_last_n": (0, 64, -1),
    "penalize_nl": (False,),
    "no_repeat_ngram_size": (0,),
    "min_keep": (0, 1),
    "watermark": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "vllm_xargs": ({},),
    # how much, and where it ends
    "n_predict": (),
    "num_predict": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "n_keep": (0,),
    "n_discard": (0,),
    "t_max_predict_ms": (0, -1),
    "stop_regex": ([],),
    "stop_sequences": ([],),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "random_seed": (),
    "thinking_token_budget": (),
    # the prompt
    "system_prompt": ("",),
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "documents": ([],),
    "add_special_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "enable_thinking": (),
    "thinking": (),
    "safe_prompt": (False,),
    "truncate": (),
    "truncate_prompt_tokens": (),
    "transforms": ([],),
    "prompt_embeds": (),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "input_extra": ([],),
    "image_data": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "lora": ([],),
    "lora_path": (),
    "adapter_id": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "options": ({},),
    "sampling_params": ({},),
    "parameters": ({},),
    # what is said of the reply
    "prompt_logprobs": (),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "return_progress": (False,),
    "return_full_text": (False,),
    "timings_per_token": (False,),
    "response_fields": ([],),
    "decoder_input_details": (False,),
    "details": (False,),
    "top_n_tokens": (0,),
    "raw_output": (False,),
    "separate_reasoning": (),
    "reasoning_format": ("none", "auto"),
    "thinking_forced_open": (False,),
    "parse_tool_calls": (False,),
}
"""Fields that are not served (or by the other kind of completion only), each with the values,
beside null, that ask for nothing."""

INSTEAD: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "random_seed": "seed",
    "n_probs": "logprobs, in a chat with top_logprobs",
    "top_n_tokens": "logprobs, in a chat with top_logprobs",
    "system": "a message with the role system",
    "system_prompt": "a message with the role system",
    "options": "its fields, beside messages",
    "sampling_params": "its fields, beside prompt",
    "parameters": "its fields, beside prompt",
    "inputs": "prompt",
}
"""Fields of other servers -> what to send here instead."""

BENIGN = frozenset(
    (
        *(
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "parallel_tool_calls",
        ),
        *(
            "priority",
            "request_id",
            "rid",
            "cache_prompt",
            "id_slot",
            "slot_id",
            "spaces_between_special_tokens",
            "include_reasoning",
        ),
        *(
            "xtc_threshold",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "mirostat_tau",
            "mirostat_eta",
        ),
        *(
            "dynatemp_exponent",
            "smoothing_curve",
            "speculative.n_max",
            "speculative.n_min",
            "speculative.p_min",
            "keep_alive",
        ),
    )
)
"""Fields that change no reply: accounts and routing, the numbers of samplers that another field
turns on."""


def check_fields(
    body: Mapping[Any, Any],
    known: Collection[str],
    *,
    benign: Collection[str] = BENIGN,
    param: str = "",
) -> None:
    """Pass a body all of whose fields are `known`, `benign` or ask for nothing; else `ApiError`
    names the first that is not.

    `param`: the field that the body is the value of.
    """
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
    """Return what to send instead of a field, which is one of the field `param` if that is not
    empty."""
    return f"send {INSTEAD[name]}" if name in INSTEAD and not param else otherwise
