"""Finds a model: a folder, a snapshot in the Hugging Face cache, or the hub, of which a GGUF file
is fetched alone. Complete snapshots need no network. The hub is asked with a short timeout before a
download. The hub's client, which takes half a second to import, is imported when needed."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.architecture import why_no_folder, why_not_there
from dovetail.workers.models.checkpoints.files import read_json, reason
from dovetail.workers.models.checkpoints.gguf import view
from dovetail.workers.models.checkpoints.gguf.names import is_gguf, models_in, parts_of

HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
SPARED = ("*/*.safetensors", "*/*.json", "consolidated*")
"""Files that are not fetched: other copies of the weights, as in `original/`."""
PICKLED_FILES = ("*.bin",)  # also fetched if the user allows pickled weights
CONFIG_ALONE = ("config.json",)
HUB_ID = re.compile(r"([\w][\w.-]*(?:/[\w][\w.-]*)?)(?:@([\w./-]+))?")
HUB_FILE = re.compile(
    r"([\w][\w.-]*/[\w][\w.-]*)/((?:[\w][\w.-]*/)*[\w][\w.-]*\.gguf)(?:@([\w./-]+))?"
)
TAGGED = re.compile(r"([\w][\w.-]*/[\w][\w.-]*):([\w.-]+)(@[\w./-]+)?")
"""A repository with the quantisation of one of its GGUF files, as llama-server and ollama write."""
ERRNO = re.compile(r"\[Errno -?\d+\] ")
ASK_S = 5.0  # the hub's time limit to accept a connection, and again to answer


@dataclass(frozen=True)
class Hosted:
    """A model on the hub, or a GGUF file of one."""

    name: str
    revision: str | None
    file: str = ""

    @classmethod
    def of(cls, source: str) -> "Hosted | None":
        """Return the parts of owner/name or owner/name/FILE.gguf (@revision); else None."""
        if found := HUB_FILE.fullmatch(source):
            return cls(found[1], found[3], found[2])
        found = HUB_ID.fullmatch(source)
        if found is None or found[1].endswith(".gguf"):  # a misspelt path
            return None
        return cls(found[1], found[2])

    def wanted(self, files: Sequence[str]) -> list[str]:
        """Return the files to fetch: `files`, or all parts of the GGUF file."""
        return [str(part) for part in parts_of(Path(self.file))] if self.file else list(files)

    def command(self) -> str:
        """Return the command that fetches it."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {' '.join([self.name, *self.wanted(())])}{revision}"


def find_folder(source: str, *, files: Sequence[str] = HUB_FILES) -> Path:
    """Return a model's local folder, downloading `files` if needed."""
    return local_folder(source, files=files) or _download(source, files)


def is_assistant(source: str) -> bool:
    """Return whether a local folder or cached hub id holds a Gemma 4 assistant."""
    folder = local_folder(source)
    if folder is None or not (folder / "config.json").is_file():
        return False
    return read_json(folder / "config.json").get("model_type") == "gemma4_assistant"


def check_source(source: str, *, files: Sequence[str] = HUB_FILES) -> None:
    """`CheckpointError` unless a model is here or on the hub; downloads nothing."""
    if local_folder(source, files=files) is None:
        _ask_hub(source)


def local_folder(source: str, *, files: Sequence[str] = HUB_FILES) -> Path | None:
    """Return a model's folder without network; None: the hub id is not completely cached.
    `CheckpointError` for other names."""
    if not source:
        raise CheckpointError("no model is named: give a folder, a hub id or id@revision")
    path = Path(source).expanduser()
    if (folder := view.local_folder(path)) is not None:
        return folder
    if path.exists():
        raise CheckpointError(f"{source} {why_no_folder(source)}")
    if (hosted := Hosted.of(source)) is None:
        raise CheckpointError(f"{source} {why_not_there(source)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = hosted.wanted(files)
    try:
        folder = Path(
            snapshot_download(
                hosted.name,
                revision=hosted.revision,
                allow_patterns=wanted,
                ignore_patterns=[*SPARED],
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    except (HFValidationError, OSError) as error:
        text = f"{source} is neither a folder nor the id of a model ({reason(error)})"
        raise CheckpointError(f"{text}; check the name") from None
    if hosted.file:
        there = all((folder / part).is_file() for part in wanted)
        return view.local_folder(folder / hosted.file) if there else None
    plain = any(folder.glob("*.safetensors")) or not any(folder.glob("*.gguf"))
    return view.local_folder(folder) if is_complete(folder, files) or not plain else None


def cached_folders() -> list[Path]:
    """Return the snapshots in the Hugging Face cache, including incomplete ones."""
    from huggingface_hub import constants

    return sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"))


def is_complete(folder: Path, files: Sequence[str] = HUB_FILES) -> bool:
    """Return whether the files of a model that is no GGUF file are all in a folder."""
    if not (folder / "config.json").is_file():
        return False
    if (index := folder / "model.safetensors.index.json").is_file():
        try:
            named = {*json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return True  # reading it reports what is wrong
        return files == CONFIG_ALONE or all((folder / str(name)).is_file() for name in named)
    return files == CONFIG_ALONE or any(
        path.suffix in (".safetensors", ".bin", ".gguf") for path in folder.iterdir()
    )


def _hosted(source: str) -> Hosted:
    """The meaning of a name passed to `local_folder` that is not a path on this machine."""
    hosted = Hosted.of(source)
    assert hosted is not None
    return hosted


def _info(source: str, *, sizes: bool = False) -> Any:
    """Return the hub's description of a model; `CheckpointError` without an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    hosted = _hosted(source)
    try:
        return HfApi().model_info(
            hosted.name, revision=hosted.revision, timeout=ASK_S, files_metadata=sizes
        )
    except OfflineModeIsEnabled:
        raise _unreachable(source, "HF_HUB_OFFLINE is set") from None
    except (HfHubHTTPError, HFValidationError) as error:  # also for a missing revision
        raise _refused(source, error) from None
    except Exception as error:  # the client's own errors are of one library or another
        raise _unreachable(source, reason(error)) from None


def _ask_hub(source: str) -> None:
    """Raise `CheckpointError` unless the hub answers that it has a model, and the file of it."""
    hosted, found = _hosted(source), _info(source)
    held = [one.rfilename for one in found.siblings or ()]
    if missing := next((part for part in hosted.wanted(()) if part not in held), None):
        others = ", ".join(models_in(held)[:20]) or "no GGUF file"
        raise CheckpointError(f"{hosted.name} has no file {missing} on the hub; it has {others}")


def _download(source: str, files: Sequence[str]) -> Path:
    _ask_hub(source)
    hosted = _hosted(source)
    folder = _fetch(source, hosted, hosted.wanted(files))
    return view.view_of(folder / hosted.file) if hosted.file else folder


def _fetch(source: str, hosted: Hosted, wanted: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            snapshot_download(
                hosted.name,
                revision=hosted.revision,
                allow_patterns=[*wanted],
                ignore_patterns=[*SPARED],
            )
        )
    except HfHubHTTPError as error:
        raise _refused(source, error) from None
    except Exception as error:  # the network, the disk, the cache
        text = f"{source} could not be fetched from the Hugging Face hub ({reason(error)})"
        raise CheckpointError(f"{text}; run `{hosted.command()}` to continue") from None


@dataclass(frozen=True)
class Offer:
    """A model on the hub that can be downloaded."""

    name: str  # as other commands name it: the GGUF file is a part of it
    files: Mapping[str, int]  # the bytes of each file to fetch
    missing: int  # bytes that are not in the cache yet
    license: str  # its license as the hub has it; empty: none is stated
    cache: Path  # the folder of the cache

    @property
    def size(self) -> int:
        return sum(self.files.values())


def find_offer(source: str) -> Offer:
    """Return what the hub has for an id, id@revision, id/FILE.gguf or id:QUANTISATION; raise
    `CheckpointError` if that is no model that can be loaded, or several."""
    from huggingface_hub import constants, try_to_load_from_cache

    tagged = TAGGED.fullmatch(source)
    plain = f"{tagged[1]}{tagged[3] or ''}" if tagged else source
    if (hosted := Hosted.of(plain)) is None or "/" not in hosted.name:
        raise CheckpointError(f"{source} is not the id of a model on the hub, such as owner/name")
    info = _info(plain, sizes=True)
    held = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    files = _files_of(hosted, held, tagged[2] if tagged else "")
    there = (try_to_load_from_cache(hosted.name, name, revision=info.sha) for name in files)
    missing = sum(
        size for size, path in zip(files.values(), there, strict=True) if not isinstance(path, str)
    )
    revision = f"@{hosted.revision}" if hosted.revision else ""
    file = next(iter(files)) if all(map(is_gguf, files)) else ""
    name = f"{hosted.name}/{file}{revision}" if file else f"{hosted.name}{revision}"
    card = info.card_data.to_dict() if info.card_data is not None else {}
    license = str(card.get("license_name") or card.get("license") or "")
    return Offer(name, files, missing, license, Path(constants.HF_HUB_CACHE))


def _files_of(hosted: Hosted, held: Mapping[str, int], tag: str) -> dict[str, int]:
    """Return the files to fetch with their sizes: a folder of safetensors, or one GGUF model."""
    models = models_in(held)
    if hosted.file or tag:
        ending = re.compile(
            rf"(^|[-._/]){re.escape(tag)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE
        )
        named = [one for one in models if (ending.search(one) if tag else one == hosted.file)]
    else:
        plain = [
            name
            for name in held
            if any(fnmatch(name, end) for end in HUB_FILES)
            and not any(fnmatch(name, end) for end in SPARED)
        ]
        if any(name.endswith(".safetensors") for name in plain):
            return {name: held[name] for name in plain}
        named = models
    if len(named) == 1:
        parts = [str(part) for part in parts_of(Path(named[0]))]
        if missing := next((part for part in parts if part not in held), None):
            raise CheckpointError(f"{hosted.name} has no file {missing} on the hub")
        return {part: held[part] for part in parts}
    if not models:
        raise CheckpointError(f"{hosted.name} has neither *.safetensors nor GGUF files on the hub")
    listed = ", ".join(f"{one} ({held[one] / 1e9:.3g} GB)" for one in (named or models)[:20])
    why = f"no GGUF file {hosted.file or tag}"
    if named or not (hosted.file or tag):
        first = (named or models)[0]
        why = f"several models: name one, as in `dovetail pull {hosted.name}/{first}`"
    raise CheckpointError(f"{hosted.name} has {why}; it has {listed}")


def download(offer: Offer) -> None:
    """Download a model's files into the cache, continuing an earlier download."""
    _fetch(offer.name, _hosted(offer.name), [*offer.files])


@dataclass(frozen=True)
class Cached:
    """A model in the cache of the hub."""

    name: str
    size: int
    files: tuple[str, ...]  # its GGUF models
    folder: Path  # the latest snapshot


def cached_models() -> list[Cached]:
    """Return the models in the Hugging Face cache."""
    found = []
    for repo in _cached_repos():
        revisions = sorted(repo.revisions, key=lambda one: one.last_modified)
        names = {str(f.file_path.relative_to(r.snapshot_path)) for r in revisions for f in r.files}
        files = tuple(models_in(names))
        found.append(Cached(repo.repo_id, repo.size_on_disk, files, revisions[-1].snapshot_path))
    return sorted(found, key=lambda one: one.name)


def remove(source: str) -> int:
    """Remove a model from the cache, or one revision or GGUF file of it; return the freed bytes.
    `CheckpointError` if it is not there."""
    hosted = Hosted.of(source)
    repo = next((one for one in _cached_repos() if hosted and one.repo_id == hosted.name), None)
    if hosted is None or repo is None:
        folder = Path(source).expanduser().exists()
        remedy = "delete the folder or file yourself" if folder else "`dovetail list` shows what is"
        raise CheckpointError(f"{source} is not in the Hugging Face cache: {remedy}")
    given = hosted.revision or ""
    revisions = [
        one
        for one in repo.revisions
        if not given or given in one.refs or one.commit_hash.startswith(given)
    ]
    if not hosted.file:
        from huggingface_hub import scan_cache_dir

        if not revisions:
            raise CheckpointError(f"{hosted.name} has no revision {given} in the cache")
        strategy = scan_cache_dir().delete_revisions(*(one.commit_hash for one in revisions))
        strategy.execute()
        return int(strategy.expected_freed_size)
    names = {str(part) for part in parts_of(Path(hosted.file))}
    files = {
        file.file_path: file
        for revision in revisions
        for file in revision.files
        if str(file.file_path.relative_to(revision.snapshot_path)) in names
    }
    if not files:
        raise CheckpointError(f"{hosted.name} has no file {hosted.file} in the cache")
    kept = {
        file.blob_path for r in repo.revisions for file in r.files if file.file_path not in files
    }
    blobs = {file.blob_path: file.size_on_disk for file in files.values()}
    for path in (*files, *(blobs.keys() - kept)):
        path.unlink(missing_ok=True)
    return sum(size for blob, size in blobs.items() if blob not in kept)


def _cached_repos() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [one for one in scan_cache_dir().repos if one.repo_type == "model" and one.revisions]
    except CacheNotFound:
        return []


def _unreachable(source: str, why: str) -> CheckpointError:
    why = f"cannot be reached ({ERRNO.sub('', why)})"
    command = _hosted(source).command()
    return _absent(source, f"{why}: check the name, or run `{command}` while connected")


def _refused(source: str, error: Exception) -> CheckpointError:
    remedy = "name a folder, or check the id, the revision and HF_TOKEN"
    return _absent(source, f"does not provide it ({reason(error)}): {remedy}")


def _absent(source: str, why: str) -> CheckpointError:
    if _hosted(source).file and Path(source).parent.is_dir():  # probably a misspelt path
        return CheckpointError(f"{source} {why_not_there(source)}")
    where = "is not a folder here and not in the Hugging Face cache"
    return CheckpointError(f"{source} {where}, and the hub {why}")
