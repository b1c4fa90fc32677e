"""transformers' assisted generation with two models: the peer that `dovetail bench` measures itself
against.

Nothing of ours takes part in it: the library's modules, attention (SDPA), cache, schedule and rule
of acceptance, all as they come. Knows token ids and how long each round took; nothing of links, and
no worker uses it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.settings import Sampling
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from peers.generated import Generated, Round


class AssistedModel:
    """A target and its assistant, both in fp32 on the CPU (or both in bf16, where the target is
    asked for in bf16)."""

    def __init__(self, target: str, assistant: str, *, weights: str) -> None:
        """`target` and `assistant` are folders or hub ids of whole models."""
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        self.dtype = torch.bfloat16 if weights == "bf16" else torch.float32
        folder = find_folder(target)
        self.tokenizer, self.vocabulary = read_tokenizer(folder)
        self._target = self._load(folder)
        self._assistant = self._load(find_folder(assistant))
        self._watch = _Watch()
        self._target.register_forward_pre_hook(self._watch.before, with_kwargs=True)
        self._target.register_forward_hook(self._watch.after)

    def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, max_tokens: int, seed: int, threads: int
    ) -> Generated:
        """Decode up to `max_tokens` tokens; the seed is that of torch."""
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._watch.begin()
        began_ns = time.monotonic_ns()
        output = self._target.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=self._assistant,
            generation_config=generation_config(sampling, max_tokens, self.vocabulary),
            streamer=self._watch,
        )
        return Generated(
            tuple(output[0, len(prompt) :].tolist()), began_ns, tuple(self._watch.rounds)
        )

    def _load(self, folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=self.dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        return model.eval()


def generation_config(
    sampling: Sampling, max_tokens: int, vocabulary: VocabularyFacts
) -> GenerationConfig:
    """Return what transformers is to do for `sampling`, of which it takes temperature, top-k, top-p
    and min-p; nothing is left to defaults of the checkpoint."""
    ends: dict[str, Any] = (
        {"eos_token_id": list(vocabulary.end), "pad_token_id": vocabulary.end[0]}
        if vocabulary.end
        else {}
    )
    if sampling.temperature == 0.0:
        return GenerationConfig(do_sample=False, max_new_tokens=max_tokens, **ends)
    kept = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }
    return GenerationConfig(do_sample=True, max_new_tokens=max_tokens, **kept, **ends)


@dataclass
class _Watch(BaseStreamer):  # type: ignore[misc]  # untyped library
    """Notes every pass of the target, and what transformers commits after it."""

    rounds: list[Round] = field(default_factory=list)
    _rows: int = 0
    _began_ns: int = 0
    _pass_ns: int = 0
    _prompt_seen: bool = False

    def begin(self) -> None:
        """A new reply."""
        self.rounds = []
        self._prompt_seen = False

    def before(self, _model: Any, _arguments: Any, named: dict[str, Any]) -> None:
        self._rows = named["input_ids"].shape[1]
        self._began_ns = time.monotonic_ns()

    def after(self, _model: Any, _arguments: Any, _output: Any) -> None:
        self._pass_ns = time.monotonic_ns() - self._began_ns

    def put(self, value: Any) -> None:
        """The prompt first, then what each round committed."""
        if self._prompt_seen:
            self.rounds.append(Round(time.monotonic_ns(), value.numel(), self._rows, self._pass_ns))
        self._prompt_seen = True

    def end(self) -> None:
        """The reply is whole."""
