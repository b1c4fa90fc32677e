"""Finds a model: a folder, a snapshot in the Hugging Face cache, or the hub, of which a GGUF file
is fetched alone. Complete snapshots need no network. The hub is asked with a short timeout before a
download. The hub's client, which takes half a second to import, is imported when needed."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.architecture import NOT_THERE, why_no_folder
from dovetail.workers.models.checkpoints.files import read_json, reason
from dovetail.workers.models.checkpoints.gguf import view
from dovetail.workers.models.checkpoints.gguf.names import models_in, parts_of

HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
PICKLED_FILES = ("*.bin",)  # also fetched if the user allows pickled weights
CONFIG_ALONE = ("config.json",)
HUB_ID = re.compile(r"([\w][\w.-]*(?:/[\w][\w.-]*)?)(?:@([\w./-]+))?")
HUB_FILE = re.compile(
    r"([\w][\w.-]*/[\w][\w.-]*)/((?:[\w][\w.-]*/)*[\w][\w.-]*\.gguf)(?:@([\w./-]+))?"
)
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
        raise CheckpointError(f"{source} {NOT_THERE}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = hosted.wanted(files)
    try:
        folder = Path(
            snapshot_download(
                hosted.name, revision=hosted.revision, allow_patterns=wanted, local_files_only=True
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
    return view.local_folder(folder) if _is_complete(folder, files) or not plain else None


def cached_folders() -> list[Path]:
    """Return the snapshots in the Hugging Face cache, including incomplete ones."""
    from huggingface_hub import constants

    return sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*"))


def _is_complete(folder: Path, files: Sequence[str]) -> bool:
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


def _ask_hub(source: str) -> None:
    """Raise `CheckpointError` unless the hub answers that it has a model, and the file of it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    hosted = _hosted(source)
    try:
        found = HfApi().model_info(hosted.name, revision=hosted.revision, timeout=ASK_S)
    except OfflineModeIsEnabled:
        raise _unreachable(source, "HF_HUB_OFFLINE is set") from None
    except HfHubHTTPError as error:  # also for a missing repository or revision
        raise _refused(source, error) from None
    except Exception as error:  # the client's own errors are of one library or another
        raise _unreachable(source, reason(error)) from None
    held = [one.rfilename for one in found.siblings or ()]
    if missing := next((part for part in hosted.wanted(()) if part not in held), None):
        others = ", ".join(models_in(held)[:20]) or "no GGUF file"
        raise CheckpointError(f"{hosted.name} has no file {missing} on the hub; it has {others}")


def _download(source: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    _ask_hub(source)
    hosted = _hosted(source)
    wanted = hosted.wanted(files)
    try:
        folder = Path(
            snapshot_download(hosted.name, revision=hosted.revision, allow_patterns=wanted)
        )
    except HfHubHTTPError as error:
        raise _refused(source, error) from None
    except Exception as error:  # the network, the disk, the cache
        text = f"{source} could not be fetched from the Hugging Face hub ({reason(error)})"
        raise CheckpointError(f"{text}; run `{hosted.command()}` to continue") from None
    return view.view_of(folder / hosted.file) if hosted.file else folder


def _unreachable(source: str, why: str) -> CheckpointError:
    why = f"cannot be reached ({ERRNO.sub('', why)})"
    command = _hosted(source).command()
    return _absent(source, f"{why}: check the name, or run `{command}` while connected")


def _refused(source: str, error: Exception) -> CheckpointError:
    remedy = "name a folder, or check the id, the revision and HF_TOKEN"
    return _absent(source, f"does not provide it ({reason(error)}): {remedy}")


def _absent(source: str, why: str) -> CheckpointError:
    where = "is not a folder here and not in the Hugging Face cache"
    return CheckpointError(f"{source} {where}, and the hub {why}")
