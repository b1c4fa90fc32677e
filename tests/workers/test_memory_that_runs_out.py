"""A device whose memory runs out drafts as well as it can: what is there for speed goes first, then
one session after the other, and a line says what happened."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import (
    Draft,
    Drafted,
    Drafts,
    Event,
    Failed,
    Open,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.workers.devices.memory import Held, captured_if_possible
from dovetail.workers.drafters.passes import EMPTY, Reading, Rows, Steps, read_together
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.backends.device.fixed import Arenas
from dovetail.workers.serving.open_target import open_target_worker
from pretended import graphs
from pretended.device import MEMORY, POSSIBLE, capped, capture, device
from support.kernels import needs_kernels
from support.models import tiny_llama
from support.pairs import KEY

pytestmark = pytest.mark.skipif(
    not POSSIBLE, reason="this version of torch cannot be told of a device from Python"
)
TREE = TreeSettings(policy="beam", gamma=16, depth=4, width=4)
SESSIONS = range(4)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Forget what earlier tests hold, and what was said in them."""
    held = Held()
    held.add_cache(MEMORY.empty_cache)
    for module in ("devices.memory", "models.backends.device.fixed", "devices.cuda"):
        monkeypatch.setattr(f"dovetail.workers.{module}.HELD", held)
    return held


@pytest.fixture
def there() -> torch.device:
    return device()


def test_what_one_model_has_to_spare_makes_room_for_another(there: torch.device) -> None:
    like = torch.empty(0, device=there)
    one, other = Arenas(), Arenas()
    one.give([one.take((1, 1, 16), 64, like)])
    spare = MEMORY.used
    with capped(spare):
        taken = other.take((1, 1, 16), 64, like)
        assert MEMORY.used == spare
        with pytest.raises(torch.OutOfMemoryError):
            one.take((1, 1, 16), 64, like)
        del taken


def test_what_cannot_be_captured_is_computed_as_it_comes_and_that_is_said_once(
    there: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(3, device=there)
    waiting = captured_if_possible(capture)
    for _ in range(2):
        replay = waiting(lambda: x * x.sum().item())
        assert replay().tolist() == [3.0] * 3
    assert caplog.text.count("a pass cannot be captured and is computed as it comes") == 1
    assert "is being captured" in caplog.text


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_pass_that_is_too_large_is_made_in_halves(most: int) -> None:
    """If there is no room for a single one, one fails, and the others wait for its memory."""
    sizes: list[int] = []
    room = [most]

    def compute(parts: Sequence[Rows]) -> Sequence[torch.Tensor]:
        sizes.append(len(parts))
        if len(parts) > room[0]:
            raise torch.OutOfMemoryError("no memory")
        return [EMPTY] * len(parts)

    def steps() -> Steps:
        return (yield Rows(torch.zeros(1), torch.zeros(1), None, 1))  # type: ignore[arg-type]

    readings = [Reading([0], steps) for _ in range(4)]  # type: ignore[arg-type]
    read_together(readings, compute, 0)
    assert all(reading.over and reading.error is None for reading in readings)
    assert max(size for size in sizes if size <= most) == {1: 1, 2: 2, 3: 2}[most]
    readings, room[0] = [Reading([0], steps) for _ in range(4)], 0  # type: ignore[arg-type]
    read_together(readings, compute, 0)
    assert [reading.error is not None for reading in readings] == [True, False, False, False]
    room[0] = 4
    read_together(readings[1:], compute, 0)
    assert all(reading.over for reading in readings)


@pytest.fixture(scope="module")
def drafts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int | None], tuple[dict[int, Event], int, int]]:
    """Four sessions of a small draft on the device, drafted for in one command."""
    target = tiny_llama(
        tmp_path_factory.mktemp("draft"), intermediate_size=128, context=256, dtype=torch.float16
    )
    settings = DraftSettings(model=str(target), device="pretended")

    @cache
    def drafted(beyond: int | None) -> tuple[dict[int, Event], int, int]:
        """Return the event of each session, the bytes that were taken when all were open, and the
        most that were. `beyond`: bytes that the device has more than those of open sessions."""
        graphs._pools.clear()  # those of other tests hold memory for graphs that these would need
        worker = open_draft_worker(settings, name="draft", threads=1, target=str(target))
        worker.hello(1)
        for number in SESSIONS:
            order = Open(
                epoch=1,
                session=number,
                key=KEY,
                prompt=tuple(range(3 + number, 13 + number)),
                capacity=60,
                vocabulary_size=48,
                sampling=Sampling(),
                tree=TREE,
            )
            list(worker.handle(order))
        shape = {"max_nodes": TREE.gamma, "max_depth": TREE.depth, "max_width": TREE.width}
        orders = [
            Draft(epoch=1, session=number, round=1, prefix=11, accepted=(), bonus=7, **shape)
            for number in SESSIONS
        ]
        opened = MEMORY.most = MEMORY.used
        with nullcontext() if beyond is None else capped(opened + beyond):
            events = {event.session: event for event in worker.handle(Drafts.of(orders))}
        return events, opened, MEMORY.most

    return drafted


@pytest.mark.parametrize("kind", ["dovetail", "small"])
def test_a_draft_that_does_not_fit_is_refused_in_a_sentence(kind: str, there: torch.device) -> None:
    model = str(DEMO_FOLDER / ("heads/dovetail" if kind == "dovetail" else "draft"))
    settings = DraftSettings(kind=kind, model=model, device="pretended")
    target = str(DEMO_FOLDER / "target")
    with capped(MEMORY.used + (1 << 20)), pytest.raises(UserError) as refused:
        open_draft_worker(settings, name="draft", threads=1, target=target)
    assert "\n" not in str(refused.value)
    assert model in str(refused.value)
    assert "pretended" in str(refused.value)


@needs_kernels
def test_sessions_are_drafted_for_without_graphs_where_there_is_no_room_for_these(
    drafts: Callable[[int | None], tuple[dict[int, Event], int, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    roomy, opened, most = drafts(None)
    assert not caplog.text
    tight, *_ = drafts((most - opened) * 3 // 4)
    assert trees(tight) == trees(roomy)
    assert len(trees(tight)) == len(SESSIONS)
    assert "captured passes were freed" in caplog.text


@needs_kernels
def test_a_session_for_which_there_is_no_room_makes_room_for_the_others(
    drafts: Callable[[int | None], tuple[dict[int, Event], int, int]],
) -> None:
    roomy, tight = drafts(None)[0], drafts(60_000)[0]
    failed = [event for event in tight.values() if isinstance(event, Failed)]
    assert {event.code for event in failed} == {"memory"}
    assert len(failed) < len(SESSIONS)
    assert failed[0].text.endswith("ask for fewer tokens, or wait until others have ended")
    assert trees(tight).items() < trees(roomy).items()


def trees(events: dict[int, Event]) -> dict[int, tuple[int, ...]]:
    return {number: event.tokens for number, event in events.items() if isinstance(event, Drafted)}


@needs_kernels
def test_trees_that_a_target_there_cannot_verify_together_are_verified_one_by_one(
    tmp_path: Path,
) -> None:
    folder = tiny_llama(tmp_path, intermediate_size=128, context=256)
    settings = TargetSettings(model=str(folder), device="pretended")
    worker = open_target_worker(settings, name="target", threads=1)
    worker.hello(1)
    prompt, tree = tuple(range(3, 13)), tuple(range(20, 36))

    for number in range(5):
        order = Open(
            epoch=1,
            session=number,
            key=KEY,
            prompt=prompt,
            capacity=60,
            vocabulary_size=48,
            sampling=Sampling(),
            tree=TreeSettings(policy="beam", gamma=16, depth=16, width=1),
        )
        list(worker.handle(order))

    def verify(*sessions: int) -> int:
        """Verify a tree for each in a pass; return the bytes that this takes at most."""
        items = [
            VerifyItem(session=n, round=1, prefix=11, tokens=tree, parents=(*range(-1, 15),))
            for n in sessions
        ]
        before = MEMORY.most = MEMORY.used
        for event in worker.handle(Verify(epoch=1, items=tuple(items))):
            assert isinstance(event, Verified)
            found.extend((item.accepted, item.bonus) for item in event.items)
        return MEMORY.most - before

    found: list[tuple[tuple[int, ...], int]] = []
    alone, together = verify(0), verify(1, 2)
    assert together > 1.2 * alone
    with capped(MEMORY.used + (alone + together) // 2):
        verify(3, 4)
    assert len(found) == 5
    assert len(set(found)) == 1
