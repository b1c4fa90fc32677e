"""The embedded models, and those that empty settings mean; the numbers from which a quantised
target, in GGUF files or safetensors, is computed."""

from pathlib import Path

from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS, DraftSettings, TargetSettings
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import in_blocks
from dovetail.workers.models.checkpoints.gguf.view import blocks_kept, mix_of
from dovetail.workers.models.checkpoints.quantised.schemes import scheme_of

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
TARGET_FOLDER = DEMO_FOLDER / "target"


def with_target(settings: TargetSettings) -> TargetSettings:
    """`settings` with a model: the embedded target if they name none."""
    return settings if settings.model else settings.model_copy(update={"model": str(TARGET_FOLDER)})


def with_draft(settings: DraftSettings) -> DraftSettings:
    """`settings` with a model, unless their draft has none: the embedded one of their kind if they
    name none; `UserError` if there is no such head."""
    if settings.model or not DRAFT_KINDS[settings.kind].own_model:
        return settings
    if settings.kind not in HEAD_KINDS:
        return settings.model_copy(update={"model": str(DEMO_FOLDER / "draft")})
    folder = head_folder(settings.kind)
    if not (folder / "config.json").is_file():
        train = f"train one with `dovetail train {settings.kind}`"
        get = train if DRAFT_KINDS[settings.kind].trained else "download one for the target"
        raise UserError(
            f"draft.kind = {settings.kind!r}: no such head is embedded; {get}, and name its folder "
            "with --draft"
        )
    return settings.model_copy(update={"model": str(folder)})


def head_folder(kind: str) -> Path:
    return DEMO_FOLDER / "heads" / kind


def boxed_heads() -> list[Path]:
    """Return the folders of the heads for public models that come with dovetail."""
    folders = sorted((DEMO_FOLDER / "heads").iterdir())
    return [folder for folder in folders if folder.name not in HEAD_KINDS]


FUNCTIONS = {"fp32": "the file's exact function", "half": "exact only for 16-bit files"}
"""Weights -> the function that they compute from a GGUF file; others compute another function."""
BLOCKS = {"int8": "its blocks, activations in int8", "fp32": FUNCTIONS["fp32"]}
"""Activations -> the function that weights `file` compute."""
LESS = "--weights file takes less"
EXACT, ROUNDED = "the checkpoint's exact weights", "weights rounded once more"


def why_not_blocks(target: TargetSettings) -> str:
    """Return why a target in a GGUF file is not computed from its blocks; empty if it can be, or
    has none."""
    if not in_blocks(Path(target.model)):
        return ""
    alone = "blocks are computed only by the C++ kernels"
    if target.backend == "library":
        return alone
    return f"{alone}, and {why}" if (why := kernels.why_not()) else ""


def keeps_blocks(target: TargetSettings) -> bool:
    """True if a target is computed from the blocks of its GGUF file by default."""
    return blocks_kept(Path(target.model)) and not why_not_blocks(target)


def blocks_in_words(target: TargetSettings) -> str:
    """Return one line for a quantised target; empty for any other."""
    if not target.model:
        return ""
    folder, weights = Path(target.model).expanduser(), target.weights
    if mix := mix_of(folder):
        other = FUNCTIONS.get(weights, "another function")
        said = BLOCKS[target.activations] if weights == "file" else other
        less = why_not_blocks(target) or (LESS if blocks_kept(folder) else "")
    elif in_blocks(folder):
        mix = "experts in MXFP4"
        exact = {"fp32": EXACT, "half": EXACT, "file": BLOCKS[target.activations]}
        said, less = exact.get(weights, ROUNDED), why_not_blocks(target) or LESS
    elif (mix := _scheme_in(folder)) and weights != "half":  # refused later
        said, less = EXACT if weights == "fp32" else ROUNDED, "--weights int8 takes a quarter"
    else:
        return ""
    remedy = f"; {less}" if weights in ("fp32", "half") and less else ""
    return f"{folder.name} ({mix}), weights {weights}: {said}{remedy}"


def _scheme_in(folder: Path) -> str:
    """The quantisation method of a folder's weights; empty if unsupported (loading reports it)."""
    try:
        scheme = scheme_of(text_part(read_json(folder / "config.json")))
    except (CheckpointError, ValueError):
        return ""
    return "" if scheme is None else scheme.method
