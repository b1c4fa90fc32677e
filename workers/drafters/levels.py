"""The cost of a level of a draft's tree, t_D, in the profile file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dovetail.protocol.calibration import ContextCurve
from dovetail.protocol.profile import ProfileKey, load_profile, machine_key, shapes_key
from dovetail.protocol.settings import DraftSettings
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.checkpoint import open_weights
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.mtp import mtp_layer
from dovetail.workers.models.language_model import LanguageModel

if TYPE_CHECKING:
    from dovetail.workers.heads.head import Head


def known_levels(
    profile: Path | None, model: "LanguageModel | Head", library: str
) -> Sequence[ContextCurve]:
    """Return t_D of a draft from the file; empty if it was not measured. `library`: of its device.
    Raises `ProfileError` if the file is damaged."""
    levels = (
        load_profile(profile).find(levels_key(model, library)).levels
        if profile is not None
        else None
    )
    return () if levels is None else (levels,)


def expected_levels(
    profile: Path,
    settings: DraftSettings,
    *,
    target: str,
    vocabulary_size: int,
    library: str,
) -> ContextCurve | None:
    """Return t_D of a draft that is not loaded, by the digest of its files or, for a substitute, of
    its target's; None if it was not measured."""
    known = [entry for entry in load_profile(profile).entries if entry.levels is not None]
    if not known:
        return None
    if settings.kind == "mtp":
        digest = mtp_layer(find_folder(target)).digest
    else:
        source = target if settings.kind == "substitute" else settings.model
        digest = open_weights(find_folder(source)).digest
    shapes = shapes_key((), digest, vocabulary_size)
    fitting = [
        entry
        for entry in known
        if (entry.key.machine, entry.key.shapes, entry.key.threads)
        == (machine_key(), shapes, torch.get_num_threads())
    ]
    weights = (
        settings.weights
        if settings.weights != "auto"
        else "int4"
        if settings.kind == "substitute"
        else None
    )
    found = [
        entry.levels
        for entry in fitting
        if entry.key.software.endswith(f", {kernels.computing(settings.isa)}, {library}")
        and weights in (None, entry.key.weights)
    ]
    return found[-1] if found else None


def levels_key(model: "LanguageModel | Head", library: str) -> ProfileKey:
    """Return the key of t_D of a draft. The digest of its files determines its shapes and the types
    of its matrices."""
    how = model.kernels if isinstance(model, LanguageModel) else model.arithmetic
    shapes = shapes_key((), model.checkpoint_digest, model.vocabulary_size)
    return ProfileKey(
        machine=machine_key(),
        software=f"{how}, {kernels.computing()}, {library}",
        weights=model.weights,
        threads=torch.get_num_threads(),
        shapes=shapes,
    )
