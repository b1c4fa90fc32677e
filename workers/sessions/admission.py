"""Checks whether a target can hold and compute a new session."""

from collections.abc import Iterable

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open, Reads
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.sessions.room import base_rows, check_rows, host_row_bytes
from dovetail.workers.sessions.session import TargetSession

MAX_SESSIONS = 1024
"""The most sessions of a target; memory is the real bound. A pass has trees of at most 64."""
FEW_SESSIONS = 64
"""The most sessions of a target over several devices, if it is not known how many fit."""


class Admission:
    """Raises `RequestError` for requests that a model cannot serve."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._row_bytes, self._base_rows = host_row_bytes(model), base_rows(model.new_cache(0))

    def check(self, order: Open, opened: int) -> None:
        """Check a request for a session while this many are open."""
        self._check_room(order, opened)
        self._check_biases(order)
        self.check_reads(order.features)
        if order.scored and order.base is not None:
            raise RequestError(
                "protocol",
                f"cannot score a prompt that reuses rows of session {order.base}: reused rows have "
                "no logits",
            )

    def check_memory(self, rows: int, sessions: Iterable[TargetSession]) -> None:
        """Check that the host's memory holds a cache of this many rows in addition to what open
        sessions may still take; a GPU reports this itself."""
        promised = sum(max(0, session.own - session.cache.length) for session in sessions)
        check_rows(rows + self._base_rows, promised, self._row_bytes)

    def check_reads(self, reads: Reads | None) -> None:
        """Check that the features that a draft reads are features of this model."""
        own = (self._model.hidden_size, self._model.vocabulary_size, self._model.layers)
        if reads is not None and (
            (reads.width, reads.vocabulary_size) != own[:2] or max(reads.taps, default=0) >= own[2]
        ):
            text = (
                f"width {reads.width}, vocabulary {reads.vocabulary_size} and layers "
                f"{reads.taps}, where this model has width {own[0]}, vocabulary {own[1]}"
            )
            raise RequestError(
                "settings",
                f"features of {text} and {own[2]} layers were asked for: use a draft that was "
                "made for this target",
            )

    def _check_room(self, order: Open, opened: int) -> None:
        prompt, capacity = order.prompt, order.capacity
        context, size = self._model.context, self._model.vocabulary_size
        if len(prompt) >= context:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens; the model's context of {context} has "
                f"room for at most {context - 1}",
            )
        if not len(prompt) < capacity <= context:
            raise RequestError(
                "capacity",
                f"a capacity of {capacity} tokens does not lie between the prompt's "
                f"{len(prompt)} and the context's {context}",
            )
        if opened >= MAX_SESSIONS:
            raise RequestError(
                "capacity",
                f"{MAX_SESSIONS} sessions are open, the most that this worker holds; close one",
            )
        if max(prompt) >= size:
            raise RequestError(
                "vocabulary", f"the prompt has token {max(prompt)}, beyond the vocabulary of {size}"
            )

    def _check_biases(self, order: Open) -> None:
        size = self._model.vocabulary_size
        if (largest := max((token for token, _ in order.sampling.logit_bias), default=0)) >= size:
            raise RequestError(
                "vocabulary", f"logit_bias names token {largest}, beyond the vocabulary of {size}"
            )
