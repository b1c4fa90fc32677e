"""A draft head, ready to compute: EAGLE-1/2, EAGLE-3, Dovetail, Jakiro and Jakiro*, each from its
public checkpoint.

Row j of a head takes the feature of position j and the token of position j + 1, has rotary position
j, and predicts the token of position j + 2. A feature is the target's, or the head's own output for
its previous row. Logits are over the target's vocabulary. Independent of trees and sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import BACKENDS
from dovetail.workers.heads.checkpoint import open_head_checkpoint
from dovetail.workers.heads.engines import TYPES, HeadEngine, HeadKernels, HeadTorch
from dovetail.workers.heads.files import classify
from dovetail.workers.heads.matrices import KINDS, check_weights
from dovetail.workers.heads.parts import HeadCheckpoint, HeadParts, Inputs
from dovetail.workers.heads.reduced.recent import RecentRows
from dovetail.workers.heads.reduced.rows import FrequentRows
from dovetail.workers.heads.registry import KINDS as HEADS
from dovetail.workers.heads.spec import HeadSpec
from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends import packing
from dovetail.workers.models.backends.device.fixed import Graphs
from dovetail.workers.models.backends.device.levels import Fetched
from dovetail.workers.models.backends.device.rows import PlacedRows
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.progress import beat

__all__ = ["Head", "HeadSpec", "Predicted", "classify", "open_head"]

WEIGHTS = ("auto", "fp32", "fp16", "bf16", "int8", "int4")
"""`auto` keeps the stored types: on a CPU each matrix's own, int8 for 8-bit codes and a GGUF file's
blocks; on a GPU one 16-bit type."""
HALF = {"float16": "fp16", "bfloat16": "bf16"}  # type of features -> weights of 16 bits
TRIED_ROWS, TRIED_LEVELS = 8, 3  # the rows and levels of the trial of fp16
MASSIVE = 2500.0
"""The largest numbers in the streams of 7B models (Sun et al. 2024, Massive Activations in Large
Language Models)."""
OVERFLOWS, OVERFLOWED = "large inputs leave fp16", "numbers have left fp16"


@dataclass(frozen=True)
class Predicted:
    """The predictions of a pass for its R rows."""

    logits: Tensor
    """float32 [R, V], over the target's vocabulary; -inf for tokens outside the draft
    vocabulary."""
    states: Tensor  # [R, H]: the recurrent states, which are the features of the next step
    contrast: Tensor | None
    """float32 [R, V], if requested and available: logits of the token after the one that a row
    predicts."""
    best: Fetched | None = None  # the children as ranked by a device; None: the host ranks


class Head:
    """A head on one device; T rows of a pass, R requested rows, V the target's vocabulary, H the
    head's width, W the width of a feature."""

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        engine: HeadEngine,
        *,
        weights: str,
        rows: Tensor | None = None,
        wider: "Callable[[], Head] | None" = None,
        said: str = "",
    ) -> None:
        """`rows`: the tokens of a reduced output head, int64 ascending; None: it stays whole.
        `wider`: opens the head with products that never narrow to fp16; None: none of its products
        does. `said`: a sentence about types that the user has not chosen; empty if there are
        none."""
        self.spec, self.source = checkpoint.spec, checkpoint.source
        self.wider, self.said = wider, said
        self.device: torch.device = engine.device
        self.checkpoint_digest, self.trained_for = checkpoint.digest, checkpoint.trained_for
        self.weights, self.reduced = weights, None if rows is None else len(rows)
        self.arithmetic = engine.name + ("" if rows is None else f", {len(rows)} output rows")
        self.vocabulary_size = self.spec.vocabulary_size
        self._engine, self.graphs = engine, Graphs()
        kind, parts = HEADS[self.spec.kind], HeadParts(checkpoint, engine)
        self._body, self.pairs = kind.body(parts), kind.pairs(parts)
        self.mask_features = kind.mask_features(parts)
        self.ours = engine.ours  # our functions for rows of several sessions, if any
        self._table = _table(checkpoint.embedding, engine)
        shares = checkpoint.output is checkpoint.embedding and engine.table is not None
        output, tokens = self._table if shares else checkpoint.output, checkpoint.tokens
        self._whole: Tensor | None = None  # all rows of a reduced output head, on a CPU
        if rows is not None:
            self._whole = output if self.device.type == "cpu" else None
            self._lacking = torch.ones(len(output), dtype=torch.bool).index_fill_(0, rows, False)
            output, tokens = output[rows.to(output.device)], rows
        self._output = engine.linear(output)
        self._tokens = None if tokens is None else tokens.to(self.device)

    def longest_tokens(self, count: int) -> Tensor:
        """Return the tokens whose embeddings have the largest norms, int64 [count]."""
        lengths = torch.linalg.vector_norm(self._table, dim=1, dtype=torch.float32)
        longest: Tensor = lengths.topk(count).indices
        return longest

    def new_cache(self, capacity: int) -> Cache:
        """Return an empty cache for one session of at least `capacity` rows, including those of
        trees."""
        return self._engine.open_cache(capacity)

    def recent_rows(self, text: Sequence[int], end: Sequence[int]) -> RecentRows | None:
        """Return the output rows of a session's own tokens; None: the output head is whole, or on a
        GPU, where levels are captured."""
        if self._whole is None:
            return None
        known = [token for token in end if token < self.vocabulary_size]
        return RecentRows(self._whole, self._lacking, text, known)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        true: bool,
        rows: Tensor | None = None,
        contrast: bool = False,
        recent: Sequence[tuple[int, RecentRows | None]] = (),
    ) -> Predicted:
        """Compute a pass: tokens, positions int64 [T] (the rows of all segments, one after the
        other), features [T, W] of the target if `true`, else recurrent [T, H]. `rows`: which of the
        T are predicted, None: all. Keys and values of all rows go into the caches. `recent`: counts
        of predicted rows, one after the other, with the tokens that a reduced output head adds."""
        width = self.spec.feature_width if true else self.spec.hidden
        if features.shape[1] != width:
            raise ValueError(f"features of width {features.shape[1]}, not of {width}")
        seen: Any = None
        if true or not self.spec.views:
            seen = self._engine.see(positions, segments)
        else:
            seen = {
                view: self._engine.see(positions, [view.of(segment) for segment in segments])
                for view in {*self.spec.views}
            }
        return self._predict(
            tokens, features, seen, true=true, rows=rows, contrast=contrast, recent=recent
        )

    @torch.inference_mode()
    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        memory: Tensor | PlacedRows,
        *,
        true: bool = False,
        rows: Tensor | None = None,
        contrast: bool = False,
    ) -> Predicted:
        """Compute a pass in shapes that depend on T and S alone, for CUDA graphs: no value is read
        back from the device. `memory`: S rows of torch's cache, or those of several sessions.

        tokens, positions, slots int64 [T], features and `rows` as in `forward`, mask [T, S] of 0
        and -inf; a row sees itself by its slot."""
        assert isinstance(self._engine, HeadTorch)
        seen = self._engine.fix(positions, memory, slots, mask)
        return self._predict(tokens, features, seen, true=true, rows=rows, contrast=contrast)

    def _predict(
        self,
        tokens: Tensor,
        features: Tensor,
        seen: Any,
        *,
        true: bool,
        rows: Tensor | None,
        contrast: bool,
        recent: Sequence[tuple[int, RecentRows | None]] = (),
    ) -> Predicted:
        beat()
        device, dtype = self.device, torch.float32
        rows = None if rows is None else rows.to(device)
        features = features.to(device, dtype).contiguous()
        contrast = contrast and self.spec.contrast
        tokens = tokens.to(device)
        embedded = embedding(tokens, self._table).to(dtype)
        out = self._body(Inputs(tokens, embedded, features, seen, rows, contrast, true))
        count = out.states.shape[0]
        if count == 0:
            empty = torch.empty(0, self.vocabulary_size, device=device)
            return Predicted(empty, out.states, None if out.contrast is None else empty)
        read = [*out.branches, *([] if out.contrast is None else [out.contrast])]
        logits = self._scaled(self._output(read[0] if len(read) == 1 else torch.cat(read)))
        logits = self._spread(logits).view(len(read), count, -1)
        for states, own in zip(read, logits, strict=True):
            self._add_recent(states, own, recent)
        first = logits[0] if out.share is None else _mixed(logits[0], logits[1], out.share.float())
        return Predicted(first, out.states, None if out.contrast is None else logits[-1])

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return the logits for products with rows of the output head."""
        scale, cap = self.spec.logit_scale, self.spec.softcap
        logits = logits.float() if scale == 1.0 else logits.float() * scale
        return torch.tanh(logits / cap) * cap if cap > 0.0 else logits

    def _add_recent(
        self, states: Tensor, logits: Tensor, recent: Sequence[tuple[int, RecentRows | None]]
    ) -> None:
        """Write the logits of sessions' own tokens after states [R, H] into logits [R, V]."""
        start = 0
        for count, rows in recent:
            if rows is not None and rows.count:
                part = slice(start, start + count)
                own = self._scaled(rows.product(states[part]))
                logits[part].index_copy_(1, rows.ids, own)
            start += count

    def _spread(self, logits: Tensor) -> Tensor:
        """Scatter logits over the draft vocabulary [R, Vd] to the target's, [R, V]."""
        if self._tokens is None:
            return logits
        spread = torch.full(
            (logits.shape[0], self.vocabulary_size), float("-inf"), device=logits.device
        )
        return spread.index_copy_(1, self._tokens, logits)


def _mixed(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Return the logarithm of the mixture of two distributions, which serves as logits."""
    return torch.logaddexp(
        first.log_softmax(dim=-1) + share.log(), second.log_softmax(dim=-1) + torch.log1p(-share)
    )


def _table(weight: Tensor, engine: HeadEngine) -> Tensor:
    """Return the embedding in the type of the engine's table, or as stored."""
    return weight if engine.table is None else weight.to(engine.device, engine.table)


def open_head(
    source: str,
    *,
    target: str,
    weights: str = "auto",
    device: str = "cpu",
    allow_bin: bool = False,
    backend: str = "auto",
    choose_type: Callable[[str], str] = str,
    output: FrequentRows | None = None,
) -> Head:
    """Open the head in `source` for the model in `target` (folders, hub ids, id@revision), with
    weights of a type in `WEIGHTS` on cpu or cuda:N.

    `allow_bin`: allow pickled weights. `backend`: kernels, library (torch), or auto, the kernels on
    a CPU that has them. `choose_type`: with weights auto, returns the type that weights stored in
    16 bits (fp16, bf16) get on a GPU. `output`: chooses the rows of the output head; None: all.
    Raises `CheckpointError` in one line for anything wrong or misfitting. On a GPU states are fp32;
    if products that narrow them to fp16 overflow, wider products with the stored weights replace
    them."""
    if weights not in WEIGHTS:
        raise CheckpointError(
            f"there are no weights of type {weights!r} for a draft head; choose "
            f"{', '.join(WEIGHTS)}"
        )
    if backend not in BACKENDS:
        raise CheckpointError(f"there is no back end {backend!r}; choose {' or '.join(BACKENDS)}")
    place = torch.device(device)
    check_weights(weights, place)

    def opened(exact: str) -> Head:
        """Open the head; `exact`: why no product may narrow states to fp16; empty: one may."""
        checkpoint = open_head_checkpoint(
            source, target=target, weights=weights, allow_bin=allow_bin
        )
        on_gpu = place.type != "cpu"
        stored = "int8" if checkpoint.coded else "auto"
        kind = (HALF[checkpoint.spec.dtype] if on_gpu else stored) if weights == "auto" else weights
        if weights == "auto" and on_gpu and not exact:
            kind = choose_type(kind)
        narrows = on_gpu and kind == "fp16" and not exact
        rows = None if output is None else output.choose(checkpoint, on_cpu=not on_gpu)
        return Head(
            checkpoint,
            _engine(checkpoint, kind, place, backend, exact=bool(exact)),
            weights=weights,
            rows=None if rows is None else torch.from_numpy(rows),
            wider=partial(opened, OVERFLOWED) if narrows else None,
            said=f"{place}: {exact}: products and cache are fp32" if exact else "",
        )

    head = opened("")
    return opened(OVERFLOWS) if head.wider is not None and _overflows(head) else head


def _overflows(head: Head) -> bool:
    """Return whether large inputs overflow fp16: the tokens whose embeddings have the largest
    norms, massive features, and a few levels of recurrent states."""
    width, count = head.spec.feature_width, head.spec.block or TRIED_ROWS
    features = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    features[torch.arange(count), torch.arange(count) * width // count] = MASSIVE
    tokens, cache = head.longest_tokens(count), head.new_cache(count * (1 + TRIED_LEVELS))
    wrong = []
    for level in range(1 + TRIED_LEVELS):
        rows = range(level * count, (level + 1) * count)
        positions, segment = torch.tensor(rows), Segment(cache, rows.start, count)
        found = head.forward(tokens, features, positions, [segment], true=level == 0)
        wrong.append(found.logits.isnan().any() | found.logits.isposinf().any())
        features = found.states if len(found.states) else torch.zeros(count, head.spec.hidden)
    return bool(torch.stack(wrong).any())


def _engine(
    checkpoint: HeadCheckpoint, weights: str, device: torch.device, backend: str, *, exact: bool
) -> HeadEngine:
    """Return the kernels if requested and possible, else torch."""
    rotation = checkpoint.rotation
    why_not = (
        f"they compute on a CPU, not on {device}"
        if device.type != "cpu"
        else "the settings say so"
        if backend == "library"
        else ""
    )
    why_not = why_not or packing.reason_against(KINDS.get(weights, Kind.FP32))
    if not why_not:
        return HeadKernels(rotation, weights=weights)
    if backend == "kernels":
        raise CheckpointError(
            f"{checkpoint.source}: no C++ kernels for this head: {why_not}; or use backend library"
        )
    if device.type == "cpu":
        return HeadTorch(rotation, weights=weights, device=device, cached=torch.float32)
    return HeadTorch(
        rotation,
        weights=weights,
        device=device,
        cached=torch.float32 if weights == "fp32" or exact else torch.float16,
        table=TYPES.get(weights, TYPES[HALF[checkpoint.spec.dtype]]),
        exact=exact,
    )
