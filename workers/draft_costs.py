"""What a level of a draft's tree costs on this machine, t_D: measured with passes as a draft worker makes them, and read again when one starts.

t_D(rows) is one pass over so many nodes with the logits of all of them, behind a cache of some length: of a smaller model by its own forward pass, of a head as
`head_levels.py` computes a level, from states instead of features. What ranking the children takes on top of it depends on the tree; the coordinator learns
that from rounds. The weights are those of the settings, and the model is opened as the worker opens it. Knows seconds and keys; nothing of who asks.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dovetail.protocol.profile import ContextCurve, ProfileKey, load_profile, machine_key, shapes_key
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.calibration import CONTEXT, Computes, Passes
from dovetail.workers.devices import first_device, open_device
from dovetail.workers.draft import open_draft_worker
from dovetail.workers.drafter import Drafter
from dovetail.workers.head_drafter import HeadDrafter
from dovetail.workers.head_levels import Capture, Levels, open_levels
from dovetail.workers.models.checkpoint import find_folder, open_weights
from dovetail.workers.models.heads import Head
from dovetail.workers.models.inflate import inflated_digest, inflation_bytes
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Segment

LEVELS = (1, 2, 4, 8, 10, 16)
"""Rows of one level of a draft."""


def calibrate_draft(
    settings: DraftSettings, *, threads: int, target: str, seconds: float, inflate: str = "", cache: Path | None = None
) -> tuple[ProfileKey, ContextCurve]:
    """t_D of the draft of `settings`, a small model, a head of the model `target` or its substitute, which is inflated as it is and kept in the folder `cache`;
    and where that holds. `seconds`: about how long to measure.

    Behind a cache of CONTEXT rows, or as many as the draft allows. `UserError` as `open_draft_worker`.
    """
    device = open_device(first_device() if settings.device == "auto" else settings.device, threads)
    own = settings.model_copy(update={"device": device.name})
    engine = open_draft_worker(own, name="draft", threads=threads, target=target, inflate=inflate, cache=cache).engine
    if isinstance(engine, HeadDrafter):
        head = engine.head
        return levels_key(head, device.library), _measure(_Guesses(head, device.capture), head.spec.context, seconds)
    assert isinstance(engine, Drafter)
    return levels_key(engine.model, device.library), _measure(engine.model, engine.model.context, seconds)


def _measure(model: Computes, context: int, seconds: float) -> ContextCurve:
    length = max(1, min(CONTEXT, context - LEVELS[-1]))
    passes = Passes(model, length + LEVELS[-1])
    passes.fill(length)
    return ContextCurve(context=length, t_v=passes.curve(LEVELS, seconds))


def known_levels(profile: Path | None, model: LanguageModel | Head, library: str) -> Sequence[ContextCurve]:
    """t_D of a draft as the file has it; nothing where it was not measured. `library`: of the device that it is on. `ProfileError` if the file is damaged."""
    levels = load_profile(profile).find(levels_key(model, library)).levels if profile is not None else None
    return () if levels is None else (levels,)


def expected_levels(profile: Path, settings: DraftSettings, *, target: str, inflate: str, vocabulary_size: int, library: str) -> ContextCurve | None:
    """The same of a draft that is not loaded: by the digest of its files, or, of a substitute, of its target's; None where it was not measured."""
    known = [entry for entry in load_profile(profile).entries if entry.levels is not None]
    if not known:
        return None
    digest = open_weights(find_folder(target if settings.kind == "substitute" else settings.model)).digest
    if settings.kind == "substitute" and inflate:
        digest = inflated_digest(digest, inflation_bytes(inflate))
    shapes = shapes_key((), digest, vocabulary_size)
    fitting = [entry for entry in known if (entry.key.machine, entry.key.shapes, entry.key.threads) == (machine_key(), shapes, torch.get_num_threads())]
    weights = settings.weights if settings.weights != "auto" else "int4" if settings.kind == "substitute" else None
    found = [entry.levels for entry in fitting if entry.key.software.endswith(f", {library}") and weights in (None, entry.key.weights)]
    return found[-1] if found else None


def levels_key(model: LanguageModel | Head, library: str) -> ProfileKey:
    """Where t_D of a draft holds. A digest of its files tells its shapes, and the types that its matrices are stored in."""
    how = model.arithmetic if isinstance(model, Head) else model.kernels
    shapes = shapes_key((), model.checkpoint_digest, model.vocabulary_size)
    return ProfileKey(machine=machine_key(), software=f"{how}, {library}", weights=model.weights, threads=torch.get_num_threads(), shapes=shapes)


class _Guesses:
    """A head as it computes levels, one session's; its states and tokens are made up, which costs the same."""

    def __init__(self, head: Head, capture: Capture | None) -> None:
        self._head, self._capture = head, capture
        self._levels: Levels | None = None
        self.vocabulary_size = head.vocabulary_size

    def new_cache(self, capacity: int) -> Cache:
        cache, self._levels = open_levels(self._head, capacity, self._capture)
        return cache

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[Segment], *, rows: Tensor | None = None) -> Tensor:
        """Logits [R, V] of `rows`, or, as of a level, of all."""
        (segment,) = segments
        states = torch.zeros(len(tokens), self._head.spec.hidden, device=self._head.device)
        if rows is not None:
            return self._head.forward(tokens, states, positions, segments, true=False, rows=rows).logits
        assert self._levels is not None
        assert segment.paths is not None
        return self._levels(tokens, states, positions, segment.paths, segment.start, contrast=False).logits
