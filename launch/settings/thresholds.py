"""The file of thresholds for `heterospec`: written by `dovetail stratify`, read when settings are
merged, so that only numbers are sent.

    thresholds = [1.2, 3.4]         # nats, ascending

    [holds_for] # what is compared with the settings in force, and refused where it differs
    draft_sha256 = "..." # of the draft's config.json and weights; empty for a draft of a hub
    depth = 8 ...

    [fitted_on]                     # for people
    [[bins]]

The embedded drafts have such files (`demo/thresholds-KIND.toml`).
"""

import hashlib
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.launch.settings.models import DEMO_FOLDER, with_draft
from dovetail.protocol.errors import SettingsError, UserError
from dovetail.protocol.files import read_text, unread, writing
from dovetail.protocol.settings import HEAD_KINDS, MAX_BINS, DraftSettings, Settings
from dovetail.workers.models.checkpoints.gguf.view import weight_paths

MADE_FOR = ("depth", "width", "sharpening")  # the tree's settings that an entropy depends on
MOST_NATS = 1e6  # the largest threshold, as in tree.thresholds


@dataclass(frozen=True)
class Thresholds:
    """The content of a file of thresholds."""

    thresholds: tuple[float, ...]
    holds_for: Mapping[str, Any]


def thresholds_of(
    named: str | tuple[float, ...], settings: Settings, *, local: bool
) -> tuple[float, ...]:
    """Return the thresholds of `heterospec`: from the `named` file, or of the embedded draft;
    numbers are returned unchanged. `SettingsError` names the missing or unsuitable thresholds and
    the command that makes them. `local`: whether the settings' draft is used, and checked."""
    if not isinstance(named, str):
        return named
    path = Path(named).expanduser() if named else _shipped(settings) if local else None
    if path is None:
        raise SettingsError(
            f"tree.policy 'heterospec' needs thresholds for its draft: {_remedy(settings)}"
        )
    found = read_thresholds(path)
    _check(path, found, settings, local)
    return found.thresholds


def read_thresholds(path: Path) -> Thresholds:
    """The content of a file; `SettingsError` if it is missing, or not a file of thresholds."""
    try:
        content = tomllib.loads(read_text(path, f"the file of thresholds {path}"))
    except OSError as error:
        why = unread(error, "`dovetail stratify` makes them")
        raise SettingsError(f"the thresholds in {path} cannot be read: {why}") from None
    except tomllib.TOMLDecodeError as error:
        text = f"the thresholds in {path} are damaged ({error})"
        raise SettingsError(f"{text}: run `dovetail stratify` again") from None
    bounds, holds_for = _bounds(content.get("thresholds")), content.get("holds_for")
    if not bounds or not isinstance(holds_for, dict):
        remedy = "make it again with `dovetail stratify`"
        raise SettingsError(f"{path} is not a file of thresholds: {remedy}")
    return Thresholds(bounds, holds_for)


def write_thresholds(
    path: Path,
    thresholds: Sequence[float],
    sections: Mapping[str, Mapping[str, Any]],
    bins: Sequence[Mapping[str, Any]],
) -> None:
    lines = [
        '# Bounds between the bins of entropy (nats) of tree.policy "heterospec", made by '
        "`dovetail stratify`: name this file as tree.thresholds.",
        f"thresholds = {json.dumps(list(thresholds))}",
    ]
    tables = [(f"[{name}]", section) for name, section in sections.items()]
    for heading, table in [*tables, *(("[[bins]]", stratum) for stratum in bins)]:
        lines += ["", heading, *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    with writing(path, "the thresholds"):
        path.write_text("\n".join((*lines, "")), encoding="utf-8")


def draft_facts(draft: DraftSettings) -> dict[str, str]:
    """Return the name of a draft and, if its files are here, the SHA-256 of its config.json and
    weights."""
    if draft.kind == "substitute":
        return {"draft": f"substitute ({draft.weights})", "draft_sha256": ""}
    if draft.kind == "mtp" and not draft.model:
        return {"draft": "the target's MTP layer", "draft_sha256": ""}
    source = with_draft(draft).model
    folder = Path(source).expanduser()
    ours = folder.is_relative_to(DEMO_FOLDER)
    name = f"embedded {folder.relative_to(DEMO_FOLDER)}" if ours else source
    return {"draft": name, "draft_sha256": _digest(folder) if folder.is_dir() else ""}


def _check(path: Path, found: Thresholds, settings: Settings, local: bool) -> None:
    made_for = found.holds_for
    if local and not _is_same(draft_facts(settings.draft), made_for):
        raise SettingsError(
            f"the thresholds in {path} were made for another draft ({made_for.get('draft')}): "
            f"{_remedy(settings)}"
        )
    for key in MADE_FOR:
        if (there := made_for.get(key)) != (is_here := getattr(settings.tree, key)):
            raise SettingsError(
                f"the thresholds in {path} were made for tree.{key} = {there}, but it is "
                f"{is_here}: {_remedy(settings)}"
            )


def _is_same(facts: Mapping[str, str], made_for: Mapping[str, Any]) -> bool:
    """Identify a draft by the bytes of its files; a model of the hub by its name."""
    digest = facts["draft_sha256"]
    return made_for.get("draft_sha256") == digest and (
        bool(digest) or made_for.get("draft") == facts["draft"]
    )


def _shipped(settings: Settings) -> Path | None:
    draft = settings.draft
    if draft.kind in ("mtp", "substitute"):
        return None
    file = DEMO_FOLDER / f"thresholds-{draft.kind if draft.kind in HEAD_KINDS else 'small'}.toml"
    return file if not settings.target.model and not draft.model and file.is_file() else None


def _remedy(settings: Settings) -> str:
    target, draft, tree = settings.target, settings.draft, settings.tree
    models = [
        *(("--target", target.model) if target.model else ()),
        *(("--draft", draft.model or draft.kind) if draft.model or draft.kind != "auto" else ()),
    ]
    names = ("gamma", "depth", "width", *(("sharpening",) if tree.sharpening != "auto" else ()))
    shape = [text for name in names for text in (f"--tree.{name}", str(getattr(tree, name)))]
    command = shlex.join(
        ["dovetail", "stratify", *models, *shape, "--prompts", "FILE", "--out", "thresholds.toml"]
    )
    return f"run `{command}`, and use its file: --tree.thresholds thresholds.toml"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (folder / "config.json", *sorted([*weight_paths(folder), *folder.glob("*.bin")])):
        try:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise UserError(f"the draft's {file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _bounds(numbers: Any) -> tuple[float, ...]:
    """`numbers` if they are valid for tree.thresholds, else none."""
    if not isinstance(numbers, list) or not all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
    ):
        return ()
    sound = len(numbers) < MAX_BINS and all(0 <= number <= MOST_NATS for number in numbers)
    if sound and all(before < after for before, after in pairwise(numbers)):
        return tuple(map(float, numbers))
    return ()
