"""Sessions of a draft that ask for one proposal each; and drafts whose device, for which the CPU
stands, computes nothing, so that only the host's part of a level is left."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.attention import by_torch
from dovetail.workers.models.backends.device.arenas import ArenaCache, Arenas
from dovetail.workers.models.backends.device.fixed import SLOTS
from dovetail.workers.models.backends.device.levels import Captured, Levels
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Shape
from support.heads import VARIANTS, Variant, write_head
from support.models import tiny_llama
from support.opening import opening

PROMPT, CAPACITY = 256, 480
DEEP, SHALLOW = 9, 1
"""The levels of the two proposals by which a level is measured."""
LAYERS, HIDDEN, CONTEXT, VOCABULARY = 22, 2048, 4096, 512


def of_a_level(of_proposal: Callable[[int], float]) -> float:
    """Return what a level takes, given what a proposal of so many levels takes."""
    return (of_proposal(DEEP) - of_proposal(SHALLOW)) / (DEEP - SHALLOW)


def _nothing() -> None:
    """Draft for no session."""


class Drafts:
    """Sessions of one draft, one after the other, each drafted for once."""

    def __init__(self, engine: HeadDrafter | Drafter, width: int, temperature: float) -> None:
        self.engine, self.width = engine, width
        self.sampling, self.sessions = Sampling(temperature=temperature), 0
        self.draft: Callable[[], object] = _nothing
        """Drafts for the session that was begun last."""

    def begin(self, depth: int) -> None:
        """Open a session that is to be drafted for once, in so many levels."""
        engine, shape = self.engine, Shape(self.width * depth, depth, self.width)
        self.sessions += 1
        tree = TreeSettings(
            policy="beam", gamma=shape.nodes, depth=depth, width=self.width, sharpening=1.0
        )
        order = opening(
            self.sessions,
            range(3, 3 + PROMPT),
            capacity=CAPACITY,
            sampling=self.sampling,
            tree=tree,
        )
        session = engine.open(order)
        if isinstance(engine, HeadDrafter):
            features = torch.randn(PROMPT, engine.reads.row).to(TYPES[engine.reads.dtype])
            engine.feed(session, 0, to_array(features))
        while engine.prepare(session):
            pass
        self.draft = partial(engine.draft, session, (), 5, shape)


class Timed(Drafts):
    """Proposals that are timed."""

    def seconds(self, depth: int) -> float:
        """Return what a proposal of so many levels takes, for a session that is opened for it."""
        self.begin(depth)
        torch.zeros(1, device=device_of(self.engine)).cpu()  # what came before is over
        began = time.perf_counter()
        self.draft()
        return time.perf_counter() - began


def device_of(engine: HeadDrafter | Drafter) -> torch.device:
    return engine.head.device if isinstance(engine, HeadDrafter) else engine.model.device


def wide(kind: str, hidden: int, units: int, vocabulary: int) -> Variant:
    """Return a head for a target of this width, in fp16, without an embedding of its own."""
    heads = hidden // 128 or 1
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "target_width": hidden,
        "vocabulary": vocabulary,
        "draft_vocabulary": vocabulary,
        "heads": heads,
        "kv_heads": max(1, heads // 4),
        "head_dim": 128,
        "intermediate": units,
        "gain": 1.0,
        "dtype": torch.float16,
        "own_embedding": False,
    }
    if kind == "eagle3":
        sizes |= {"taps": (0, 1, 1), "draft_vocabulary": vocabulary // 4}
    return replace(VARIANTS[kind], **sizes)


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return what computes a pass at the first call, and gives the same at every other."""
    found: list[Any] = []

    def replay() -> Any:
        if not found:
            found.append(function())
        return found[0]

    return replay


class Model(Captured):
    """A small model of 22 layers that compute nothing."""

    def __init__(self) -> None:
        self.vocabulary_size, self.context, self.device = VOCABULARY, CONTEXT, torch.device("cpu")
        self.back_end = self
        self._embedding, self._arenas = torch.randn(VOCABULARY, HIDDEN), Arenas(SLOTS)
        head = torch.randn(VOCABULARY, HIDDEN)
        self.levels = Levels(
            captured, self.device, HIDDEN, [], [], lambda _: None, by_torch, lambda x: x @ head.t()
        )

    def new_cache(self, capacity: int) -> ArenaCache:
        shape = {"layers": LAYERS, "kv_heads": 4, "head_dim": 8, "capacity": capacity}
        place = {"dtype": torch.float16, "device": self.device}
        return ArenaCache(self._arenas, **shape, **place)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, *_: Any, rows: Tensor) -> Tensor:
        """Read a prompt, of which nothing is wanted."""
        return torch.zeros(len(rows), VOCABULARY)

    def _states(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self._embedding)


def opened(kind: str, folder: Path) -> HeadDrafter | Drafter:
    """Open a draft of a kind on the device that the CPU stands for."""
    if kind == "small":
        return Drafter(Model(), Spans())  # type: ignore[arg-type]
    target = tiny_llama(folder / "target", vocab=VOCABULARY, context=512)
    sizes = {"vocabulary": VOCABULARY, "draft_vocabulary": VOCABULARY}
    head = open_head(
        str(write_head(folder / kind, kind, gain=1.0, own_embedding=True, **sizes)),
        target=str(target),
        weights="fp32",
        device="cpu",
        backend="library",
    )
    return HeadDrafter(head, Spans(), contrast=False, capture=captured)
