"""The files of a view: configuration, tokenizer and sampling, in the Hugging Face layout."""

import json
from collections import Counter
from dataclasses import asdict
from math import isfinite, prod
from typing import Any

import numpy as np

from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers.models.checkpoints.gguf.architectures.heads import HEADS, refuse_head
from dovetail.workers.models.checkpoints.gguf.architectures.registry import CONFIGURATIONS
from dovetail.workers.models.checkpoints.gguf.facts import Facts
from dovetail.workers.models.checkpoints.gguf.files import Model
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, Described
from dovetail.workers.models.checkpoints.gguf.names import MARK
from dovetail.workers.models.checkpoints.gguf.placing import placed_in
from dovetail.workers.models.checkpoints.gguf.vocabulary import Vocabulary, read_vocabulary

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names under `general.sampling`, and their counterparts in generation_config.json."""
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
TEMPLATE = "tokenizer.chat_template"  # the default chat template; named ones append their name


def contents_of(model: Model) -> tuple[dict[str, str], TokenTable | None]:
    """Return a view's files by name, and its token table, which a draft head lacks;
    `CheckpointError` for unsupported models."""
    facts = Facts(model)
    refuse_head(facts)
    if (make := HEADS.get(facts.architecture) or CONFIGURATIONS.get(facts.architecture)) is None:
        raise facts.undescribed()
    config = make(facts)
    facts.refuse_more()
    tensors = placed_in(model)
    files = [{"path": str(h.file.absolute()), "identity": asdict(h.identity)} for h in model.heads]
    mark = {
        "files": files,
        "mix": _mix(model),
        "notes": _notes(model),
        "tensors": {
            name: Described(placed.kind, placed.shape, placed.packed_bytes, placed.place.kind)
            for name, placed in tensors.items()
        },
    }
    if facts.architecture in HEADS:
        return {"config.json": json.dumps(config), MARK: json.dumps(mark)}, None
    vocabulary = read_vocabulary(model)
    if len(vocabulary.content["model"]["vocab"]) > config["vocab_size"]:
        raise facts.refusal("it has more tokens than rows of token_embd.weight")
    ends = list(vocabulary.ends)
    ids = {"bos_token_id": vocabulary.begin, "eos_token_id": ends or None}
    config = {**config, **ids, "eos_token_id": ends[0] if ends else None}
    contents = {
        "config.json": config,
        "generation_config.json": {**ids, **_sampling(facts), **_suppressed(facts)},
        "tokenizer.json": vocabulary.content,
        "tokenizer_config.json": _tokenizer_config(model, vocabulary),
        MARK: mark,
    }
    files_by_name = {
        name: json.dumps(content, ensure_ascii=False) for name, content in contents.items()
    }
    return files_by_name, TokenTable.described(vocabulary.content)


def _mix(model: Model) -> str:
    """The number types of a model with the count of tensors of each, and bits per weight."""
    places = [place for head in model.heads for place in head.tensors]
    counts = Counter(KINDS[place.kind].name for place in places)
    bits = 8 * sum(place.size_bytes for place in places) / sum(prod(p.shape) for p in places)
    kinds = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    return f"{kinds} tensors, {bits:.1f} bits a number"


def _notes(model: Model) -> list[str]:
    """The warnings to print when the model is loaded."""
    if model.facts.get("tokenizer.ggml.model") != "gpt2" or model.facts.get("tokenizer.ggml.pre"):
        return []
    why = "it does not name its pre-tokenizer (tokenizer.ggml.pre)"
    return [f"{why}: llama.cpp's default is used, and tokens may differ from the model's own"]


def _tokenizer_config(model: Model, vocabulary: Vocabulary) -> dict[str, Any]:
    tokens = model.facts["tokenizer.ggml.tokens"]
    named = {"bos_token": vocabulary.begin, "eos_token": next(iter(vocabulary.ends), None)}
    templates = [
        {"name": key.removeprefix(TEMPLATE).lstrip(".") or "default", "template": text}
        for key, text in model.facts.items()
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(text, str)
    ]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[place] for name, place in named.items() if place is not None},
        **({"chat_template": templates} if templates else {}),
    }


def _suppressed(facts: Facts) -> dict[str, list[int]]:
    """The tokens that a model never chooses."""
    found = facts.model.facts.get(SUPPRESSED)
    if found is None:
        return {}
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise facts.refusal(f"{SUPPRESSED} is {str(found)[:50]}, not a list of ids")
    return {"suppress_tokens": found.tolist()}


def _sampling(facts: Facts) -> dict[str, Any]:
    """The sampling that a file recommends; a temperature of 0 is no sampling."""
    model = facts.model
    for key in ("xtc_probability", "mirostat"):
        if np.any(value := model.facts.get(f"general.sampling.{key}")):
            raise facts.refusal(f"general.sampling.{key} is {str(value)[:50]}, not supported")
    found = {
        theirs: value
        for ours, theirs in SAMPLING.items()
        if isinstance(value := model.facts.get(f"general.sampling.{ours}"), int | float)
        and isfinite(value)
    }
    found = {name: round(value, 6) for name, value in found.items()}
    if found.get("temperature") == 0:
        return {"do_sample": False}
    return {"do_sample": True, **found} if "temperature" in found else found
