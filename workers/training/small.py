"""Trains a small causal language model on sequences of tokens (see `data/corpus.py`), or distils it
from a larger one. A run is resumed from the checkpoint in its folder, and nothing is ever pickled.
Progress is reported by callbacks."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from dovetail.protocol.errors import UserError
from dovetail.workers.training.data.examples import Example, digest_of
from dovetail.workers.training.run import Callback, Outcome, Pace, Run, carry_out, silent
from dovetail.workers.training.workplace import Workplace

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)
FILES = frozenset(("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES))


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama; the vocabulary comes from the tokenizer."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 352

    def parameters(self, vocabulary: int) -> int:
        """Return how many parameters a model of this shape has, with tied embeddings."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * head * self.kv_heads
        return (
            vocabulary * self.hidden
            + self.layers * (attention + 3 * self.hidden * self.mlp + 2 * self.hidden)
            + self.hidden
        )


@dataclass(frozen=True)
class Settings(Pace):
    """The settings of a training."""

    compiled: bool = False
    """Compile the step: half a minute at the start, then up to half as fast again. On a CPU it
    needs a C++ compiler."""
    batch: int = 8
    context: int = 512
    cross_entropy: float = 0.1
    """The weight of the plain cross entropy relative to the divergence in distillation."""


StepLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Text:
    """Sequences as one row of ids."""

    def __init__(self, rows: Sequence[Example], context: int) -> None:
        self.context, self.digest = context, digest_of(rows)
        self.ids = (
            np.concatenate([row.tokens for row in rows]) if rows else np.empty(0, dtype=np.int64)
        )
        self.learn = (
            np.concatenate([row.learn for row in rows]) if rows else np.empty(0, dtype=np.bool_)
        )
        starts = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
        self.starts = starts[starts + context < len(self.ids)]
        if not len(self.starts):
            raise UserError(
                f"{len(self.ids)} tokens are too few to learn from: no sequence begins "
                f"{context} tokens before their end"
            )

    def batch(self, size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw rows of context + 1 ids, each beginning with a sequence, and which of their targets
        are learned."""
        rows = rng.choice(self.starts, size)[:, None] + np.arange(self.context + 1)
        return torch.from_numpy(self.ids[rows]), torch.from_numpy(self.learn[rows[:, 1:]])


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppress transformers' progress bars for loading and saving within this block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def new_model(shape: Shape, tokenizer_folder: Path, context: int, seed: int) -> nn.Module:
    """Return a Llama of that shape with random weights, for the tokenizer's vocabulary."""
    tokenizer = load_tokenizer(tokenizer_folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return cast(nn.Module, LlamaForCausalLM(config))


def load_model(folder: Path) -> nn.Module:
    """Load the causal language model of a folder, in 32-bit floats."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model folder: it has no config.json")
    return cast(nn.Module, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json")
    return AutoTokenizer.from_pretrained(folder)


def workplace(out: Path) -> Workplace:
    """Return the workplace of a model whose folder will be `out`."""
    return Workplace(out.resolve(), "small model", FILES)


def save_model(model: nn.Module, tokenizer_folder: Path, folder: Path) -> None:
    """Write a folder: weights in fp16 with their tokenizer."""
    half = cast(Any, _copy_in(model, torch.float16))
    half.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)


def _copy_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    other = type(model)(cast(Any, model).config)
    other.load_state_dict(model.state_dict())
    return other.to(dtype)


@dataclass(frozen=True)
class Checkpoint:
    """The file from which a run continues, and its identity besides data and settings."""

    file: Path
    about: Mapping[str, Any]


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return logits for every position, computed in bf16 and returned in 32 bits."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def next_token_loss(model: nn.Module, rows: Tensor, learn: Tensor) -> Tensor:
    """Return the cross entropy of the next token, where it is learned."""
    logits = logits_of(model, rows[:, :-1])
    return mean_of(
        nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"),
        learn,
    )


def mean_of(losses: Tensor, learn: Tensor) -> Tensor:
    """Return the mean over the learned tokens, without indexing, so that the step can be compiled
    as a whole."""
    return (losses * learn.flatten()).sum() / learn.sum().clamp(min=1)


def distillation_loss(target: nn.Module, cross_entropy: float) -> StepLoss:
    """Return the loss: the divergence of the draft from the target's whole distribution, plus a
    little of the plain cross entropy."""

    def loss_of(draft: nn.Module, rows: Tensor, learn: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(logits_of(target, rows[:, :-1]), -1).flatten(0, 1)
        given = torch.log_softmax(logits_of(draft, rows[:, :-1]), -1).flatten(0, 1)
        divergence = (wanted.exp() * (wanted - given)).sum(-1)
        surprise = nn.functional.nll_loss(given, rows[:, 1:].flatten(), reduction="none")
        return mean_of(divergence + cross_entropy * surprise, learn)

    return loss_of


def train(
    model: nn.Module,
    rows: Sequence[Example],
    settings: Settings,
    *,
    target: nn.Module | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Train the model in place: on text or, with a `target`, by distillation from it. Batches are
    drawn by seed and step."""
    stage, loss_of = "training", cast(StepLoss, next_token_loss)
    if target is not None:
        target.to(settings.device).eval()
        stage, loss_of = "distilling", distillation_loss(target, settings.cross_entropy)
    text = Text(rows, settings.context)
    about = {
        "stage": stage,
        "data": text.digest,
        "batch": settings.batch,
        "context": settings.context,
        "cross_entropy": settings.cross_entropy,
        **(checkpoint.about if checkpoint else {}),
    }
    run = Run(model, settings, checkpoint.file if checkpoint else None, about)
    computed = cast(StepLoss, torch.compile(loss_of)) if settings.compiled else loss_of

    def step(number: int, _: float) -> tuple[Tensor, int]:
        rows, learn = text.batch(settings.batch, np.random.default_rng([settings.seed, number]))
        return computed(model, rows.to(settings.device), learn.to(settings.device)), learn.numel()

    return carry_out(stage, run, step, progress=progress)


def train_folder(
    rows: Sequence[Example],
    place: Workplace,
    settings: Settings,
    *,
    init: Path | None = None,
    shape: Shape | None = None,
    tokenizer: Path | None = None,
    target: Path | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Train a model on sequences, and write its folder: from the weights in `init`, or from a shape
    and a tokenizer; or distil it from the model in `target`, whose tokenizer it has. The caller
    holds `place`."""
    source, shape = target or init or tokenizer, shape or Shape()
    if source is None:
        raise UserError("training needs a model to begin with, or a tokenizer for a new one")
    model = (
        load_model(init)
        if init is not None
        else new_model(shape, source, settings.context, settings.seed)
    )
    about = {"init": digest_of_weights(model)} if init is not None else asdict(shape)
    teacher = None if target is None else load_model(target)
    if teacher is not None:
        about["target"] = digest_of_weights(teacher)
    outcome = train(
        model,
        rows,
        settings,
        target=teacher,
        checkpoint=Checkpoint(place.checkpoint, about),
        progress=progress,
    )
    with place.result() as folder:
        save_model(model, source, folder)
    return outcome


def digest_of_weights(model: nn.Module) -> str:
    """Return the SHA-256 of all weights."""
    content = hashlib.sha256()
    for name, value in model.state_dict().items():
        content.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
