"""A Hugging Face folder for a model in GGUF files, a view: configuration, tokenizer, sampling, and
the files' paths. It is made once, in the user's cache by the files' identity; weights stay in the
files."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, refusal, tidy
from dovetail.protocol.memory import uncollected
from dovetail.workers.models.checkpoints.digests import Identity, changed
from dovetail.workers.models.checkpoints.files import unreadable
from dovetail.workers.models.checkpoints.gguf.kinds import Described
from dovetail.workers.models.checkpoints.gguf.names import MARK, is_gguf, only_model, parts_of

if TYPE_CHECKING:
    from dovetail.workers.models.checkpoints.gguf.files import Model

FILE = "file"  # weights that stay the blocks of a file
VIEWS = "gguf"  # the folder of views among the caches
MOST_KEPT = 64  # views that are kept; the oldest go
WEIGHTS = ("*.safetensors", "*.bin")


def local_folder(path: Path, *, making: Callable[[], None] = lambda: None) -> Path | None:
    """Return the folder of a model's path: itself, or the view of its (only) GGUF file; None for
    other paths. `CheckpointError` for names that are not UTF-8. `making` is called before a view is
    made."""
    whole = path.absolute() if is_gguf(path) else path
    try:
        str(whole).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"the model {whole} has a name that is not UTF-8; rename it"
        ) from None
    if path.is_dir():
        plain = bool(_mark(path)) or any(any(path.glob(end)) for end in WEIGHTS)
        return path if plain or not any(path.glob("*.gguf")) else view_of(only_model(path), making)
    return view_of(path, making) if is_gguf(path) and path.exists() else None


def resolved(source: str, *, making: Callable[[], None] = lambda: None) -> str:
    """Return the name of a model with a GGUF file of this machine replaced by its view."""
    try:
        path = Path(source).expanduser()
        if not source or not (is_gguf(source) or path.is_dir()):
            return source
    except (OSError, RuntimeError):  # an impossible name: opening it reports the error
        return source
    folder = local_folder(path, making=making)
    return source if folder is None or folder == path else str(folder)


def spelled(source: str) -> str:
    """Return the name of a model with a view replaced by its GGUF file, the first of several."""
    files = files_of(Path(source)) if source else []
    return str(files[0]) if files else source


OF_FOLDERS = re.compile(r"config\.json|correct it|fetch the model|must be")
"""Parts of remedies that apply to folders in the Hugging Face layout."""


@contextmanager
def blaming_the_file(folder: Path) -> Iterator[None]:
    """Name the GGUF file in a view's `CheckpointError`, and its remedy."""
    try:
        yield
    except CheckpointError as error:
        files, said = files_of(folder), str(error)
        if not files or not any(str(name) in said for name in (folder, files[0])):
            raise
        said = said.replace(f"{folder}/config.json", str(files[0]))
        said = said.replace(str(folder), str(files[0]))
        told, _, remedy = said.rpartition("; ")
        if told and OF_FOLDERS.search(remedy):
            said = f"{told}; use another file of this model, or its folder of safetensors"
        raise CheckpointError(re.sub(r"((its|this) )?config\.json", "its metadata", said)) from None


def view_of(file: Path, making: Callable[[], None] = lambda: None) -> Path:
    """Return the view of a GGUF file's model; `CheckpointError` if it is damaged or unsupported."""
    parts = parts_of(file.absolute())
    folder = _place() / _key(parts) / parts[0].name
    if (folder / MARK).is_file():
        folder.parent.touch()
        return folder
    making()
    from dovetail.workers.models.checkpoints.gguf.contents import contents_of  # imports numpy
    from dovetail.workers.models.checkpoints.gguf.files import read_model
    from dovetail.workers.models.checkpoints.tokenizer import keep, kept_path

    with uncollected():
        contents, table = contents_of(read_model(file))
        if table is not None:
            keep(kept_path(contents["tokenizer.json"].encode()), table.packed)
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent.parent, prefix="new-") as made:
            inner = Path(made) / "made" / folder.name
            inner.mkdir(parents=True)
            for name, content in contents.items():
                (inner / name).write_text(content, encoding="utf-8")
            shutil.rmtree(folder.parent, ignore_errors=True)
            inner.parent.rename(folder.parent)
        tidy(folder.parent.parent, MOST_KEPT)
    except OSError as error:
        if not (folder / MARK).is_file():  # else another process was faster
            raise CheckpointError(
                f"the metadata of {file} cannot be cached in {folder} ({refusal(error)}); name "
                "another folder for caches in XDG_CACHE_HOME"
            ) from None
    return folder


def files_of(folder: Path) -> list[Path]:
    """Return the GGUF files of a view; none for another folder."""
    return [Path(one["path"]) for one in _mark(folder).get("files", ())]


def notes_of(folder: Path) -> list[str]:
    """Return the warnings about a view's file to print when it is loaded."""
    return [f"{files_of(folder)[0]}: {note}" for note in _mark(folder).get("notes", ())]


def weight_paths(folder: Path) -> list[Path]:
    """Return a model folder's *.safetensors, or the files that it is the view of."""
    return files_of(folder) or sorted(folder.glob("*.safetensors"))


def described_tensors(folder: Path) -> Mapping[str, Described]:
    """Return the tensors of a view by transformers' names; none for other folders."""
    found = _mark(folder).get("tensors", {})
    return {
        name: Described(kind, tuple(shape), size, type)
        for name, (kind, shape, size, type) in found.items()
    }


def blocks_kept(folder: Path) -> bool:
    """Return whether a folder is the view of a model that supports weights `file`."""
    return any(tensor.packed_bytes for tensor in described_tensors(folder).values())


def mix_of(folder: Path) -> str:
    """Return in words which number types a view's files have; empty for other folders."""
    return str(_mark(folder).get("mix", ""))


def model_of(folder: Path) -> "Model | None":
    """Return a view's model without its vocabulary; None for other folders. `CheckpointError` if
    its files have changed."""
    from dovetail.workers.models.checkpoints.gguf.files import read_model

    mark = _mark(folder)
    if not mark:
        return None
    model = read_model(Path(mark["files"][0]["path"]), texts=False)
    for head, one in zip(model.heads, mark["files"], strict=False):
        if not head.identity.same_content(Identity(**one["identity"])):
            raise changed(head.file)
    return model


def _mark(folder: Path) -> Mapping[str, Any]:
    """Return a view's mark; nothing outside the cache, as downloads may have such a file."""
    if folder.parent.parent.parts[-2:] != (cache_folder().name, VIEWS):
        return {}
    try:
        found: dict[str, Any] = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _place() -> Path:
    place = cache_folder()
    if not place.is_absolute():
        raise CheckpointError(
            "a GGUF file needs a folder for caches, and this user has no home: name one in "
            "XDG_CACHE_HOME"
        )
    return place / VIEWS


def _key(parts: list[Path]) -> str:
    whole = hashlib.sha256(_sources().encode())
    for part in parts:
        try:
            with part.open("rb") as file:
                whole.update(f"\0{part}\0{Identity.of(file)}".encode())
        except FileNotFoundError:
            whole.update(f"\0{part}\0".encode())  # reading it reports the error
        except OSError as error:
            raise unreadable(part, error) from None
    return whole.hexdigest()[:32]


@cache
def _sources() -> str:
    whole = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()
