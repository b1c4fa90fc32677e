"""Train a small causal language model on token files, let it write token files of its own, and distil a smaller one from those.

A token file is a row of little-endian uint16 ids; every sequence in it begins with the begin id. A file of the same name with the ending
`.mask` may lie beside it, one byte an id: only ids whose byte is 1 are learned (the prompts of a target's own outputs are not).
A run is resumed from the checkpoint in its folder, and nothing is ever pickled. This module does not know where a text came from,
and it shows no progress itself: it calls back.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from dovetail.protocol.errors import UserError

Ids = npt.NDArray[np.uint16]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama; the vocabulary comes from the tokenizer."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 352

    def parameters(self, vocabulary: int) -> int:
        """How many parameters a model of this shape has, input and output embedding being one."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * head * self.kv_heads
        return vocabulary * self.hidden + self.layers * (attention + 3 * self.hidden * self.mlp + 2 * self.hidden) + self.hidden


@dataclass(frozen=True)
class Settings:
    """How a model is trained: the rate rises over `warm_up` steps and falls linearly to zero over the minutes, or over `steps`."""

    minutes: float = 10.0
    steps: int | None = None
    batch: int = 8
    context: int = 512
    rate: float = 1.5e-3
    warm_up: int = 60
    weight_decay: float = 0.1
    cross_entropy: float = 0.1
    """The weight of the plain cross entropy beside the divergence, when a model is distilled."""
    seed: int = 0
    keep_every_s: float = 180.0
    compiled: bool = False
    """Compile the step: half a minute at the start, then up to half as fast again. On a CPU it needs a C++ compiler."""
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Writing:
    """How a target writes: every prompt once at each temperature, `batch` prompts at a time."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 224
    batch: int = 192
    context: int = 512
    seed: int = 0
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


@dataclass(frozen=True)
class Outcome:
    """What a finished run used up, its running loss at the end, and how many parameters it trained."""

    steps: int
    tokens: int
    minutes: float
    loss: float
    parameters: int


@dataclass(frozen=True)
class Agreement:
    """How well a draft follows its target: share of equal most likely tokens, mean sum of min(p, q), tokens measured."""

    greedy: float
    overlap: float
    tokens: int


Callback = Callable[[Progress], None]
StepLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def silent(_: Progress) -> None:
    """The callback of who does not want to know."""


class Text:
    """Token files as one row of ids, and where its sequences begin."""

    def __init__(self, files: Sequence[Path], begin: int, context: int) -> None:
        missing = [str(f) for f in files if not f.is_file()]
        if missing or not files:
            raise UserError(f"no token file {', '.join(missing)}" if missing else "no token file was given")
        self.ids: Ids = np.concatenate([np.fromfile(f, dtype="<u2") for f in files])
        self.learn = np.concatenate([_mask_of(f) for f in files])
        self.context = context
        starts = np.flatnonzero(self.ids == begin)
        self.starts = starts[starts + context < len(self.ids)]
        if not len(self.starts):
            raise UserError(f"the token files hold no sequence that begins with id {begin} and is followed by {context} more ids")

    def batch(self, size: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Rows of context + 1 ids, each beginning with a sequence, and which of the targets are learned."""
        rows = rng.choice(self.starts, size)[:, None] + np.arange(self.context + 1)
        return torch.from_numpy(self.ids[rows].astype(np.int64)), torch.from_numpy(self.learn[rows[:, 1:]])


def _mask_of(file: Path) -> npt.NDArray[np.bool_]:
    mask = file.with_suffix(".mask")
    if mask.is_file():
        return np.fromfile(mask, dtype=np.uint8).astype(np.bool_)
    return np.ones(file.stat().st_size // 2, dtype=np.bool_)


# Models and folders


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Transformers draws bars of its own while it loads and saves; within this block it draws none."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def new_model(shape: Shape, tokenizer_folder: Path, context: int, seed: int) -> nn.Module:
    """A Llama of that shape with random weights, for the vocabulary of the tokenizer."""
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
    """The causal language model of a folder, in 32-bit floats."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model folder: it has no config.json")
    return cast(nn.Module, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json")
    return AutoTokenizer.from_pretrained(folder)


def save_model(model: nn.Module, tokenizer_folder: Path, out: Path) -> None:
    """Write weights in fp16 with their tokenizer. The folder appears whole or not at all: it is written beside and renamed."""
    beside = out.with_name(out.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    half = cast(Any, _copy_in(model, torch.float16))
    half.save_pretrained(beside)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, beside / name)
    for file in beside.iterdir():
        file.chmod(0o644)
    _replace_folder(beside, out)


def count_parameters(model: nn.Module) -> int:
    """Every parameter once, tied ones too."""
    return sum(p.numel() for p in model.parameters())


def _copy_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    other = type(model)(cast(Any, model).config)
    other.load_state_dict(model.state_dict())
    return other.to(dtype)


def _replace_folder(new: Path, old: Path) -> None:
    gone = old.with_name(old.name + ".old")
    shutil.rmtree(gone, ignore_errors=True)
    if old.exists():
        old.rename(gone)
    new.rename(old)
    shutil.rmtree(gone, ignore_errors=True)


# One training run


class _Run:
    """A model in training: its optimizer, what has been spent, and its checkpoint."""

    def __init__(self, model: nn.Module, settings: Settings, folder: Path | None) -> None:
        self.model, self.settings, self.folder = model.to(settings.device), settings, folder
        self.optimizer = _optimizer(model, settings)
        self.steps, self.tokens, self.spent_s, self.loss = 0, 0, 0.0, math.nan
        if folder is not None and (folder / "run.json").is_file():
            self._resume(folder)

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        limit = self.settings.steps
        return min(1.0, self.steps / limit if limit is not None else self.spent_s / 60 / self.settings.minutes)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.settings.rate * min(1.0, (self.steps + 1) / self.settings.warm_up) * max(1 - self.done, 0.003)

    def step(self, text: Text, loss_of: StepLoss) -> None:
        """One batch, drawn by seed and step so that a resumed run goes on with fresh text."""
        begin = time.monotonic()
        rows, learn = text.batch(self.settings.batch, np.random.default_rng([self.settings.seed, self.steps]))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        loss = loss_of(self.model, rows.to(self.settings.device), learn.to(self.settings.device))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        self.loss = value if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * value
        self.steps += 1
        self.tokens += rows.shape[0] * (rows.shape[1] - 1)
        self.spent_s += time.monotonic() - begin

    def keep(self) -> None:
        """Write the checkpoint: weights and moments as safetensors, the counters as JSON."""
        if self.folder is None:
            return
        beside = self.folder.with_name(self.folder.name + ".new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_file({n: p.detach().contiguous().cpu() for n, p in self.model.named_parameters()}, beside / "weights.safetensors")
        save_file(dict(self._moments()), beside / "moments.safetensors")
        counters = {"steps": self.steps, "tokens": self.tokens, "spent_s": self.spent_s, "loss": self.loss, "seed": self.settings.seed}
        (beside / "run.json").write_text(json.dumps(counters))
        _replace_folder(beside, self.folder)

    def outcome(self) -> Outcome:
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
            self.optimizer.state[parameters[name]][kind] = value if kind == "step" else value.to(self.settings.device)
        self.steps, self.tokens = counters["steps"], counters["tokens"]
        self.spent_s, self.loss = counters["spent_s"], counters["loss"]


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices, none for norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95))


def _run(stage: str, model: nn.Module, text: Text, loss_of: StepLoss, settings: Settings, folder: Path | None, progress: Callback) -> Outcome:
    """Step until the run is over, keeping a checkpoint every few minutes."""
    run = _Run(model, settings, folder)
    model.train()
    if settings.compiled:
        loss_of = cast(StepLoss, torch.compile(loss_of))
    kept = time.monotonic()
    while run.done < 1:
        run.step(text, loss_of)
        progress(Progress(stage, run.done, run.steps, run.tokens, run.loss, run.rate))
        if time.monotonic() - kept > settings.keep_every_s:
            run.keep()
            kept = time.monotonic()
    run.keep()
    model.eval()
    return run.outcome()


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits for every position, computed in bf16 and returned in 32 bits."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


# Training on text


def next_token_loss(model: nn.Module, rows: Tensor, learn: Tensor) -> Tensor:
    """Cross entropy of the next token, where it is learned."""
    logits = logits_of(model, rows[:, :-1])
    return _mean(nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"), learn)


def _mean(losses: Tensor, learn: Tensor) -> Tensor:
    """The mean over what is learned. Nothing is picked by index, so that the step can be compiled as a whole."""
    return (losses * learn.flatten()).sum() / learn.sum().clamp(min=1)


def train(
    model: nn.Module,
    files: Sequence[Path],
    settings: Settings,
    *,
    begin: int = 0,
    checkpoint: Path | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Train the model on token files in place."""
    return _run("training", model, Text(files, begin, settings.context), next_token_loss, settings, checkpoint, progress)


def train_folder(
    files: Sequence[Path],
    out: Path,
    settings: Settings,
    *,
    init: Path | None = None,
    shape: Shape | None = None,
    tokenizer: Path | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Train a model on token files and write its folder: from the weights in `init`, or from a shape and a tokenizer."""
    source = init or tokenizer
    if source is None:
        raise UserError("training needs a model to begin with, or a tokenizer for a new one")
    model = load_model(init) if init is not None else new_model(shape or Shape(), source, settings.context, settings.seed)
    outcome = train(model, files, settings, begin=load_tokenizer(source).bos_token_id, checkpoint=_unfinished(out), progress=progress)
    save_model(model, source, out)
    shutil.rmtree(_unfinished(out), ignore_errors=True)
    return outcome


def _unfinished(out: Path) -> Path:
    return out.with_name(out.name + ".unfinished")


# A target's own outputs


def read_prompts(file: Path) -> list[list[str]]:
    """The turns of every line of a file of prompts: `{"turns": [...]}` or `{"prompt": "..."}`."""
    found: list[list[str]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            found.append([str(t) for t in row["turns"]] if "turns" in row else [str(row["prompt"])])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}, line {number}: not a JSON object with `turns` or `prompt`") from error
    if not found:
        raise UserError(f"{file} holds no prompt")
    return found


def render(tokenizer: Any, turns: Sequence[str]) -> list[int]:
    """The ids before the target's answer: turns are the user's and the assistant's in alternation, the last one is the user's."""
    last_user = turns[: len(turns) - (len(turns) + 1) % 2]
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(last_user)]
    return cast(list[int], list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)))


def write_outputs(target: Path, prompts: Sequence[Sequence[str]], out: Path, writing: Writing, *, progress: Callback = silent) -> Path:
    """Write what the target answers as the token file `out` and its mask.

    Finished batches lie beside it in a folder and are not written again.
    """
    tokenizer, model = load_tokenizer(target), load_model(target).to(writing.device).eval()
    room = writing.context - writing.new_tokens
    rendered = sorted((ids for ids in (render(tokenizer, p) for p in prompts) if len(ids) <= room), key=len)
    if not rendered:
        raise UserError(f"no prompt fits into {room} tokens")
    jobs = [(t, rendered[i : i + writing.batch]) for i in range(0, len(rendered), writing.batch) for t in writing.temperatures]
    parts = out.with_name(out.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    tokens = 0
    for number, (temperature, batch) in enumerate(jobs):
        part = parts / f"{number:06d}.bin"
        if not part.is_file():
            torch.manual_seed(writing.seed + number)
            _write_part(part, batch, _answers(model, batch, temperature, writing, tokenizer.eos_token_id))
        tokens += part.stat().st_size // 2
        progress(Progress("writing", (number + 1) / len(jobs), number + 1, tokens))
    _join(parts, len(jobs), out, writing.seed)
    return out


@torch.no_grad()
def _answers(model: nn.Module, prompts: Sequence[list[int]], temperature: float, writing: Writing, end: int) -> list[list[int]]:
    """One answer a prompt, each with its end id where the target wrote it. The prompts are padded on the left."""
    width = max(map(len, prompts))
    padding = torch.tensor([width - len(p) for p in prompts], device=writing.device)
    ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts], device=writing.device)
    seen = torch.arange(width, device=writing.device) >= padding[:, None]
    positions = (torch.arange(width, device=writing.device) - padding[:, None]).clamp(min=0)
    cache, rows, answers = None, list(range(len(prompts))), [list[int]() for _ in prompts]
    for _ in range(writing.new_tokens):
        output = cast(Any, model)(input_ids=ids, attention_mask=seen.long(), position_ids=positions, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        chosen = draw(output.logits[:, -1].float(), temperature)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            answers[row].append(token)
        going = chosen != end
        if not going.any():
            break
        if going.sum() * 4 < len(rows) * 3:  # many have ended: go on with the others only
            kept = going.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows = [rows[i] for i in kept.tolist()]
            seen, positions, chosen, going = seen[kept], positions[kept], chosen[kept], going[kept]
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
        ids, positions = chosen[:, None], positions[:, -1:] + 1
    return [_until(answer, end) for answer in answers]


def draw(logits: Tensor, temperature: float) -> Tensor:
    """A token a row: the most likely one at temperature 0, else a sample."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1)[:, 0]


def _until(answer: list[int], end: int) -> list[int]:
    return answer[: answer.index(end) + 1] if end in answer else answer


def _write_part(part: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """A part and its mask; the part appears last, so a part that is there is whole."""
    ids = [i for p, a in zip(prompts, answers, strict=True) for i in (*p, *a)]
    mask = [b for p, a in zip(prompts, answers, strict=True) for b in (*[0] * len(p), *[1] * len(a))]
    np.array(mask, dtype=np.uint8).tofile(part.with_suffix(".mask"))
    beside = part.with_suffix(".new")
    np.array(ids, dtype="<u2").tofile(beside)
    beside.replace(part)


def _join(parts: Path, count: int, out: Path, seed: int) -> None:
    """Put the parts together in a drawn order, so that a row mixes long and short prompts, and remove them."""
    order = np.random.default_rng(seed).permutation(count)
    for suffix in (".mask", ".bin"):
        beside = out.with_suffix(suffix + ".new")
        with beside.open("wb") as file:
            for number in order:
                file.write((parts / f"{number:06d}{suffix}").read_bytes())
        beside.replace(out.with_suffix(suffix) if suffix == ".mask" else out)
    shutil.rmtree(parts)


# Distilling a draft


def distillation_loss(target: nn.Module, cross_entropy: float) -> StepLoss:
    """The divergence of the draft from the target's whole distribution, and a little of the plain cross entropy."""

    def loss_of(draft: nn.Module, rows: Tensor, learn: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(logits_of(target, rows[:, :-1]), -1).flatten(0, 1)
        given = torch.log_softmax(logits_of(draft, rows[:, :-1]), -1).flatten(0, 1)
        divergence = (wanted.exp() * (wanted - given)).sum(-1)
        surprise = nn.functional.nll_loss(given, rows[:, 1:].flatten(), reduction="none")
        return _mean(divergence + cross_entropy * surprise, learn)

    return loss_of


def distil(
    target: nn.Module,
    draft: nn.Module,
    files: Sequence[Path],
    settings: Settings,
    *,
    begin: int = 0,
    checkpoint: Path | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Distil the draft from the target on token files, in place."""
    target.to(settings.device).eval()
    text = Text(files, begin, settings.context)
    return _run("distilling", draft, text, distillation_loss(target, settings.cross_entropy), settings, checkpoint, progress)


def distil_folder(
    target: Path,
    files: Sequence[Path],
    out: Path,
    shape: Shape,
    settings: Settings,
    *,
    init: Path | None = None,
    progress: Callback = silent,
) -> Outcome:
    """Distil a draft of that shape, or the one in `init`, from the model in `target`, and write its folder."""
    teacher = load_model(target)
    draft = load_model(init) if init is not None else new_model(shape, target, settings.context, settings.seed)
    begin = load_tokenizer(target).bos_token_id
    outcome = distil(teacher, draft, files, settings, begin=begin, checkpoint=_unfinished(out), progress=progress)
    save_model(draft, target, out)
    shutil.rmtree(_unfinished(out), ignore_errors=True)
    return outcome


@torch.no_grad()
def measure(target: nn.Module, draft: nn.Module, files: Sequence[Path], *, begin: int = 0, batches: int = 16, context: int = 256, seed: int = 1) -> Agreement:
    """How well the draft follows the target on token files, over the learned ids only."""
    text, rng = Text(files, begin, context), np.random.default_rng(seed)
    equal = overlap = 0.0
    tokens = 0
    for _ in range(batches):
        rows, learn = text.batch(8, rng)
        p = torch.softmax(target(input_ids=rows[:, :-1], use_cache=False).logits.float(), -1)[learn]
        q = torch.softmax(draft(input_ids=rows[:, :-1], use_cache=False).logits.float(), -1)[learn]
        equal += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p, q).sum().item()
        tokens += len(p)
    return Agreement(equal / max(tokens, 1), overlap / max(tokens, 1), tokens)
