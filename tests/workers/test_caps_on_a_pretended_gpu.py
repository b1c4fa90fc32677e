"""`memory.vram` is a hard cap: a target that is placed within it reads and verifies all that it
says it has room for, and takes no byte more. What it keeps of ended sessions is freed where memory
runs out."""

import gc
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.launch.processes import preflight
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Close,
    Closed,
    Event,
    Open,
    Opened,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import (
    DraftSettings,
    MemorySettings,
    Sampling,
    Settings,
    SplitSettings,
    TargetSettings,
    TreeSettings,
)
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.drafters.trial import try_out
from dovetail.workers.loop import Worker
from dovetail.workers.models.backends.placement import level_bytes
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.target import Identity, TargetWorker
from dovetail.workers.unified import open_unified
from pretended import graphs
from pretended.device import MEMORY, POSSIBLE, capped, device
from support.cases import everyday
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import tiny_llama
from support.pairs import KEY

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]
NODES = 60
TREE = TreeSettings(policy="beam", gamma=NODES, depth=NODES, width=1)
MIB = 1 << 20
SPLIT = SplitSettings(device="pretended")
PLACEMENTS: Mapping[str, tuple[dict[str, Any], int]] = {
    "resident": ({"device": "pretended"}, 108),
    "streamed": ({"device": "pretended", "resident": 0}, 106),
    "mixed": ({"device": "pretended", "resident": 2}, 107),
    "split": ({"split": SPLIT}, 106),
    "unified": ({"device": "pretended"}, 116),
}


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    """Let no other test have this one's limit."""
    gc.collect()
    MEMORY.empty_cache()
    yield
    MEMORY.limit = None


def opening(number: int, prompt: int, capacity: int, **more: Any) -> Open:
    return Open(
        epoch=1,
        session=number,
        key=KEY,
        prompt=tuple(3 + place % 40 for place in range(prompt)),
        capacity=capacity,
        vocabulary_size=48,
        sampling=Sampling(),
        tree=TREE,
        **more,
    )


def verify(worker: Worker, *sessions: int, prefix: int) -> list[Event]:
    items = [
        VerifyItem(
            session=number,
            round=1,
            prefix=prefix,
            tokens=tuple(3 + node % 40 for node in range(NODES)),
            parents=(*range(-1, NODES - 1),),
        )
        for number in sessions
    ]
    return [*worker.handle(Verify(epoch=1, items=tuple(items)))]


@pytest.mark.parametrize("placement", everyday(PLACEMENTS, "mixed", "split", "unified"))
def test_a_target_takes_no_byte_beyond_its_cap(tmp_path: Path, placement: str) -> None:
    folder = tiny_llama(
        tmp_path, layers=4, intermediate_size=128, context=2048, dtype=torch.float16
    )
    placed, mib = PLACEMENTS[placement]
    target = TargetSettings(model=str(folder), weights="half", **placed)
    memory = MemorySettings(vram=f"{mib}MiB")
    before = MEMORY.most = MEMORY.used
    if placement == "unified":
        draft = DraftSettings(kind="substitute", share=True)
        worker = open_unified(
            target, draft, name="both", threads=1, memory=memory, cache=tmp_path / "kept"
        )[0]
    else:
        worker = open_target_worker(target, name="target", threads=1, memory=memory)
    assert MEMORY.limit == mib * MIB
    room = worker.hello(1).limits.room
    assert room is not None
    each = 2048
    count = room // (each + NODES)
    assert count >= 1
    for number in range(count):
        *_, last = worker.handle(opening(number, each - NODES - 2, each))
        assert isinstance(last, Opened)
    for first in range(0, count, 2):
        found = verify(worker, *range(first, min(first + 2, count)), prefix=each - NODES - 1)
        assert all(isinstance(event, Verified) for event in found)
    assert MEMORY.most - before <= mib * MIB


def test_what_a_target_keeps_makes_room_for_a_session(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, context=2048)
    model = load_language_model(str(folder), weights="fp32", device=str(device()))
    identity = Identity("target", str(folder), "pretended", 1, None, kept_tokens=10_000)
    worker = TargetWorker(model, identity)
    list(worker.handle(opening(0, 1000, 1900)))
    assert verify(worker, 0, prefix=1001)
    assert isinstance(next(iter(worker.handle(Close(epoch=1, session=0, keep=True)))), Closed)
    list(worker.handle(opening(1, 10, 1900)))  # in the memory that the first one has left
    assert len(worker.verifier.kept) == 1
    with capped(MEMORY.used + 700 * model.new_cache(0).row_bytes):
        *_, last = worker.handle(opening(2, 10, 1000))
        assert isinstance(last, Opened)
        assert len(worker.verifier.kept) == 0
        with pytest.raises(RequestError) as gone:
            list(worker.handle(opening(3, 1010, 1500, base=0, kept=900)))
    assert gone.value.code == "prefix"


@pytest.mark.parametrize(
    "kind",
    everyday(
        ["small", "eagle", "eagle3", "dovetail", "jakiro", "substitute"],
        *("small", "dovetail", "substitute"),
    ),
)
def test_a_draft_and_its_graphs_take_what_was_counted_and_no_byte_more(
    tmp_path: Path, kind: str
) -> None:
    """The count is that by which a target leaves it room on a GPU that both have."""
    target = tiny_llama(
        tmp_path / "target", context=4096, dtype=torch.float16, intermediate_size=128
    )
    draft = DraftSettings(kind="substitute", device="pretended")
    if kind != "substitute":
        head = partial(write_head, tmp_path / "head", kind, gain=1.0, dtype=torch.float16)
        draft = DraftSettings(model=str(target if kind == "small" else head()), device="pretended")
    there = Settings(
        target=TargetSettings(model=str(target), device="cuda:0"),
        draft=draft.model_copy(update={"device": "cuda:0"}),
    )
    counted = preflight.draft_bytes(there)
    before = MEMORY.most = MEMORY.used
    worker = open_draft_worker(
        draft, name="draft", threads=1, target=str(target), cache=tmp_path, vram=before + counted
    )
    try_out(worker)
    assert MEMORY.limit == before + counted
    assert MEMORY.most - before <= counted
    sizes = preflight.sizes_here(draft.model or str(target), "half", "half")
    assert sizes is not None
    assert 0 < graphs._pools[device().type]._size <= level_bytes(sizes)
