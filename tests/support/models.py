"""Tiny random models on disk, and the slow obvious way to decode with one."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling

VOCABULARY = 48
CONTEXT = 96
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,  # ten times the usual one: logits far apart, so that a choice is never a matter of rounding
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def tiny_llama(folder: Path, *, vocab: int = VOCABULARY, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32, **shape: Any) -> Path:
    """A random Llama in `folder`, the same for the same arguments."""
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, **{"tie_word_embeddings": False, **SHAPE, **shape})
    return _save(folder, LlamaForCausalLM, config, seed, dtype)


def tiny_qwen2(folder: Path, *, vocab: int = VOCABULARY, seed: int = 0) -> Path:
    """A random Qwen2: biases in the projections, tied embeddings."""
    return _save(folder, Qwen2ForCausalLM, Qwen2Config(vocab_size=vocab, num_hidden_layers=2, tie_word_embeddings=True, **SHAPE), seed, torch.float32)


def tiny_mistral(folder: Path, *, vocab: int = VOCABULARY, seed: int = 0, window: int | None = None) -> Path:
    """A random Mistral whose layers attend to the last `window` tokens, None: to all."""
    return _save(folder, MistralForCausalLM, MistralConfig(vocab_size=vocab, num_hidden_layers=2, sliding_window=window, **SHAPE), seed, torch.float32)


def _save(folder: Path, kind: type[PreTrainedModel], config: Any, seed: int, dtype: torch.dtype) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros otherwise, and a bias that is lost would go unseen
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed + 1))
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer.json: token i is the word "wi"; 0 and 1 are the special "<s>" and "</s>"."""
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, vocab)}}, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))


@lru_cache(maxsize=8)
def transformers_model(folder: Path) -> Any:
    """The model as transformers itself computes it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False).eval()


@torch.no_grad()
def reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' own logits [T, V] for a sequence, without any cache."""
    logits: torch.Tensor = transformers_model(folder)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def reference_tokens(folder: Path, prompt: Sequence[int], count: int, *, key: bytes, sampling: Sampling) -> list[int]:
    """What the target alone emits: one token at a time, the whole sequence computed anew for each, chosen in plain numbers."""
    log = list(prompt)
    for _ in range(count):
        log.append(reference_choice(reference_logits(folder, log)[-1].tolist(), sampling, key, len(log)))
    return log[len(prompt) :]


def reference_choice(logits: list[float], sampling: Sampling, key: bytes, position: int) -> int:
    """The token of the largest processed logit plus noise, the lowest id on ties."""
    if sampling.temperature == 0.0:
        return max(range(len(logits)), key=lambda v: (logits[v], -v))
    law = reference_law(logits, sampling)
    return max((v for v in range(len(law)) if law[v] > 0.0), key=lambda v: (math.log(law[v]) + gumbel(key, position, v), -v))


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
