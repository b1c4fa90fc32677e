"""Finds drafts for a target on this machine: next to it, in the caches, and among those shipped
with dovetail. Those that do not fit are listed with the reason."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.launch.planning.designs import Design, design_of, read_config
from dovetail.launch.settings.models import boxed_heads
from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.files import cache_folder
from dovetail.workers.heads.registry import kind_of_architecture
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.gguf import view
from dovetail.workers.models.checkpoints.gguf.names import DRAFTS, is_gguf, models_in
from dovetail.workers.models.checkpoints.hub import cached_folders

if TYPE_CHECKING:
    from dovetail.launch.planning.candidates import Candidate, Reader

SMALLER = 2  # a draft's target has at least this multiple of its parameters
HEADS = "heads"  # the folder of heads in dovetail's cache
MOST_NAMED = 3  # the most drafts that one line names


@dataclass
class Drafts:
    """What was found for a target."""

    fitting: "list[Candidate]" = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)  # model -> why it is not used

    def in_words(self) -> str:
        """Return the drafts that were found, and those that do not fit, in one line."""
        found = [f"{named(one)} ({one.name})" for one in self.fitting]
        misfits = [f"{view.spelled(name)} ({why})" for name, why in self.misfits.items()]
        words = f"drafts found: {_some(found)}"
        return f"{words}; passed over: {_some(misfits)}" if misfits else words


def named(draft: "Candidate") -> str:
    """Return a draft as it is named on a command line."""
    return view.spelled(draft.settings.model) or draft.settings.kind


def _some(words: list[str]) -> str:
    more = [f"{len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return ", ".join([*words[:MOST_NAMED], *more]) or "none"


def drafts_there(target: Path, reader_of: "Callable[[Design], Reader]") -> Drafts:
    """Return the drafts for a target that are on this machine: its heads, and smaller models with
    its vocabulary."""
    found, own = Drafts(), _config(target)
    near: list[Path] = []
    for path, declared in _nearby(target):
        try:
            folder = view.view_of(path) if is_gguf(path) else path
            config = _config(folder)
        except (CheckpointError, OSError) as error:
            if declared:
                found.misfits[str(path)] = _brief(error, path)
            continue
        ours = folder in boxed_heads()
        declared = declared or (_names_a_head(config) and not ours)
        differ = [_differ(config.get(name), own.get(name)) for name in SIZES]
        if all(differ) or (ours and any(differ)):
            if declared:  # any other is not meant for this target
                found.misfits[str(path)] = _sizes(config, own)
            continue
        near.append(folder)
    mtp = _has_mtp(target, own, found)
    if not near and not mtp:
        return found  # without importing torch and transformers
    design = design_of(read_config(target, "target model"), target)
    reader = reader_of(design)
    if mtp:
        found.fitting += reader.read(["mtp"])
    for folder in near:
        try:
            candidates = reader.read([str(folder)])
            if why := _against(folder, candidates, target, design):
                found.misfits[str(folder)] = why
            else:
                found.fitting += candidates
        except UserError as error:
            found.misfits[str(folder)] = _brief(error, folder)
    return found


def _has_mtp(target: Path, config: Mapping[str, Any], found: Drafts) -> bool:
    """Return whether a target has an MTP layer that can draft; note why not if it names one."""
    counts = (config[key] for key in config if "nextn" in key or "mtp" in key)
    if not any(counts) and config.get("model_type") not in UNCOUNTED:
        return False
    from dovetail.workers.models.mtp import check_mtp  # torch is imported here

    try:
        check_mtp(target)
    except CheckpointError as error:
        found.misfits["mtp"] = _brief(error, target)
        return False
    return True


UNCOUNTED = ("qwen3_next",)  # model types whose config.json does not count their MTP layers
SIZES = ("vocab_size", "hidden_size")


def _config(folder: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = text_part(read_json(folder / "config.json"))
    return found


def _names_a_head(config: Mapping[str, Any]) -> bool:
    named = str(config.get("architectures"))
    return kind_of_architecture(named) is not None or "speculators_model_type" in config


def _differ(one: Any, other: Any) -> bool:
    return None not in (one, other) and one != other


def _sizes(config: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    theirs, wanted = ([one.get(name) for name in SIZES] for one in (config, own))
    words = "for {} tokens and a width of {}"
    return f"{words.format(*theirs)}, not {words.format(*wanted).removeprefix('for ')}"


def _against(folder: Path, candidates: "Iterable[Candidate]", target: Path, design: Design) -> str:
    """Return why a draft that can be read does not fit; empty if it does."""
    if all(candidate.kind != "small" for candidate in candidates):
        return ""
    own = design_of(read_config(folder, "draft"), folder)
    if SMALLER * own.parameters > design.parameters:
        return "more than half as large as its target"
    own_digest, theirs = _vocabulary(folder), _vocabulary(target)
    if not (own_digest and theirs):
        return "its vocabulary or its target's cannot be read"
    return "" if own_digest == theirs else "another vocabulary"


def _brief(error: Exception, path: Path) -> str:
    """Return an error without the name of the draft and the remedy."""
    said = str(error).removeprefix("the draft ").removeprefix("the head ")
    for name in (str(path), view.spelled(str(path))):
        said = said.removeprefix(name).lstrip(": ")
    return said.partition("; ")[0]


def _nearby(target: Path) -> Iterator[tuple[Path, bool]]:
    """Yield folders and GGUF files that may be drafts, and whether place or name declares it."""
    files = view.files_of(target)
    place = files[0] if files else target.resolve()
    most = sum(file.stat().st_size for file in files or [place]) / SMALLER
    inside = [] if files else sorted(place.iterdir())
    beside = sorted(place.parent.iterdir())
    ours = sorted((cache_folder() / HEADS).glob("*/"))
    for paths, declared in ((inside, True), ([*ours, *boxed_heads()], False), (beside, False)):
        yield from _among(paths, place, files, most, declared=declared)
    for folder in cached_folders():
        if (folder / "config.json").is_file():
            yield from _among([folder], place, files, most, declared=False)
        else:
            yield from _among(sorted(folder.iterdir()), place, files, most, declared=False)


def _among(
    paths: Iterable[Path], place: Path, files: Iterable[Path], most: float, *, declared: bool
) -> Iterator[tuple[Path, bool]]:
    there = [path for path in paths if path.resolve() != place.resolve() and path not in files]
    models = models_in(path.name for path in there if is_gguf(path))
    for path in there:
        if path.is_dir():
            if (path / "config.json").is_file():
                yield path, declared
        elif DRAFTS.match(path.name) and is_gguf(path):
            yield path, True
        elif path.name in models and path.stat().st_size <= most:
            yield path, declared


def _vocabulary(folder: Path) -> str:
    """Return the digest of a vocabulary; empty if it cannot be read."""
    from dovetail.workers.models.checkpoints.tokenizer import table_of

    try:
        return table_of((folder / "tokenizer.json").read_bytes()).digest
    except (OSError, ValueError):
        return ""
