"""The launches, copies and waits of a level of every kind of draft stay within a budget: they are
counted on a pretended GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol.messages import Command, Event
from dovetail.protocol.settings import (
    DraftSettings,
    MemorySettings,
    Sampling,
    TargetSettings,
    TreeSettings,
)
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.backends.device.choice import Products
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.unified import open_unified
from pretended import device as pretended
from pretended.device import POSSIBLE, PRETENDED, Counts, capture, counted, device
from support.cases import everyday
from support.emulated import given_to_pretended
from support.heads import VARIANTS, write_head
from support.kernels import needs_kernels
from support.models import tiny_llama
from support.pairs import PairOfWorkers

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]

PROMPT = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
SHALLOW, DEEP, WIDTH = 3, 5, 4


@pytest.fixture
def there() -> torch.device:
    return device()


def test_each_kind_of_work_is_counted_once(there: torch.device) -> None:
    a, here = torch.ones(2, 3, device=there), torch.ones(2, 3)
    doubled = capture(lambda: (a * 2.0) + a)
    pinned = torch.ones(2, 3)
    PRETENDED.transfer(there).pin(pinned)
    expected: dict[Callable[[], object], Counts] = {
        lambda: a + a: Counts(launches=1),
        lambda: a[0].view(3, 1).t(): Counts(),
        lambda: torch.empty(3, device=there): Counts(),
        lambda: a.sum().item(): Counts(launches=1, copies_out=1, synchronisations=1),
        lambda: a.cpu(): Counts(copies_out=1, synchronisations=1),
        lambda: a.tolist(): Counts(copies_out=1, synchronisations=1),
        lambda: here.copy_(a): Counts(copies_out=1, synchronisations=1),
        lambda: pinned.copy_(a, non_blocking=True): Counts(copies_out=1),
        lambda: a.copy_(here): Counts(copies_in=1, synchronisations=1),
        lambda: a.copy_(here, non_blocking=True): Counts(copies_in=1, synchronisations=1),
        lambda: a.copy_(pinned, non_blocking=True): Counts(copies_in=1),
        lambda: torch.tensor([1], device=there): Counts(copies_in=1, synchronisations=1),
        lambda: a[torch.tensor([1])]: Counts(launches=1, copies_in=1, synchronisations=1),
        lambda: a[a[:, 0] > 0]: Counts(launches=2, synchronisations=1),
        lambda: a.nonzero(): Counts(launches=1, synchronisations=1),
        doubled: Counts(launches=1),
    }
    for number, (work, counts) in enumerate(expected.items()):
        with counted() as outer, counted() as found:
            work()
        assert found == outer == counts, number


@contextmanager
def watched(pair: PairOfWorkers) -> Iterator[Counts]:
    """Count what the draft's commands ask for, without what it does while it waits."""
    handle, all_of_it = pair.draft.handle, Counts()

    def counting(command: Command) -> Sequence[Event]:
        with counted() as counts:
            events = [*handle(command)]
        all_of_it.add(counts)
        return events

    pair.draft.handle = counting  # type: ignore[method-assign]
    try:
        yield all_of_it
    finally:
        pair.draft.handle = handle  # type: ignore[method-assign]


def level(pair: PairOfWorkers, temperature: float, width: int = WIDTH, sessions: int = 1) -> Counts:
    """Return what a level of so many rows of each session asks for, of a draft that has captured
    all of its levels: a proposal of more levels less one of fewer, by the levels that it has
    more."""
    found, sampling = [], Sampling(temperature=temperature)
    for number, depth in enumerate((DEEP, SHALLOW, DEEP)):
        tree = TreeSettings(policy="beam", gamma=width * depth, depth=depth, width=width)
        runs = [
            pair.open(
                1000 * sessions + 10 * one + number,
                PROMPT[one % 3 :],
                tokens=60,
                sampling=sampling,
                tree=tree,
            )
            for one in range(sessions)
        ]
        pair.round_together(runs)
        while pair.draft.idle():
            pass  # until the noise of all positions is there
        with watched(pair) as counts:
            pair.round_together(runs)
        for run in runs:
            pair.close(run, keep=False)
        found.append(counts)
    _, shallow, deep = found
    more = (deep - shallow).all()
    assert all(count % (DEEP - SHALLOW) == 0 for count in more)
    moved = (deep - shallow).moved // (DEEP - SHALLOW)
    return Counts(*(count // (DEEP - SHALLOW) for count in more), moved)


KINDS = ("small", "eagle", "eagle3", "dovetail", "jakiro", "substitute", "shared substitute")
BUDGETS = {
    0.0: Counts(launches=2, copies_in=1, copies_out=1, synchronisations=1),
    1.0: Counts(launches=3, copies_in=1, copies_out=1, synchronisations=1),
}
"""The most of a level of any kind, by temperature: the graph, a copy of its logits for what learns
from them, and above 0 a copy of the noise."""


def open_pair(kind: str, folder: Path) -> PairOfWorkers:
    """Return a target on the CPU and a draft of a kind on the device; what a shared substitute
    shares is there as well."""
    target = tiny_llama(folder / "target", intermediate_size=128, context=256, dtype=torch.float16)
    if kind.endswith("substitute"):
        pytest.importorskip(
            "hqq", reason="hqq is not installed: pip install 'dovetail-llm[subspec]'"
        )
    if kind == "shared substitute":
        there = TargetSettings(model=str(target), weights="half", device="pretended", resident=0)
        return PairOfWorkers(
            *open_unified(
                there,
                DraftSettings(kind="substitute", share=True),
                name="both",
                threads=1,
                memory=MemorySettings(),
                cache=folder / "kept",
            )
        )
    draft = DraftSettings(kind="substitute", device="pretended")
    if kind != "substitute":
        own = target if kind == "small" else write_head(folder / "head", kind, gain=1.0)
        draft = DraftSettings(model=str(own), device="pretended")
    return PairOfWorkers(
        open_target_worker(
            TargetSettings(model=str(target), device="cpu"), name="target", threads=1
        ),
        open_draft_worker(
            draft, name="draft", threads=1, target=str(target), cache=folder / "kept"
        ),
    )


@pytest.mark.parametrize(
    "kind", everyday(["small", "eagle", "substitute", "shared substitute"], "small", "eagle")
)
def test_levels_are_captured_for_the_first_of_eight_sessions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that follow each other share the graphs of a worker."""
    captures: list[int] = []

    def counting(function: Callable[[], Any]) -> Callable[[], Any]:
        captures.append(1)
        return capture(function)

    monkeypatch.setattr(pretended, "capture", counting)
    pair, counts = open_pair(kind, tmp_path), []
    tree = TreeSettings(policy="beam", gamma=WIDTH * SHALLOW, depth=SHALLOW, width=WIDTH)
    for number in range(8):
        run = pair.open(number, PROMPT, tokens=60, sampling=Sampling(), tree=tree)
        for _ in range(3):
            pair.round(run)
        pair.close(run, keep=False)
        counts.append(len(captures))
    assert counts[0] > 0
    assert counts == [counts[0]] * 8


@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], 0.0))
@pytest.mark.parametrize("kind", everyday(KINDS, "small", "dovetail", "shared substitute"))
def test_a_level_stays_within_its_budget(kind: str, temperature: float, tmp_path: Path) -> None:
    found, most = level(open_pair(kind, tmp_path), temperature), BUDGETS[temperature]
    assert all(count <= bound for count, bound in zip(found.all(), most.all(), strict=True)), found


MANY = 8  # sessions that share a pass


@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], 0.0))
@pytest.mark.parametrize(
    "kind", everyday(["small", "eagle", "jakiro", "substitute", "shared substitute"], "eagle")
)
def test_a_level_of_eight_sessions_asks_for_what_a_level_of_one_asks_for(
    kind: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch, one copy there and one back, and one wait, with our functions."""
    found, most = [], BUDGETS[temperature]
    for _ in given_to_pretended(monkeypatch):
        pair = open_pair(kind, tmp_path)
        found = [level(pair, temperature, 2, sessions) for sessions in (1, MANY)]
    for counts in found:
        within = zip(counts.all(), most.all(), strict=True)
        assert all(count <= bound for count, bound in within), found


WIDTH_OF, UNITS, VOCABULARY = 512, 1024, 512
WIDE = {
    "hidden": WIDTH_OF,
    "target_width": WIDTH_OF,
    "intermediate": UNITS,
    "vocabulary": VOCABULARY,
    "draft_vocabulary": VOCABULARY,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "gain": 1.0,
    "dtype": torch.float16,
}
MATRICES = WIDTH_OF * (2 * WIDTH_OF + 3 * WIDTH_OF + 3 * UNITS + VOCABULARY)
"""The weights of such a head: fusion, attention, MLP and output."""
MOST_MOVED = 1.15
"""The most bytes of a level of one session, over those of the weights: without keys and values,
which are read where they lie, and with scores, states and logits of every row."""
BITS = {"fp16": 16.0, "int8": 8.5, "int4": 4.5}  # bits of a weight with its share of scales


@pytest.mark.slow
@pytest.mark.parametrize("weights", BITS)
def test_a_level_moves_little_but_its_weights(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that is widened, laid out anew or copied would be seen at once; so would one that is
    read for each session, since sessions add nothing but what goes with their rows."""
    monkeypatch.setattr(f"{Products.__module__}.Products._choose", lambda *_: (True, "it is ours"))
    target = tiny_llama(
        tmp_path / "target", hidden_size=WIDTH_OF, context=96, vocab=VOCABULARY, layers=1
    )
    head = write_head(tmp_path / "head", replace(VARIANTS["eagle"], **WIDE))  # type: ignore[arg-type]
    size = MATRICES * BITS[weights] / 8
    for _ in given_to_pretended(monkeypatch):
        pair = PairOfWorkers(
            open_target_worker(
                TargetSettings(model=str(target), device="cpu"), name="target", threads=1
            ),
            open_draft_worker(
                DraftSettings(model=str(head), device="pretended", weights=weights),
                name="draft",
                threads=1,
                target=str(target),
            ),
        )
        one, many = (level(pair, 0.0, 1, count).moved for count in (1, MANY))
    assert size < one < MOST_MOVED * size, one / size
    assert many - size <= MANY * (one - size), (many / size, one / size)
