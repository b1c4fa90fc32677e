"""The memory of a coordinator and the disk space of its journal are bounded, whatever clients
send."""

import random
import tracemalloc
from pathlib import Path

import pytest

from dovetail.protocol.messages import Failed, Finished, Recall, Recalled, Submit
from dovetail.protocol.settings import CoordinatorSettings, Sampling
from dovetail.runtime.journal.database import Database
from dovetail.runtime.journal.journal import Journal
from support.houses import DYNAMIC, House
from support.scripted import ROOMY

MIB = 1 << 20


def settings(memory: str) -> CoordinatorSettings:
    return CoordinatorSettings(memory=memory)


def submit(house: House, number: int, **fields: object) -> None:
    about = {"tokens": (5, 6, 7), "max_tokens": 1, "seed": 1, "tree": DYNAMIC, **fields}
    client = house.client
    client._send(Submit(epoch=client.epoch, request=number, sampling=Sampling(), **about))  # type: ignore[arg-type]


def memo(number: int, size: int) -> bytes:
    """Incompressible bytes."""
    return random.Random(number).randbytes(size)


def test_finished_replies_are_kept_within_the_limit_the_newest_longest(tmp_path: Path) -> None:
    journal = Journal(Database(tmp_path), most=4 * MIB)
    house = House(journal=journal, settings=settings("4MiB"))
    tracemalloc.start()
    for number in range(1, 33):
        submit(house, number, ticket=f"{number}/0", memo=memo(number, MIB // 4))
        house.run()
        assert isinstance(house.replies()[-1], Finished)
        house.coordinator.tick()
        assert journal.size <= 4 * MIB
    assert tracemalloc.get_traced_memory()[0] < 8 * MIB
    tracemalloc.stop()
    for number in (1, 32):
        client = house.client
        client._send(Recall(epoch=client.epoch, request=100 + number, ticket=f"{number}/0"))
        (reply,) = house.replies()
        assert isinstance(reply, Recalled if number == 32 else Failed)
    journal.close()
    assert 2 * MIB < journal.state().bytes <= 6 * MIB
    for _ in range(2):  # a restart reads no more
        again = Journal(Database(tmp_path), most=4 * MIB)
        assert again.size < MIB
        assert 8 < again.state().replies < 16
        again.close()


def test_running_requests_are_kept_and_a_request_beyond_the_limit_is_refused(
    tmp_path: Path,
) -> None:
    journal = Journal(Database(tmp_path), most=2 * MIB)
    house = House(journal=journal, settings=settings("2MiB"))
    for number in (1, 2, 3):
        submit(house, number, ticket=f"{number}/0", memo=memo(number, 7 * MIB // 8), max_tokens=9)
    house.coordinator.pump()
    replies = house.replies()
    (refused,) = (reply for reply in replies if isinstance(reply, Failed))
    assert (refused.session, refused.code) == (3, "capacity")
    assert "exceeds coordinator.memory" in refused.text
    assert sum(isinstance(reply, Finished) for reply in replies) == 2
    submit(house, 4, ticket="4/0", memo=memo(4, 7 * MIB // 8))
    house.run()
    assert isinstance(house.replies()[-1], Finished)


@pytest.mark.parametrize("target", [True, False])
def test_requests_that_wait_count_without_a_journal(target: bool) -> None:
    """In the queue behind a request that fills the cache, or for a target that is not there yet."""
    limits = ROOMY.model_copy(update={"room": 40_000, "context": 60_000})
    house = House(settings=settings("4MiB"), limits=limits, target=target)
    for number in range(1, 9):
        prompt = (number, *(3 for _ in range(30_000)))
        submit(house, number, tokens=prompt, max_tokens=9, again=not target)
    house.coordinator.pump()
    codes = [reply.code for reply in house.replies() if isinstance(reply, Failed)]
    assert len(codes) >= 4
    assert set(codes) == {"capacity"}
    assert house.coordinator._intake.relieve() <= 0
