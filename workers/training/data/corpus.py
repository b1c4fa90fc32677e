"""Reads training files for one target: chats rendered with its template, and token files."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from dovetail.protocol.errors import UserError
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.training.data.chats import RefusedError, Renderer, read_chats
from dovetail.workers.training.data.examples import Example, Examples, arrange, read_token_file


@dataclass(frozen=True)
class Reader:
    """The properties of a target that reading depends on."""

    renderer: Renderer
    context: int  # the number of its positions
    vocabulary_size: int


def open_reader(target: str) -> Reader:
    """Return the tokenizer and the sizes of a target (a folder or a hub id); its weights are not
    read."""
    folder = find_folder(target)
    _, facts = read_tokenizer(folder)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True
    )
    return Reader(
        Renderer(tokenizer, facts.begin, facts.end),
        context_of(config),
        int(config.vocab_size),
    )


def renderer_of(tokenizer: Any) -> Renderer:
    """Return the renderer of a tokenizer without a model: answers end with the tokenizer's own end
    id."""
    end = tokenizer.eos_token_id
    return Renderer(tokenizer, tokenizer.bos_token_id, () if end is None else (end,))


def read_examples(
    files: Sequence[Path], reader: Reader, *, context: int | None = None, drop_long: bool = False
) -> Examples:
    """Return the sequences of all files (.bin: token files, else chats as JSON lines), at most
    `context` tokens each."""
    left_out = Counter[str]()
    rows = read_rows(files, reader.renderer, left_out)
    return arrange(
        rows,
        context=context or reader.context,
        vocabulary_size=reader.vocabulary_size,
        drop_long=drop_long,
        left_out=left_out,
    )


def read_rows(
    files: Sequence[Path], renderer: Renderer, left_out: "Counter[str] | None" = None
) -> list[Example]:
    """Return the unchanged sequences of all files; `left_out` counts chats without any."""
    if missing := [str(file) for file in files if not file.is_file()]:
        raise UserError(f"there is no file {missing[0]}")
    told = Counter[str]() if left_out is None else left_out
    return [
        row
        for file in files
        for row in (
            read_token_file(file, renderer.begin)
            if file.suffix == ".bin"
            else _render(file, renderer, told)
        )
    ]


def _render(file: Path, renderer: Renderer, left_out: "Counter[str]") -> Iterator[Example]:
    for chat in read_chats(file):
        try:
            found = renderer.examples(chat)
        except RefusedError as error:
            left_out[f"refused by the chat template ({error})"] += 1
            continue
        if not found:
            left_out["without an answer"] += 1
        yield from found
