"""The embedded models, and which one an empty setting means."""

from pathlib import Path

from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS, DraftSettings, TargetSettings

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
TARGET_FOLDER = DEMO_FOLDER / "target"


def with_target(settings: TargetSettings) -> TargetSettings:
    """`settings` that name a model: the embedded target if they name none."""
    return settings if settings.model else settings.model_copy(update={"model": str(TARGET_FOLDER)})


def with_draft(settings: DraftSettings) -> DraftSettings:
    """`settings` that name a model, unless their draft has none: the embedded one of their kind if
    they name none; `UserError` if there is no such head."""
    if settings.model or not DRAFT_KINDS[settings.kind].own_model:
        return settings
    if settings.kind not in HEAD_KINDS:
        return settings.model_copy(update={"model": str(DEMO_FOLDER / "draft")})
    folder = head_folder(settings.kind)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"draft.kind = {settings.kind!r}: no such head is embedded; make one with `dovetail "
            f"train {settings.kind}`, and name its folder with --draft"
        )
    return settings.model_copy(update={"model": str(folder)})


def head_folder(kind: str) -> Path:
    return DEMO_FOLDER / "heads" / kind
