"""Tiny random models on disk, and the slow obvious way to decode with one."""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Cache

VOCABULARY = 48
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 48,
    "max_position_embeddings": 96,
}
"""A config.json by itself, of a model that nobody loads."""
CONTEXT = 96
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # ten times the usual one: logits far apart, so that a choice is never a matter of rounding
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def _tiny(
    kind: type[PreTrainedModel],
    config: type[PretrainedConfig],
    folder: Path,
    *,
    vocab: int = VOCABULARY,
    seed: int = 0,
    context: int = CONTEXT,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """A random model of a class in `folder`, the same for the same arguments; `fields` are of its
    config."""
    shape = {**SHAPE, "max_position_embeddings": context, **fields}
    return save_random(
        folder, kind, config(vocab_size=vocab, num_hidden_layers=layers, **shape), seed, dtype
    )


tiny_llama = partial(_tiny, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False)
tiny_qwen2 = partial(_tiny, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True)
"""Biases in the projections, tied embeddings."""
tiny_qwen3 = partial(_tiny, Qwen3ForCausalLM, Qwen3Config, head_dim=24, tie_word_embeddings=False)
"""Norms on the heads of queries and keys, heads wider than hidden / heads."""
tiny_mistral = partial(_tiny, MistralForCausalLM, MistralConfig, sliding_window=None)
"""Layers attend to all tokens; `sliding_window`: to the last so many."""
tiny_sliding = partial(tiny_mistral, sliding_window=7)
"""A window that is shorter than the sequences of the tests."""
tiny_gemma2 = partial(
    _tiny,
    Gemma2ForCausalLM,
    Gemma2Config,
    layers=3,
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=6,
    attn_logit_softcapping=5.0,
)
"""Every other layer has a window, scores and logits are soft-capped, norms on both sides of each
half."""


def tiny_phi3(folder: Path, *, context: int = CONTEXT, **fields: Any) -> Path:
    """A random Phi-3: fused projections, and only half of each head is rotated."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return _tiny(
        Phi3ForCausalLM,
        Phi3Config,
        folder,
        context=context,
        rope_parameters=rope,
        original_max_position_embeddings=context,
        **fields,
    )


def tiny_gpt2(
    folder: Path,
    *,
    vocab: int = VOCABULARY,
    seed: int = 0,
    context: int = CONTEXT,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A random GPT-2: learned positions, layer norms with biases, weights [in, out]."""
    names = {name: value for name, value in SHAPE.items() if name.endswith(("_id", "range"))}
    config = GPT2Config(
        vocab_size=vocab, n_embd=64, n_layer=2, n_head=4, n_positions=context, n_inner=96, **names
    )
    return save_random(folder, GPT2LMHeadModel, config, seed, dtype)


FAMILIES = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "mistral": tiny_mistral,
    "mistral-sliding": tiny_sliding,
    "phi3": tiny_phi3,
    "gemma2": tiny_gemma2,
    "gpt2": tiny_gpt2,
}


def save_random(
    folder: Path, kind: type[PreTrainedModel], config: Any, seed: int, dtype: torch.dtype
) -> Path:
    """A random model of a class in `folder`, with a tokenizer; the same for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
    for parameter in model.parameters():
        if (
            parameter.ndim == 1
        ):  # zeros or ones otherwise, and a bias or a norm's weight that is lost would go unseen
            parameter.data += 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(seed + 1)
            )
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer.json: token i is the word "wi"; 0 and 1 are the special "<s>" and
    "</s>"."""
    tokenizer = Tokenizer(
        WordLevel({"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, vocab)}}, unk_token="w2")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))


def cache_row(cache: Cache, slot: int) -> torch.Tensor:
    """The keys and values [layers, 2, kv_heads, head_dim] of one slot, whichever layout a back end
    has."""
    if isinstance(cache, KVCache):
        return cache.rows[:, :, :, slot]
    assert isinstance(cache, BlockedCache)
    return torch.stack(
        [cache.keys[:, :, slot // 16, :, slot % 16], cache.values[:, :, slot]], dim=1
    )


def spoil(cache: Cache) -> None:
    """Fill a cache with what is no number: whatever reads a row that it should not shows."""
    for rows in (cache.rows,) if isinstance(cache, KVCache) else (cache.keys, cache.values):  # type: ignore[attr-defined]
        rows.fill_(float("nan"))


@lru_cache(maxsize=8)
def transformers_model(folder: Path) -> Any:
    """The model as transformers itself computes it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # its other one has no experts of every width
        trust_remote_code=False,
    ).eval()


@torch.no_grad()
def reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' own logits [T, V] for a sequence, without any cache."""
    logits: torch.Tensor = transformers_model(folder)(
        torch.tensor([list(tokens)]), use_cache=False
    ).logits[0]
    return logits


def reference_logprobs(folder: Path, tokens: Sequence[int]) -> list[list[float]]:
    """The log-probabilities of all tokens at each position but the first, each after those before
    it."""
    laws: list[list[float]] = (
        reference_logits(folder, tokens)[:-1].double().log_softmax(-1).tolist()
    )
    return laws


def reference_tokens(
    folder: Path,
    prompt: Sequence[int],
    count: int,
    *,
    key: bytes,
    sampling: Sampling,
    end: Sequence[int] = (),
) -> list[int]:
    """Return what the target alone emits: one token at a time, the whole sequence computed anew for
    each, chosen in plain numbers. It does not stop at an `end`."""
    reply: list[int] = []
    for _ in range(count):
        logits = reference_logits(folder, [*prompt, *reply])[-1].tolist()
        reply.append(
            reference_choice(
                reference_processed(logits, sampling, prompt, reply, end),
                sampling,
                key,
                len(prompt) + len(reply),
            )
        )
    return reply


def reference_processed(
    logits: Sequence[float],
    sampling: Sampling,
    prompt: Sequence[int],
    reply: Sequence[int],
    end: Sequence[int],
) -> list[float]:
    """Logit bias, repetition, presence and frequency penalty and the least number of tokens, in
    this order, as OpenAI and transformers define them."""
    biases, processed = dict(sampling.logit_bias), []
    for token, z in enumerate(logits):
        z += biases.get(token, 0.0)
        if token in prompt or token in reply:
            z = z * sampling.repetition_penalty if z < 0 else z / sampling.repetition_penalty
        z -= (
            reply.count(token) * sampling.frequency_penalty
            + (token in reply) * sampling.presence_penalty
        )
        processed.append(-math.inf if token in end and len(reply) < sampling.min_tokens else z)
    return processed


def reference_choice(logits: list[float], sampling: Sampling, key: bytes, position: int) -> int:
    """The token of the largest processed logit plus noise, the lowest id on ties."""
    if sampling.temperature == 0.0:
        return max(range(len(logits)), key=lambda v: (logits[v], -v))
    law = reference_law(logits, sampling)
    return max(
        (v for v in range(len(law)) if law[v] > 0.0),
        key=lambda v: (math.log(law[v]) + gumbel(key, position, v), -v),
    )


def reference_law(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """The probabilities after temperature, top-k, top-p and min-p, in plain numbers."""
    law = _softmax([z / sampling.temperature for z in logits])
    if sampling.top_k:
        least = sorted(law, reverse=True)[: sampling.top_k][-1]
        law = _normalised([p if p >= least else 0.0 for p in law])
    if sampling.top_p < 1.0:
        kept, mass = set(), 0.0
        for v in sorted(range(len(law)), key=lambda v: (-law[v], v)):
            if mass < sampling.top_p:
                kept.add(v)
            mass += law[v]
        law = _normalised([p if v in kept else 0.0 for v, p in enumerate(law)])
    return _normalised([p if p >= sampling.min_p * max(law) else 0.0 for p in law])


def _softmax(logits: list[float]) -> list[float]:
    return _normalised([math.exp(z - max(logits)) for z in logits])


def _normalised(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]
