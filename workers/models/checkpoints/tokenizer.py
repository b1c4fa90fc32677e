"""The vocabulary of a model folder: its tokenizer, its end tokens and its chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest
from dovetail.workers.models.checkpoints.architecture import (
    refuse_content,
    shown,
)
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_bytes, read_json

FACTS = {
    "size": "vocab_size in config.json",
    "end": "eos_token_id, the ids that end a reply,",
    "begin": "bos_token_id, the id that begins a text,",
    "template": "the chat template",
}
"""The files of a folder that hold the facts of its vocabulary."""


def read_tokenizer(folder: Path | str) -> tuple[bytes, VocabularyFacts]:
    """The bytes of tokenizer.json and what the model's other files say about the vocabulary."""
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json; save it there with transformers: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    content = read_bytes(file)
    config = text_part(read_json(folder / "config.json"))
    refuse_content(config, folder / "config.json")
    generation = (
        read_json(folder / "generation_config.json")
        if (folder / "generation_config.json").is_file()
        else {}
    )
    own = (
        read_json(folder / "tokenizer_config.json")
        if (folder / "tokenizer_config.json").is_file()
        else {}
    )
    try:
        vocabulary = read_vocabulary(content)
        digest = vocabulary_digest(vocabulary)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    try:
        facts = VocabularyFacts(
            digest=digest,
            size=config.get("vocab_size", 0),
            end=_ends(generation, config, own, vocabulary),
            begin=(ids_of(generation, config, "bos_token_id") or (None,))[0],
            template=_chat_template(folder, own),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CheckpointError(
            f"{folder}: {FACTS[str(first['loc'][0])]} cannot be {shown(first['input'])} "
            f"({first['msg']}); correct it"
        ) from None
    return content, facts


def ids_of(generation: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A special token id, which the files give as a number, a list or null; generation_config.json
    has the last word."""
    value = generation.get(name)
    value = config.get(name) if value is None else value
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _ends(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    own: Mapping[str, Any],
    vocabulary: Mapping[int, str],
) -> tuple[int, ...]:
    """The ids that end a reply: the model's, and that of the tokenizer's own end token, by which
    vLLM ends replies too. It ends a turn where the model may name the end of a document alone."""
    token = own.get("eos_token")
    spelt = token.get("content") if isinstance(token, dict) else token
    named = ids_of(generation, config, "eos_token_id")
    return (*named, *(i for i, one in vocabulary.items() if one == spelt and i not in named))


def _chat_template(folder: Path, own: Mapping[str, Any]) -> str:
    """The default chat template, from its own file or from tokenizer_config.json; empty if there is
    none."""
    if (file := folder / "chat_template.jinja").is_file():
        try:
            return read_bytes(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{file} is not UTF-8 (byte {error.start}); save it again as UTF-8"
            ) from None
    template = own.get("chat_template") or ""
    if isinstance(template, list):
        template = next(
            (
                t.get("template", "")
                for t in template
                if isinstance(t, dict) and t.get("name") == "default"
            ),
            "",
        )
    return template if isinstance(template, str) else ""
