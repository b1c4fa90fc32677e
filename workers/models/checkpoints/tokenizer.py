"""The vocabulary of a model folder: its tokenizer, its end tokens and its chat template."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, write_kept
from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers.models.checkpoints.architecture import refuse_content
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_bytes, read_json, shown

FACTS = {
    "size": "vocab_size in config.json",
    "end": "eos_token_id, the ids that end a reply,",
    "begin": "bos_token_id, the id that begins a text,",
    "template": "the chat template",
}
"""The files of a folder that hold the facts of its vocabulary."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "mask_token")
MAX_TEMPLATE = 1 << 18  # most characters of a template in `VocabularyFacts`
WORTH_KEEPING = 1 << 20
"""Size in bytes from which a tokenizer.json takes longer to parse than its cached table to read."""
MOST_KEPT = 64


def read_tokenizer(folder: Path | str) -> tuple[bytes, VocabularyFacts]:
    """The bytes of tokenizer.json, and vocabulary facts from the model's other files."""
    tokenizer, _, facts = read_language(Path(folder))
    return tokenizer, facts


def read_language(folder: Path) -> tuple[bytes, TokenTable, VocabularyFacts]:
    """Return tokenizer.json, its token table and the vocabulary's facts; `CheckpointError` for a
    bad file."""
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
    own = _own(folder)
    try:
        table = table_of(content)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    try:
        facts = VocabularyFacts(
            digest=table.digest,
            size=config.get("vocab_size", 0),
            end=_ends(ids_of(generation, config, "eos_token_id"), own, table),
            begin=(ids_of(generation, config, "bos_token_id") or (None,))[0],
            template=_chat_template(folder, own),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = f"{FACTS[str(first['loc'][0])]} cannot be {shown(first['input'])} ({first['msg']})"
        raise CheckpointError(f"{folder}: {text}; correct it") from None
    return content, table, facts


def table_in(folder: Path) -> TokenTable:
    """Return the token table of a model's folder; `CheckpointError` if it has none."""
    return table_of(read_bytes(folder / "tokenizer.json"))


def table_of(tokenizer: bytes) -> TokenTable:
    """Return a tokenizer.json's token table, cached by digest; `CheckpointError` without a
    vocabulary."""
    path = kept_path(tokenizer)
    with suppress(OSError, CheckpointError):  # not cached, or damaged
        return TokenTable.unpacked(path.read_bytes())
    table = TokenTable.read(tokenizer)
    if len(tokenizer) >= WORTH_KEEPING:
        keep(path, table.packed)
    return table


def kept_path(tokenizer: bytes, name: str = "table") -> Path:
    """Return the cache file for a fact about a tokenizer.json."""
    return cache_folder() / "tokenizers" / f"{hashlib.sha256(tokenizer).hexdigest()}.{name}-2"


def keep(path: Path, content: bytes) -> None:
    """Write a cache file atomically; failure only costs the next start time."""
    with suppress(OSError):
        write_kept(path, content, MOST_KEPT)


def read_template(folder: Path) -> str:
    """Return the chat template of a model folder without reading its tokenizer; empty if none."""
    return _chat_template(folder, _own(folder))


def _own(folder: Path) -> Mapping[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def ids_of(generation: Mapping[str, Any], config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a special token's ids: a number, list or null; generation_config.json has priority."""
    value = generation.get(name)
    value = config.get(name) if value is None else value
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _ends(named: tuple[int, ...], own: Mapping[str, Any], table: TokenTable) -> tuple[int, ...]:
    """Return the ids that end a reply: the model's, and like vLLM the tokenizer's special end
    token."""
    token = own.get("eos_token")
    spelt = token.get("content") if isinstance(token, dict) else token
    index = table.special.get(spelt) if isinstance(spelt, str) else None
    return named if index is None or index in named else (*named, index)


def _chat_template(folder: Path, own: Mapping[str, Any]) -> str:
    """Return the chat template, or "": `tool_use` with tools, else `default`. As in transformers,
    .jinja files override tokenizer_config.json."""
    named = _named(own.get("chat_template"), folder / "tokenizer_config.json")
    if not named and (file := folder / "chat_template.json").is_file():
        named = _named(read_json(file).get("chat_template"), file)
    files = {"default": folder / "chat_template.jinja"} | {
        file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    named |= {name: _text(file) for name, file in files.items() if file.is_file()}
    if not any(text.strip() for text in named.values()):
        return ""
    template = named.get("default", "")
    names = ", ".join(sorted(named))[:200]
    if not template.strip():
        return _raising(f"the model has several ({names}), none of which is named default")
    if (with_tools := named.get("tool_use", "")).strip():
        template = _chosen(with_tools, template)
    template = _special_tokens(own, template) + template
    if len(template) > MAX_TEMPLATE:
        return _raising(f"it is longer than {MAX_TEMPLATE} characters")
    return template


def _chosen(with_tools: str, template: str) -> str:
    """Return a template that renders the first one if there are tools, as transformers chooses.
    The empty expressions protect white space before a tag, and a newline after one is dropped."""
    one, other = (f"\n{text.removesuffix(chr(10))}{{{{ '' }}}}" for text in (with_tools, template))
    return f"{{% if tools %}}{one}{{% else %}}{other}{{% endif %}}"


def _named(given: Any, file: Path) -> dict[str, str]:
    """Return templates by name, from either form of `chat_template` in JSON."""
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {one.get("name"): one.get("template") for one in given}
    named = given if isinstance(given, dict) else {} if given is None else {"default": given}
    if not all(isinstance(part, str) for item in named.items() for part in item):
        text = "chat_template must be a template or a list of named templates"
        raise CheckpointError(f"{file}: {text}, not {shown(given)}")
    return dict(named)


def _text(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        text = f"{file} is not UTF-8 (byte {error.start}); save it again as UTF-8"
        raise CheckpointError(text) from None


def _special_tokens(own: Mapping[str, Any], template: str) -> str:
    spelt = {
        name: token.get("content") if isinstance(token := own[name], dict) else token
        for name in SPECIAL_TOKENS
        if name in own and name in template
    }
    return "".join(
        f"{{% set {name} = {json.dumps(text or '', ensure_ascii=False)} %}}\n"
        for name, text in spelt.items()
        if isinstance(text, str | None)
    )


def _raising(why: str) -> str:
    return f"{{{{ raise_exception({json.dumps(why)}) }}}}"
