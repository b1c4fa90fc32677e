"""Distils a smaller causal language model from a larger one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dovetail.workers.training.data.examples import Example
from dovetail.workers.training.run import Callback, Outcome, silent
from dovetail.workers.training.small import (
    Checkpoint,
    Settings,
    Shape,
    StepLoss,
    Text,
    begun_from,
    carry_on,
    digest_of_weights,
    load_model,
    logits_of,
    mean_of,
    new_model,
    read_text,
    save_model,
)
from dovetail.workers.training.workplace import Workplace


@dataclass(frozen=True)
class Agreement:
    """The agreement of a draft with its target: share of equal most likely tokens, mean sum of
    min(p, q), tokens measured."""

    greedy: float
    overlap: float
    tokens: int


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


def distil(
    target: nn.Module,
    draft: nn.Module,
    rows: Sequence[Example],
    settings: Settings,
    *,
    checkpoint: Checkpoint | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Distil the draft from the target in place."""
    target.to(settings.device).eval()
    text = Text(rows, settings.context)
    return carry_on(
        "distilling",
        draft,
        text,
        distillation_loss(target, settings.cross_entropy),
        settings,
        checkpoint,
        progress,
    )


def distil_folder(
    target: Path,
    files: Sequence[Path],
    place: Workplace,
    shape: Shape,
    settings: Settings,
    *,
    init: Path | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Distil a draft of that shape, or the one in `init`, from the model in `target`, and write its
    folder; see `train_folder`."""
    teacher = load_model(target)
    draft = (
        load_model(init)
        if init is not None
        else new_model(shape, target, settings.context, settings.seed)
    )
    about = {**begun_from(init, draft, shape), "target": digest_of_weights(teacher)}
    outcome = distil(
        teacher,
        draft,
        read_text(files, target),
        settings,
        checkpoint=Checkpoint(place.checkpoint, about),
        progress=progress,
    )
    with place.result() as folder:
        save_model(draft, target, folder)
    return outcome


@torch.no_grad()
def measure(
    target: nn.Module,
    draft: nn.Module,
    rows: Sequence[Example],
    *,
    batches: int = 16,
    context: int = 256,
    seed: int = 1,
) -> Agreement:
    """Measure how well the draft follows the target, over the learned ids only."""
    text, rng = Text(rows, context), np.random.default_rng(seed)
    equal = overlap = 0.0
    tokens = 0
    for _ in range(batches):
        ids, learn = text.batch(8, rng)
        p = torch.softmax(target(input_ids=ids[:, :-1], use_cache=False).logits.float(), -1)[learn]
        q = torch.softmax(draft(input_ids=ids[:, :-1], use_cache=False).logits.float(), -1)[learn]
        equal += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p, q).sum().item()
        tokens += len(p)
    return Agreement(equal / max(tokens, 1), overlap / max(tokens, 1), tokens)
