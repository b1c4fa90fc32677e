"""A folder in the Hugging Face layout that stands for a model in GGUF files: what these say of
configuration, tokenizer and sampling, and where they are. It lies in the user's cache, under the
identity of the files, and is made once; weights are read from the files themselves.

Whatever takes the folder of a model takes this one. Needs no torch.
"""

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, refusal
from dovetail.workers.models.checkpoints.digests import Identity
from dovetail.workers.models.checkpoints.files import unreadable
from dovetail.workers.models.checkpoints.gguf.configurations import CONFIGURATIONS
from dovetail.workers.models.checkpoints.gguf.facts import Facts
from dovetail.workers.models.checkpoints.gguf.files import (
    Model,
    is_gguf,
    only_model,
    parts_of,
    read_model,
)
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.placing import placed_in
from dovetail.workers.models.checkpoints.gguf.vocabulary import Vocabulary, read_vocabulary

VIEWS = "gguf"
"""The folder of views among the caches."""
MARK = "gguf.json"
"""The file that says whose view a folder is."""
MOST_KEPT = 64
"""Views that are kept; the oldest go."""
WEIGHTS = ("*.safetensors", "*.bin")
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names under `general.sampling`, and those of generation_config.json."""


def local_folder(path: Path) -> Path | None:
    """Return the folder of a model that a path names: the folder itself, or the view of a GGUF
    file, or of the one model in a folder of them; None where the path is something else."""
    if path.is_dir():
        plain = bool(_mark(path)) or any(any(path.glob(end)) for end in WEIGHTS)
        return path if plain or not any(path.glob("*.gguf")) else view_of(only_model(path))
    return view_of(path) if is_gguf(path) and path.exists() else None


def resolved(source: str) -> str:
    """Return the name of a model with a GGUF file of this machine replaced by its view."""
    path = Path(source).expanduser()
    if not source or not (is_gguf(source) or path.is_dir()):
        return source
    folder = local_folder(path)
    return source if folder is None or folder == path else str(folder)


def view_of(file: Path) -> Path:
    """Return the view of the model that a GGUF file belongs to; `CheckpointError` in one sentence
    for one that is damaged, foreign or not read here."""
    parts = [part.resolve() for part in parts_of(file.absolute())]
    folder = _place() / _key(parts) / file.with_name(parts_of(file)[0].name).name
    if (folder / MARK).is_file():
        folder.parent.touch()
        return folder
    model = read_model(file)
    contents = _contents(model)
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent.parent, prefix="new-") as made:
            inner = Path(made) / "made" / folder.name
            inner.mkdir(parents=True)
            for name, content in contents.items():
                (inner / name).write_text(content, encoding="utf-8")
            shutil.rmtree(folder.parent, ignore_errors=True)
            inner.parent.rename(folder.parent)
        _tidy(folder.parent.parent)
    except OSError as error:
        if not (folder / MARK).is_file():  # else another process was faster
            raise CheckpointError(
                f"what {file} says of itself cannot be kept in {folder} ({refusal(error)}), or "
                "name another folder for caches in XDG_CACHE_HOME"
            ) from None
    return folder


def files_of(folder: Path) -> list[Path]:
    """Return the GGUF files that a folder is the view of; none if it is no view."""
    return [Path(one["path"]) for one in _mark(folder).get("files", ())]


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files of a model's folder: its *.safetensors, or the files that it is the
    view of."""
    return files_of(folder) or sorted(folder.glob("*.safetensors"))


def described_tensors(folder: Path) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of the tensors of the model that a folder is the view of, by
    transformers' names; the type is that in which they are read."""
    found = _mark(folder).get("tensors", {})
    return {name: (kind, tuple(shape)) for name, (kind, shape) in found.items()}


def mix_of(folder: Path) -> str:
    """Return in words which types of numbers the files have that a folder is the view of; empty if
    it is no view."""
    return str(_mark(folder).get("mix", ""))


def model_of(folder: Path) -> Model | None:
    """Return the model that a folder is the view of, None if it is no view; `CheckpointError` where
    its files have been changed since."""
    mark = _mark(folder)
    if not mark:
        return None
    model = read_model(Path(mark["files"][0]["path"]))
    for head, one in zip(model.heads, mark["files"], strict=False):
        if not head.identity.same_content(Identity(**one["identity"])):
            raise CheckpointError(
                f"{head.file} was changed while it was loaded: wait until it is written, and start "
                "again"
            )
    return model


def _mark(folder: Path) -> Mapping[str, Any]:
    """The content of a view's mark; nothing of a folder that does not lie where views do: a
    downloaded one may have a file of that name."""
    if folder.parent.parent.parts[-2:] != (cache_folder().name, VIEWS):
        return {}
    try:
        found: dict[str, Any] = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _contents(model: Model) -> dict[str, str]:
    """The files of a view, by their names."""
    facts = Facts(model)
    if facts.architecture not in CONFIGURATIONS:
        raise CheckpointError(
            f"{model.file}: models of llama.cpp's architecture {facts.architecture[:50]} are not "
            "read from GGUF here; take the model's folder of safetensors"
        )
    config = CONFIGURATIONS[facts.architecture](facts)
    facts.refuse_more()
    tensors = placed_in(model)
    vocabulary = read_vocabulary(model)
    if len(vocabulary.content["model"]["vocab"]) > config["vocab_size"]:
        raise facts.refusal("it has more tokens than rows of token_embd.weight")
    ends = list(vocabulary.ends)
    ids = {"bos_token_id": vocabulary.begin, "eos_token_id": ends or None}
    config = {**config, **ids, "eos_token_id": ends[0] if ends else None}
    files = [{"path": str(h.file.resolve()), "identity": asdict(h.identity)} for h in model.heads]
    mark = {
        "files": files,
        "mix": _mix(model),
        "tensors": {n: (p.kind, p.shape) for n, p in tensors.items()},
    }
    contents = {
        "config.json": config,
        "generation_config.json": {**ids, **_sampling(model)},
        "tokenizer.json": vocabulary.content,
        "tokenizer_config.json": _tokenizer_config(model, vocabulary),
        MARK: mark,
    }
    return {name: json.dumps(content, ensure_ascii=False) for name, content in contents.items()}


def _mix(model: Model) -> str:
    """The types of a model's numbers and how many tensors have each, and bits for each number."""
    places = [place for head in model.heads for place in head.tensors]
    counts = Counter(KINDS[place.kind].name for place in places)
    bits = 8 * sum(place.size_bytes for place in places) / sum(prod(p.shape) for p in places)
    kinds = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    return f"{kinds} tensors, {bits:.1f} bits a number"


def _tokenizer_config(model: Model, vocabulary: Vocabulary) -> dict[str, Any]:
    tokens = model.facts["tokenizer.ggml.tokens"]
    named = {"bos_token": vocabulary.begin, "eos_token": next(iter(vocabulary.ends), None)}
    template = model.facts.get("tokenizer.chat_template", "")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[place] for name, place in named.items() if place is not None},
        **({"chat_template": template} if isinstance(template, str) and template else {}),
    }


def _sampling(model: Model) -> dict[str, Any]:
    """The sampling that a file recommends; a temperature of 0 is no sampling."""
    found = {
        theirs: value
        for ours, theirs in SAMPLING.items()
        if isinstance(value := model.facts.get(f"general.sampling.{ours}"), int | float)
    }
    found = {name: round(value, 6) for name, value in found.items()}
    if found.get("temperature") == 0:
        return {"do_sample": False}
    return {"do_sample": True, **found} if "temperature" in found else found


def _place() -> Path:
    place = cache_folder()
    if not place.is_absolute():
        raise CheckpointError(
            "a GGUF file needs a folder for caches, and this user has no home: name one in "
            "XDG_CACHE_HOME"
        )
    return place / VIEWS


def _key(parts: list[Path]) -> str:
    """The name that a view is kept under: of the places and identities of files, and our code."""
    whole = hashlib.sha256(_sources().encode())
    for part in parts:
        try:
            with part.open("rb") as file:
                whole.update(f"\0{part}\0{Identity.of(file)}".encode())
        except FileNotFoundError:
            whole.update(f"\0{part}\0".encode())  # whoever reads it says so
        except OSError as error:
            raise unreadable(part, error) from None
    return whole.hexdigest()[:32]


@cache
def _sources() -> str:
    """The digest of the code that makes views."""
    whole = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


def _tidy(place: Path) -> None:
    """Let the oldest views go."""
    views = sorted(place.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for view in views[MOST_KEPT:]:
        shutil.rmtree(view, ignore_errors=True)
