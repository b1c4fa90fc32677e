"""The command `accuracy`: how far the logits of each type of weights are from fp32's, ours and
llama.cpp's, on the same text of the same checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.child import Side
from benchmarks.models import SHAPES, token_row
from benchmarks.options import Command, find_llama, option, options, pin, report, written_model
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment

RANDOM_TEXT = 512
OURS, THEIRS = ("fp32", "half", "int8"), ("F32", "F16", "Q8_0")
Logits = Any
"""numpy float32 [T, V]."""


@dataclass(frozen=True)
class Accuracy:
    """Over all rows of all texts: the relative error of the logits, and how many rows have the
    argmax of fp32."""

    engine: str
    error: float
    agreeing: int
    rows: int


@click.command(cls=Command)
@option(
    "--shape",
    type=click.Choice(tuple(SHAPES)),
    default="small",
    help="Sizes of a layer of the random model.",
)
@option(
    "--prompts",
    type=click.IntRange(min=1),
    default=12,
    help="Shipped prompts that the demonstration target is asked.",
)
@option(
    "--reply",
    type=click.IntRange(min=1),
    default=48,
    help="Tokens of its reply to each, as fp32 gives it, that are computed with the prompt.",
)
@options("llama_python", "layers", "models", "json")
def accuracy(
    shape: str,
    prompts: int,
    reply: int,
    llama_python: Path | None,
    layers: int | None,
    models: Path | None,
    as_json: bool,
) -> None:
    """Logits of our and of llama.cpp's types of weights against fp32: the demonstration target on
    text, and random weights.

    Our int8 has one scale for each output and one for each row of activations; Q8_0 has one for
    every 32 weights and activations: it is the finer format.
    """
    python = find_llama(llama_python)
    pin(1)
    target = DEMO_FOLDER / "target"
    asked = spread(
        [prompt.turns[0] for prompt in read_prompts(DEMO_FOLDER / "prompts.jsonl")], prompts
    )
    found = {}
    with (
        written_model(
            weights="half", checkpoint="fp16", shape=shape, layers=layers, models=models
        ) as folder,
        progress_bar(2 * (len(OURS) + len(THEIRS)), "engines") as step,
    ):
        exact = Exact(target)
        found["demonstration target, prompts and replies"] = judge_all(
            target, prompt_texts(target, asked, exact, reply), exact, python, step
        )
        exact = Exact(folder)
        found[f"random {folder.name}"] = judge_all(
            folder, [token_row(RANDOM_TEXT, exact.vocabulary)], exact, python, step
        )
    result = {
        "rows": [{"model": name, **asdict(row)} for name, rows in found.items() for row in rows]
    }
    report(result, as_json, lambda: show(found))


def show(found: Mapping[str, Sequence["Accuracy"]]) -> None:
    cells = [
        (name, a.engine, f"{a.error:.2e}", f"{a.agreeing}/{a.rows}", f"{a.agreeing / a.rows:.2%}")
        for name, rows in found.items()
        for a in rows
    ]
    print_table(
        ("model and text", "weights", "relative error of logits", "same argmax as fp32", ""), cells
    )
    click.echo(
        "Q8_0 is the finer format: a scale for every 32 weights and activations, where our "
        "int8 has one a row."
    )
    click.echo("llama.cpp's cache holds 16-bit floats, ours 32.")


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """Return so many of the prompts, evenly from all of them."""
    return list(prompts[:: max(1, len(prompts) // count)][:count])


def judge_all(
    folder: Path,
    texts: Sequence[Sequence[int]],
    exact: "Exact",
    python: Path,
    step: Callable[[str], None],
) -> list["Accuracy"]:
    """Every type of weights of both engines."""
    logits = [exact.logits(text) for text in texts]
    found = []
    for weights in OURS:
        step(f"{folder.name}: ours {weights}")
        found.append(judge(*ours(folder, weights, texts), logits))
    for kind in THEIRS:
        step(f"{folder.name}: llama.cpp {kind}")
        found.append(judge(*llamas(folder, kind, texts, python), logits))
    return found


def judge(engine: str, found: Sequence[Logits], exact: Sequence[Logits]) -> Accuracy:
    """`error` is |found - exact| / |exact|, both without the mean of their row, which no softmax
    sees."""
    a, b = (
        np.concatenate([logits - logits.mean(axis=1, keepdims=True) for logits in texts])
        for texts in (found, exact)
    )
    agreeing = int((a.argmax(axis=1) == b.argmax(axis=1)).sum())
    return Accuracy(engine, float(np.linalg.norm(a - b) / np.linalg.norm(b)), agreeing, len(b))


class Exact:
    """transformers in fp32: the logits that all are compared with, and replies to prompts."""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self.vocabulary: int = self._model.config.vocab_size

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Logits:
        return self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()

    @torch.inference_mode()
    def continued(self, tokens: Sequence[int], count: int) -> list[int]:
        """A prompt and the reply to it that fp32 chooses."""
        found: list[int] = self._model.generate(
            torch.tensor([list(tokens)]),
            max_new_tokens=count,
            do_sample=False,
            attention_mask=torch.ones(1, len(tokens)),
        )[0].tolist()
        return found


def prompt_texts(
    folder: Path, prompts: Sequence[str], exact: Exact, reply_tokens: int
) -> list[list[int]]:
    """Prompts as the model is asked them, each with the reply of fp32."""
    codec = TextCodec(*read_tokenizer(folder))
    return [exact.continued(codec.encode_turns([prompt]), reply_tokens) for prompt in prompts]


@torch.inference_mode()
def ours(folder: Path, weights: str, texts: Sequence[Sequence[int]]) -> tuple[str, list[Logits]]:
    """Our logits, and what computed them."""
    model = load_language_model(str(folder), weights=weights, device="cpu")
    found = []
    for text in texts:
        cache = model.new_cache(len(text))
        found.append(
            model.forward(
                torch.tensor(text), torch.arange(len(text)), [Segment(cache, 0, len(text))]
            ).numpy()
        )
    return f"dovetail {weights} ({model.backend})", found


def llamas(
    folder: Path, kind: str, texts: Sequence[Sequence[int]], python: Path
) -> tuple[str, list[Logits]]:
    """llama.cpp's logits with weights of a type of its own."""
    with TemporaryDirectory(prefix="dovetail-benchmark-") as place:
        arguments = (
            str(folder),
            kind,
            f"{place}/model.gguf",
            "--capacity",
            str(max(map(len, texts))),
            "--context",
            "1",
            "--threads",
            "1",
        )
        with Side("llama", arguments, python=str(python)) as side:
            found = []
            for number, text in enumerate(texts):
                out = f"{place}/{number}.npy"
                side.ask("logits", tokens=list(text), out=out)
                found.append(np.load(out))
    return f"llama.cpp {kind}", found
