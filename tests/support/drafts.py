"""Sessions of a draft that ask for one proposal each, or for proposals side by side; and drafts
whose device, for which the CPU stands, computes nothing, so that only the host's part of a level is
left."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.settings.tree import POLICIES
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.tree import Grower
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.attention import by_torch
from dovetail.workers.models.backends.device.fixed import SLOTS, ArenaCache, Arenas
from dovetail.workers.models.backends.device.levels import Captured, Levels
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Order, Price, Proposal, Shape
from support.heads import VARIANTS, Variant, write_head
from support.models import VOCABULARY as FEW
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
    """Sessions of one draft, some at a time, each drafted for once."""

    def __init__(
        self, engine: HeadDrafter | Drafter, width: int, temperature: float, together: int = 1
    ) -> None:
        """`together`: sessions that are drafted for at a time."""
        self.engine, self.width, self.together = engine, width, together
        self.sampling, self.sessions = Sampling(temperature=temperature), 0
        self.draft: Callable[[], object] = _nothing
        """Drafts for the sessions that were begun last."""

    def begin(self, depth: int) -> None:
        """Open sessions that are to be drafted for once, in so many levels."""
        shape = Shape(self.width * depth, depth, self.width)
        orders = [Order(self._open(shape), (), 5, shape) for _ in range(self.together)]
        self.draft = lambda: [*self.engine.draft_all(orders)]

    def _open(self, shape: Shape) -> Any:
        engine: Any = self.engine
        depth = shape.depth
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
        return session


class Timed(Drafts):
    """Proposals that are timed."""

    def seconds(self, depth: int) -> float:
        """Return what a proposal of so many levels takes, for sessions that are opened for it."""
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


# ---- sessions side by side

PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3], [5, 7, 7])
SHAPES = (Shape(12, 4, 4), Shape(3, 2, 2), Shape(16, 5, 3), Shape(8, 3, 4))
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=8, repetition_penalty=1.3),
    Sampling(temperature=1.2),
)
POLICY_NAMES = tuple(sorted(POLICIES))


def tree_of(policy: str) -> TreeSettings:
    """Sharpening is fixed: what one session teaches, others use."""
    if policy == "beam":
        return TreeSettings(policy=policy, gamma=12, depth=4, width=3, sharpening=1.0)
    return TreeSettings(policy=policy, gamma=12, depth=4, width=4, sharpening=1.0)


class Scene:
    """Sessions of an engine, each with a prompt, a sampling and a shape of its own; time stands
    still, so that it decides nothing."""

    def __init__(self, engine: Grower[Any], policies: Sequence[str], *, ahead: bool) -> None:
        self.engine, self.ahead, self.rounds = engine, ahead, 0
        self.random = torch.Generator().manual_seed(1)
        self.sessions = [
            engine.open(  # type: ignore[attr-defined]
                opening(
                    number,
                    prompt,
                    capacity=60,
                    vocabulary_size=FEW,
                    key=bytes([number] * 16),
                    sampling=SAMPLINGS[number],
                    tree=tree_of(policy),
                    end=(1,),
                )
            )
            for number, (prompt, policy) in enumerate(zip(PROMPTS, policies, strict=True))
        ]
        self.last: list[Proposal | None] = [None] * len(PROMPTS)
        if isinstance(engine, HeadDrafter):
            for session, prompt in zip(self.sessions, PROMPTS, strict=True):
                engine.feed(session, 0, self.some(len(prompt)))

    def some(self, count: int) -> Any:
        assert isinstance(self.engine, HeadDrafter)
        reads = self.engine.reads
        return to_array(torch.randn(count, reads.row, generator=self.random).to(TYPES[reads.dtype]))

    def order(self, number: int) -> Order[Any]:
        """The order of a round: the first node is accepted where there is one."""
        session, last = self.sessions[number], self.last[number]
        accepted = (0,) if last is not None and len(last.tree) and self.rounds % 2 else ()
        more = (2, 3) if (self.rounds + number) % 3 == 2 else ()
        if isinstance(self.engine, HeadDrafter) and self.rounds:
            missing = len(session.log) + len(accepted) + len(more) - session.fed
            self.engine.take_features(session, self.some(missing))
        price = Price() if number % 2 else Price(rate=0.0, floor=0.001)
        bonus = 1 + (7 * self.rounds + number) % (FEW - 1)
        return Order(
            session,
            accepted,
            bonus,
            SHAPES[(number + self.rounds) % len(SHAPES)],
            more=more,
            price=price,
            ahead=self.ahead,
        )

    def round(self, *, together: bool) -> list[Proposal]:
        """A round of all of them."""
        orders = [self.order(number) for number in range(len(self.sessions))]
        batches = [orders] if together else [[order] for order in orders]
        found = dict[int, Proposal]()
        for first, batch in enumerate(batches):
            for place, outcome in self.engine.draft_all(batch):
                assert isinstance(outcome, Proposal)
                found[first + place] = outcome
        self.rounds += 1
        self.last = [found[number] for number in range(len(orders))]
        self._grow(together=together)
        return [found[number] for number in range(len(orders))]

    def _grow(self, *, together: bool) -> None:
        """Two passes ahead for each, those that go together in one."""
        if together:
            for _ in range(2):
                self.engine.grow_all_ahead(self.sessions)
        else:
            for session in self.sessions:
                for _ in range(2):
                    self.engine.grow_all_ahead([session])


def still() -> int:
    return 0


def check(
    new: Callable[[], Grower[Any]],
    policies: Sequence[str],
    *,
    ahead: bool,
    exact: bool = True,
    rounds: int = 5,
) -> None:
    """Each session gets the same proposals in company as alone, round after round; `exact`: with
    the same bytes of all scores."""
    alone, company = Scene(new(), policies, ahead=ahead), Scene(new(), policies, ahead=ahead)
    nodes = 0
    for _ in range(rounds):
        expected, found = alone.round(together=False), company.round(together=True)
        if exact:
            assert found == expected
        for one, other in zip(found, expected, strict=True):
            assert one.tree == other.tree
            np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=1e-4)
        nodes += sum(len(proposal.tree) for proposal in expected)
    assert nodes > 20
