"""The command `logits`: how far our logits are from llama.cpp's on the same GGUF file, and how
often both choose the same token first, over prompts and replies that both are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.child import Side
from benchmarks.options import Command, find_llama, option, options, pin, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from support.gguf_files import tokens_of, write_gguf

PLAIN = "F16"
TYPES = (PLAIN, "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
ACTIVATIONS = ("int8", "fp32")
LEAST = 0.99
"""Share of rows with the same first choice; at least."""

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
@option("--type", "kinds", multiple=True, default=TYPES, help="Type of the file; can be repeated.")
@option("--prompts", type=click.IntRange(min=1), default=48, help="Shipped prompts.")
@option(
    "--reply",
    type=click.IntRange(min=1),
    default=48,
    help="Tokens of fp32's reply to each of them.",
)
@options("llama_python", "json")
def logits(
    kinds: tuple[str, ...], prompts: int, reply: int, llama_python: Path | None, as_json: bool
) -> None:
    """Our logits beside llama.cpp's on the same GGUF files of the embedded target, which its own
    quantizer makes from one in F16; both are given the same prompts and replies.

    A difference is |ours - theirs| / |theirs|, both without the mean of their row.
    """
    python = find_llama(llama_python)
    pin(1)
    target = DEMO_FOLDER / "target"
    exact = Exact(target)
    every = [prompt.turns[0] for prompt in read_prompts(DEMO_FOLDER / "prompts.jsonl")]
    asked = spread(every, prompts)
    texts = prompt_texts(target, asked, exact, reply)
    codec = TextCodec(*read_tokenizer(target))
    starts = [len(codec.encode_turns([prompt])) - 1 for prompt in asked]
    truth = [exact.logits(text) for text in texts]
    rows: list[dict[str, Any]] = []
    with (
        TemporaryDirectory(prefix="dovetail-benchmark-") as place,
        progress_bar(len(kinds), "types") as step,
    ):
        source = Path(place) / f"{PLAIN}.gguf"
        write_gguf(target, source, lambda *_: GGMLQuantizationType[PLAIN], **tokens_of(target))
        for kind in kinds:
            step(kind)
            file = source.with_name(f"{kind}.gguf")
            theirs = _theirs(source, kind, file, texts, python)
            own = judge("llama.cpp", theirs, truth)
            for weights, activations in _ours(kind):
                found = _logits(file, weights, activations, texts)
                rows.append(
                    {"file": kind, "weights": weights, "activations": activations}
                    | compared(found, theirs, starts)
                    | {"ours_fp32": judge("ours", found, truth).error, "theirs_fp32": own.error}
                )
    report({"rows": rows}, as_json, lambda: show(rows))


def _ours(kind: str) -> Sequence[tuple[str, str]]:
    """The weights and activations that we have for a file of a type."""
    return [("half", "fp32")] if kind == PLAIN else [("file", a) for a in ACTIVATIONS]


def compared(
    found: Sequence[Logits], theirs: Sequence[Logits], starts: Sequence[int]
) -> dict[str, Any]:
    """Return how ours are beside theirs: on all rows, and on those that a reply was chosen by, each
    text's from `starts` to the last but one."""
    every = judge("ours", found, theirs)
    parts = [[a[start:-1] for a, start in zip(x, starts, strict=True)] for x in (found, theirs)]
    replies = judge("ours", *parts)
    return {
        "difference": every.error,
        "same": every.agreeing,
        "rows": every.rows,
        "same_in_replies": replies.agreeing,
        "replies": replies.rows,
        "lead": max(map(_widest_lead, found, theirs)),
        "holds": every.agreeing >= LEAST * every.rows,
    }


def _widest_lead(found: Logits, theirs: Logits) -> float:
    """Return by how much their first choice leads over ours in their logits, where it leads most; 0
    where both are the same everywhere."""
    rows = np.arange(len(theirs))
    return float((theirs.max(axis=1) - theirs[rows, found.argmax(axis=1)]).max())


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """Return `count` prompts at even distances."""
    return list(prompts[:: max(1, len(prompts) // count)][:count])


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
def _logits(
    file: Path, weights: str, activations: str, texts: Sequence[Sequence[int]]
) -> list[Logits]:
    """Ours."""
    model = load_language_model(str(file), weights=weights, device="cpu", activations=activations)
    return [
        model.forward(
            torch.tensor(text),
            torch.arange(len(text)),
            [Segment(model.new_cache(len(text)), 0, len(text))],
        ).numpy()
        for text in texts
    ]


def _theirs(
    source: Path, kind: str, file: Path, texts: Sequence[Sequence[int]], python: Path
) -> list[Logits]:
    """llama.cpp's, of a file that it makes of `source`."""
    capacity = str(max(map(len, texts)))
    arguments = ("--capacity", capacity, "--context", "1", "--threads", "1")
    with Side("llama", (str(source), kind, str(file), *arguments), python=str(python)) as side:
        found = []
        for number, text in enumerate(texts):
            out = file.with_name(f"{number}.npy")
            side.ask("logits", tokens=list(text), out=str(out))
            found.append(np.load(out))
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        (
            row["file"],
            row["weights"],
            row["activations"],
            f"{row['difference']:.2e}",
            f"{row['same']}/{row['rows']}",
            f"{row['same'] / row['rows']:.2%}",
            "yes" if row["holds"] else "NO",
            f"{row['same_in_replies']}/{row['replies']}",
            f"{row['lead']:.2f}",
            f"{row['ours_fp32']:.2e}",
            f"{row['theirs_fp32']:.2e}",
        )
        for row in rows
    ]
    headings = ("file", "weights", "activations", "difference", "same first choice", "")
    more = (f">= {LEAST:.0%}", "in replies", "lead", "ours from fp32", "theirs from fp32")
    print_table((*headings, *more), cells)
    click.echo(
        "lead: of their first choice over ours in their logits, where both differ, at most. With "
        "activations in fp32 we compute the file's numbers; llama.cpp rounds activations to 8 bits."
    )
