"""What a pair has learned outlives its service: in virtual time, on the disk, in processes."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from dovetail.protocol.files import cache_folder
from dovetail.protocol.messages import Finished, Hello
from dovetail.runtime.control.on_off import Experience
from dovetail.runtime.fleet.records import FOLDER, PairRecords
from support.stacks import started
from support.timed import Costs, TimedHouse

NEVER_RIGHT = Costs(right=lambda _: 0.0, belief=lambda _: 0.5)


def seconds(
    house: TimedHouse, tokens: int, turns: int, *, speculate: bool = True, users: int = 1
) -> float:
    """The time of `turns` replies to each of the users, who all send requests at once."""
    began_ns = house.clock.now_ns
    for turn in range(turns):
        left = {
            house.client.submit(
                tokens=[3] * (8 + 17 * turn), max_tokens=tokens, seed=1, speculate=speculate
            )
            for _ in range(users)
        }
        while left:
            if isinstance(reply := house.client.receive(0), Finished):
                left.remove(reply.request)
    return (house.clock.now_ns - began_ns) / 1e9


@pytest.mark.parametrize(
    ("costs", "users"),
    [
        pytest.param(NEVER_RIGHT, 1, id="a draft that is never right"),
        pytest.param(NEVER_RIGHT, 4, id="a draft that is never right, with four users"),
        pytest.param(Costs(draft_hop_s=0.08), 1, id="a slow link"),
        pytest.param(Costs(right=lambda _: 0.5, level_s=lambda _: 0.015), 1, id="a slow draft"),
        pytest.param(Costs(right=lambda _: 0.01), 1, id="a draft that proposes nothing"),
    ],
)
def test_the_first_replies_of_a_service_do_not_pay_for_what_an_earlier_one_has_learned(
    costs: Costs, users: int, tmp_path: Path
) -> None:
    first = TimedHouse(costs, records=PairRecords(tmp_path))
    for together in range(1, users + 1):
        seconds(first, 200, 2, users=together)
    first.coordinator.end()
    for tokens, turns in ((8, 36), (32, 12)):
        house = TimedHouse(costs, records=PairRecords(tmp_path))
        alone_s = seconds(TimedHouse(costs), tokens, turns, speculate=False, users=users)
        assert alone_s / seconds(house, tokens, turns, users=users) >= 0.98


def test_a_draft_that_has_paid_drafts_from_the_first_round_and_measures_nothing(
    tmp_path: Path,
) -> None:
    costs = Costs(right=lambda _: 0.8)
    first = TimedHouse(costs, records=PairRecords(tmp_path))
    assert first.complete(100).result.control_rounds > 0
    first.coordinator.end()
    second = TimedHouse(costs, records=PairRecords(tmp_path))
    result = second.complete(32).result
    assert (result.control_rounds, result.plain_rounds) == (0, 0)


def hello(role: str, **more: object) -> Hello:
    """A worker's introduction."""
    return Hello(epoch=1, roles=(role,), name=role, host="here", pid=1, **more)  # type: ignore[arg-type]


def test_a_record_is_for_one_pair_and_one_that_is_damaged_or_anothers_is_learned_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records, target = PairRecords(tmp_path), hello("target", model="big")
    records.keep(hello("draft", model="small"), target, {"means": {}})
    assert records.find(hello("draft", model="small"), target) == {"means": {}}
    assert records.find(hello("draft", model="small", threads=2), target) is None
    assert records.find(hello("draft", model="other"), target) is None
    (file,) = (tmp_path / FOLDER).iterdir()
    for content in (b"\xff\xfe", b"", json.dumps({"means": {}}).encode()):
        file.write_bytes(content)
        assert records.find(hello("draft", model="small"), target) is None
        assert "learned again" in caplog.messages[-1]


def test_a_record_of_a_release_that_learns_something_else_is_learned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = hello("draft"), hello("target")
    PairRecords(tmp_path).keep(*pair, {})
    monkeypatch.setitem(Experience.__dataclass_fields__, "later", fields(Experience)[0])
    assert PairRecords(tmp_path).find(*pair) is None


def test_a_record_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    records, pair = PairRecords(tmp_path), (hello("draft"), hello("target"))
    for record, written in (({"means": {}}, True), ({"means": {}}, False), ({"means": 1}, True)):
        records.keep(*pair, record)
        found = [*(tmp_path / FOLDER).iterdir()]
        assert bool(found) is written
        for file in found:
            file.unlink()


def test_where_nothing_can_be_written_it_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file in place of the folder")
    records = PairRecords(tmp_path)
    for _ in range(3):
        records.keep(hello("draft"), hello("target"), {})
    (message,) = caplog.messages
    assert str(tmp_path / FOLDER) in message


def test_processes_begin_with_what_those_before_them_have_learned() -> None:
    flags = {"coordinator.remember": "true", "tree.policy": "static"}
    shutil.rmtree(cache_folder() / FOLDER, ignore_errors=True)
    measured = []
    for tokens, patience in ((64, 8), (2, 1)):
        with started(flags) as (_, client):
            rows: tuple[int, ...] = ()
            while patience and max(rows, default=0) <= 1:  # on a busy machine a draft may not pay
                client.complete(client.submit(tokens=[5, 6, 7] * 8, max_tokens=tokens, seed=1))
                (pair,) = client.status().pairs
                rows, patience = pair.t_v.rows if pair.t_v is not None else (), patience - 1
            measured.append(rows)
        assert len([*(cache_folder() / FOLDER).glob("*.json")]) == 1
    assert max(measured[0]) > 1
    assert set(measured[0]) <= set(measured[1])
