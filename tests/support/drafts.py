"""Tiny random models for tests of the draft, and the plain way to compute what it computes with a tree."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.settings import Sampling
from dovetail.workers.models import attention
from dovetail.workers.models.attention import Segment
from dovetail.workers.models.checkpoint import Checkpoint
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.speculation.noise import gumbel_noise
from dovetail.workers.speculation.sampling import choose, process_logits

VOCABULARY = 61


def random_llama(*, seed: int = 0, vocabulary: int = VOCABULARY, context: int = 96) -> LanguageModel:
    """A Llama of two layers with random weights, large enough for its choices to depend on what came before."""
    attention.register()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        attn_implementation=attention.IMPLEMENTATION,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    checkpoint = Checkpoint("random", Path(), "random", b"{}", VocabularyFacts(digest="random", size=vocabulary))
    return LanguageModel(model, checkpoint, digest="random")


def plain_logits(model: LanguageModel, log: Sequence[int]) -> Tensor:
    """Logits [V] after the last token of `log`, computed alone and from nothing."""
    count = len(log)
    segment = Segment(model.new_cache(count), 0, count)
    return model.forward(torch.tensor(log), torch.arange(count), [segment], rows=torch.tensor([count - 1]))[0]


def plain_choice(model: LanguageModel, log: Sequence[int], sampling: Sampling, key: bytes) -> int:
    """What a target of that model chooses after `log`."""
    logits = process_logits(plain_logits(model, log)[None], sampling)
    noise = gumbel_noise(key, len(log), model.vocabulary_size)[None] if sampling.temperature > 0 else None
    return int(choose(logits, noise)[0])
