"""One training run: the optimizer, the rate over time, what has been spent, and a checkpoint that a run of the same command goes on from.

A checkpoint is a folder of safetensors and JSON; nothing is ever pickled. Every step is given its number, from which the batch is drawn, so a
resumed run goes on with fresh data. Knows no model, no data and no loss; it shows no progress itself: it calls back.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dovetail.protocol.errors import UserError
from dovetail.workers.training.peers import ALONE, Peers


@dataclass(frozen=True)
class Pace:
    """How a run goes: the rate rises over `warm_up` steps and falls to zero over the minutes, or over `steps`."""

    minutes: float = 10.0
    steps: int | None = None
    rate: float = 1.5e-3
    warm_up: int = 60
    decay: Literal["linear", "cosine"] = "linear"
    weight_decay: float = 0.1
    clip: float = 1.0
    """The longest that the gradient of a step may be."""
    seed: int = 0
    keep_every_s: float = 180.0
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `done` goes from 0 to 1, `loss` is in nats a token (nan while writing)."""

    stage: str
    done: float
    steps: int
    tokens: int
    loss: float = math.nan
    rate: float = 0.0
    spent_s: float = 0.0
    note: str = ""
    """What else there is to say of this run, such as its last acceptance."""


@dataclass(frozen=True)
class Outcome:
    """What a finished run used up, its running loss at the end, and how many parameters it trained."""

    steps: int
    tokens: int
    minutes: float
    loss: float
    parameters: int


Callback = Callable[[Progress], None]
Step = Callable[[int, float], tuple[Tensor, int]]
"""Given the number of a step and the share of the run that is over: its loss, and how many tokens it looked at."""


def silent(_: Progress) -> None:
    """The callback of who does not want to know."""


class Run:
    """A model in training: its optimizer, what has been spent, and its checkpoint in `folder`."""

    def __init__(self, model: nn.Module, pace: Pace, folder: Path | None, peers: Peers = ALONE) -> None:
        self.model, self.pace, self.folder, self.peers = model.to(pace.device), pace, folder, peers
        self.optimizer = optimizer_of(model, pace)
        self.steps, self.tokens, self.spent_s, self.loss = 0, 0, 0.0, math.nan
        self.notes: list[dict[str, Any]] = []
        """What is to be kept with the checkpoint besides, as JSON."""
        if folder is not None and (folder / "run.json").is_file():
            self._resume(folder)
        self._kept = time.monotonic()

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        limit = self.pace.steps
        return min(1.0, self.steps / limit if limit is not None else self.spent_s / 60 / self.pace.minutes)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        left = 1 - self.done if self.pace.decay == "linear" else (1 + math.cos(math.pi * self.done)) / 2
        return self.pace.rate * min(1.0, (self.steps + 1) / self.pace.warm_up) * max(left, 0.003)

    def step(self, step: Step) -> None:
        """One batch of every process, and one step of the optimizer."""
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
        """Where the run stands now."""
        return Progress(stage, self.done, self.steps, self.tokens, self.loss, self.rate, self.spent_s, note)

    def keep_now_and_then(self) -> None:
        """Write the checkpoint if the last one is old."""
        if time.monotonic() - self._kept > self.pace.keep_every_s:
            self.keep()

    def keep(self) -> None:
        """Write the checkpoint: weights and moments as safetensors, the counters as JSON."""
        self._kept = time.monotonic()
        if self.folder is None or self.peers.rank:
            return
        beside = self.folder.with_name(self.folder.name + ".new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file({n: p.detach().contiguous().cpu() for n, p in self.model.named_parameters()}, beside / "weights.safetensors")
        save_file(dict(self._moments()), beside / "moments.safetensors")
        counters = {"steps": self.steps, "tokens": self.tokens, "spent_s": self.spent_s, "loss": self.loss, "seed": self.pace.seed, "notes": self.notes}
        (beside / "run.json").write_text(json.dumps(counters))
        replace_folder(beside, self.folder)

    def outcome(self) -> Outcome:
        """What the run has used up."""
        return Outcome(self.steps, self.tokens, self.spent_s / 60, self.loss, count_parameters(self.model))

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                yield f"{key}:{name}", value.detach().clone().cpu()

    def _resume(self, folder: Path) -> None:
        weights, moments = load_file(folder / "weights.safetensors"), load_file(folder / "moments.safetensors")
        counters: Mapping[str, Any] = json.loads((folder / "run.json").read_text())
        parameters = dict(self.model.named_parameters())
        if {n: p.shape for n, p in parameters.items()} != {n: w.shape for n, w in weights.items()}:
            raise UserError(f"{folder} holds the unfinished run of a model of another shape: remove it to begin anew")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        for key, value in moments.items():
            kind, name = key.split(":", 1)
            self.optimizer.state[parameters[name]][kind] = value if kind == "step" else value.to(self.pace.device)
        self.steps, self.tokens = counters["steps"], counters["tokens"]
        self.spent_s, self.loss, self.notes = counters["spent_s"], counters["loss"], counters["notes"]


def optimizer_of(model: nn.Module, pace: Pace) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices, none for norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": pace.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=pace.rate, betas=(0.9, 0.95))


def carry_out(stage: str, run: Run, step: Step, *, progress: Callback = silent, between: Callable[[], str] = str) -> Outcome:
    """Step until the run is over, keeping a checkpoint every few minutes; `between` is called after every step and gives the note of its progress."""
    run.model.train()
    while run.done < 1:
        run.step(step)
        progress(run.progress(stage, between()))
        run.keep_now_and_then()
    run.keep()
    run.model.eval()
    return run.outcome()


def count_parameters(model: nn.Module) -> int:
    """Every parameter once, tied ones too."""
    return sum(p.numel() for p in model.parameters())


def unfinished(out: Path) -> Path:
    """Where the checkpoint of the run that will write `out` lies."""
    return out.with_name(out.name + ".unfinished")


def replace_folder(new: Path, old: Path) -> None:
    """Put a whole folder in the place of another."""
    gone = old.with_name(old.name + ".old")
    shutil.rmtree(gone, ignore_errors=True)
    if old.exists():
        old.rename(gone)
    new.rename(old)
    shutil.rmtree(gone, ignore_errors=True)
