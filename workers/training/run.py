"""One training run: the optimizer, the learning-rate schedule, the budget, and a checkpoint from
which the same command resumes.

A checkpoint is a safetensors file with the counters as JSON in its metadata; nothing is ever
pickled. The batch is drawn by the number of the step, so a resumed run continues with fresh data;
only a run with the same settings and data is resumed. Progress is reported by callbacks."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dovetail.protocol.errors import UserError
from dovetail.workers.devices.opening import first_device
from dovetail.workers.training.process_group import ALONE, ProcessGroup
from dovetail.workers.training.workplace import replace_tensors

SETTINGS = ("seed", "rate", "warm_up", "decay", "weight_decay", "clip")
"""The fields of the pace that a resumed run may not change. Its length may change."""


@dataclass(frozen=True)
class Pace:
    """The pace of a run: the rate rises over `warm_up` steps and falls to zero over the minutes, or
    over `steps`."""

    minutes: float = 10.0
    steps: int | None = None
    rate: float = 1.5e-3
    warm_up: int = 60
    decay: Literal["linear", "cosine"] = "linear"
    weight_decay: float = 0.1
    clip: float = 1.0  # the maximum norm of a step's gradient
    seed: int = 0
    keep_every_s: float = 180.0
    device: str = field(default_factory=first_device)


@dataclass(frozen=True)
class Progress:
    """The progress of a run: `done` goes from 0 to 1, `loss` is in nats a token (nan while
    writing)."""

    stage: str
    done: float
    steps: int
    tokens: int
    loss: float = math.nan
    rate: float = 0.0
    spent_s: float = 0.0
    note: str = ""  # a note on this run, such as its last acceptance


@dataclass(frozen=True)
class Outcome:
    """The resources that a finished run used, its final running loss, and how many parameters it
    trained."""

    steps: int
    tokens: int
    minutes: float
    loss: float
    parameters: int


Callback = Callable[[Progress], None]
Step = Callable[[int, float], tuple[Tensor, int]]
"""(number of a step, share of the run that is over) -> its loss, and how many tokens it used."""


def silent(_: Progress) -> None:
    """Ignore progress."""


class Run:
    """A model in training: its optimizer, its counters, and its checkpoint in a file; `about`
    identifies the run, as JSON."""

    def __init__(
        self,
        model: nn.Module,
        pace: Pace,
        checkpoint: Path | None,
        about: Mapping[str, Any],
        peers: ProcessGroup = ALONE,
    ) -> None:
        self.model, self.pace, self.checkpoint, self.peers = (
            model.to(pace.device),
            pace,
            checkpoint,
            peers,
        )
        self.about: dict[str, Any] = json.loads(
            json.dumps({**about, **{name: getattr(pace, name) for name in SETTINGS}})
        )
        self.optimizer = optimizer_of(model, pace)
        self.steps, self.tokens, self.spent_s, self.loss = 0, 0, 0.0, math.nan
        self.notes: list[dict[str, Any]] = []  # further notes stored with the checkpoint, as JSON
        if checkpoint is not None and checkpoint.is_file():
            self._resume(checkpoint)
        self._kept = time.monotonic()

    @property
    def done(self) -> float:
        """The share of the run that is done."""
        limit = self.pace.steps
        return min(
            1.0, self.steps / limit if limit is not None else self.spent_s / 60 / self.pace.minutes
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        left = (
            1 - self.done
            if self.pace.decay == "linear"
            else (1 + math.cos(math.pi * self.done)) / 2
        )
        return self.pace.rate * min(1.0, (self.steps + 1) / self.pace.warm_up) * max(left, 0.003)

    def step(self, step: Step) -> None:
        """Process one batch of every process, and make one step of the optimizer."""
        begin = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        loss, tokens = step(self.steps, self.done)
        loss.backward()  # type: ignore[no-untyped-call]
        self.peers.average(self.model.parameters())
        nn.utils.clip_grad_norm_(self.model.parameters(), self.pace.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        self.loss = value if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * value
        self.steps += 1
        self.tokens += tokens * self.peers.count
        self.spent_s = self.peers.agree(self.spent_s + time.monotonic() - begin)

    def progress(self, stage: str, note: str = "") -> Progress:
        """Return the progress so far."""
        return Progress(
            stage, self.done, self.steps, self.tokens, self.loss, self.rate, self.spent_s, note
        )

    def keep_now_and_then(self) -> None:
        """Write the checkpoint if the last one is old."""
        if time.monotonic() - self._kept > self.pace.keep_every_s:
            self.keep()

    def keep(self) -> None:
        """Write the checkpoint: weights and moments as tensors, the rest as JSON."""
        self._kept = time.monotonic()
        if self.checkpoint is None or self.peers.rank:
            return
        counters = {
            "steps": self.steps,
            "tokens": self.tokens,
            "spent_s": self.spent_s,
            "loss": self.loss,
            "notes": self.notes,
        }
        replace_tensors(
            self.checkpoint,
            dict(self._state()),
            {"about": json.dumps(self.about), "counters": json.dumps(counters)},
        )

    def outcome(self) -> Outcome:
        """Return the resources used so far."""
        return Outcome(
            self.steps, self.tokens, self.spent_s / 60, self.loss, count_parameters(self.model)
        )

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield f"weight:{name}", parameter.detach().contiguous().cpu()
            for key, value in self.optimizer.state[parameter].items():
                yield f"{key}:{name}", value.detach().clone().cpu()

    def _resume(self, file: Path) -> None:
        about, counters, tensors = read_checkpoint(file)
        for name, value in self.about.items():
            if about.get(name) != value:
                raise UserError(
                    f"{file.parent} holds an unfinished run of other {name} "
                    f"({about.get(name)}, now {value}): give another --out, or remove it"
                )
        parameters = dict(self.model.named_parameters())
        if {f"weight:{n}": p.shape for n, p in parameters.items()} != {
            n: t.shape for n, t in tensors.items() if n.startswith("weight:")
        }:
            raise UserError(
                f"{file.parent} holds the unfinished run of a model of another shape: give "
                "another --out, or remove it"
            )
        for key, value in tensors.items():
            kind, name = key.split(":", 1)
            if kind == "weight":
                parameters[name].data.copy_(value)
            else:
                self.optimizer.state[parameters[name]][kind] = (
                    value if kind == "step" else value.to(self.pace.device)
                )
        self.steps, self.tokens = counters["steps"], counters["tokens"]
        self.spent_s, self.loss, self.notes = (
            counters["spent_s"],
            counters["loss"],
            counters["notes"],
        )


def read_checkpoint(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint's identity of the run, counters, and tensors. Raises `UserError` if the
    file is damaged."""
    try:
        with safe_open(file, framework="pt") as content:
            names = content.keys()  # it is not a mapping
            metadata, tensors = content.metadata(), {n: content.get_tensor(n) for n in names}
        return json.loads(metadata["about"]), json.loads(metadata["counters"]), tensors
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({error}): remove it to start again") from None


def optimizer_of(model: nn.Module, pace: Pace) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices, none for norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": pace.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=pace.rate, betas=(0.9, 0.95))


def carry_out(
    stage: str,
    run: Run,
    step: Step,
    *,
    progress: Callback = silent,
    between: Callable[[], str] = str,
) -> Outcome:
    """Step until the run is over, keeping a checkpoint every few minutes; `between` is called after
    every step and returns the note of its progress."""
    run.model.train()
    while run.done < 1:
        run.step(step)
        progress(run.progress(stage, between()))
        run.keep_now_and_then()
    run.keep()
    run.model.eval()
    return run.outcome()


def count_parameters(model: nn.Module) -> int:
    """Count every parameter once, including tied ones."""
    return sum(p.numel() for p in model.parameters())
