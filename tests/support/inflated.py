"""The embedded pair, its target at the cost of a larger model, as folders and as settings.
torch is imported where a target is written."""

import fcntl
import json
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

from dovetail.launch.settings.configure import DEMO_SETTINGS
from dovetail.launch.settings.models import DEMO_FOLDER, TARGET_FOLDER
from dovetail.protocol.files import cache_folder
from dovetail.protocol.settings import DRAFT_KINDS, byte_count

SETTINGS = "settings.toml"
"""The file that names the models of a pair."""


def write_pair(out: Path, size: str) -> None:
    """Write the target, whose linears take `size` in fp32, the draft, the heads and a settings.toml
    with the models' names into the new folder `out`.

    A head names the checkpoint that it was trained for, and this target reads the same texts in the
    same states: the copies name the new one.
    """
    from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
    from support.inflation import write_inflated

    write_inflated(str(TARGET_FOLDER), byte_count(size), out / "target")
    for name in ("draft", "heads"):
        shutil.copytree(DEMO_FOLDER / name, out / name)
    digest = open_checkpoint(str(out / "target")).digest
    for file in out.glob("heads/*/config.json"):
        config = json.loads(file.read_text(encoding="utf-8"))
        config["dovetail"]["trained_for"] = digest
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    models = "".join(
        f"[{role}]\nmodel = {json.dumps(str(out / role))}\n\n" for role in ("target", "draft")
    )
    demo = DEMO_SETTINGS.read_text(encoding="utf-8")
    (out / SETTINGS).write_text(models + demo, encoding="utf-8")


def kept_pair(size: str) -> Path:
    """Return the folder of a pair of this size in the cache, and write it if it is not there."""
    folder = cache_folder() / "inflated" / f"{byte_count(size)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / SETTINGS).is_file():  # written last
            shutil.rmtree(folder, ignore_errors=True)
            write_pair(folder, size)
    return folder


def models_at(size: str, draft: str = "small") -> dict[str, str]:
    """The settings that name the models of the pair at this size, empty for the embedded pair as it
    is; `draft`: a kind, or a folder."""
    pair = kept_pair(size) if size else None
    target = {} if pair is None else {"target.model": str(pair / "target")}
    if draft not in DRAFT_KINDS:
        return {**target, "draft.kind": "auto", "draft.model": draft}
    if pair is None or not DRAFT_KINDS[draft].own_model:
        return {**target, "draft.kind": draft}
    own = pair / "draft" if draft == "small" else pair / "heads" / draft
    return {**target, "draft.kind": draft, "draft.model": str(own)}


def inflated(size: str, draft: str = "small") -> dict[str, str]:
    """`models_at`, with the tree and the lengths that the embedded pair has where no target is
    named."""
    demo = tomllib.loads(DEMO_SETTINGS.read_text(encoding="utf-8"))
    settings = {
        f"{section}.{name}": str(value)
        for section, values in demo.items()
        for name, value in values.items()
    }
    return {**settings, **models_at(size, draft)}


def as_flags(settings: Mapping[str, str]) -> list[str]:
    """Settings as options of a command."""
    return [f"--{name}={value}" for name, value in settings.items()]
