"""The memory of a coordinator and the disk space of its journal are bounded, whatever clients send
and whatever files are in the folder."""

import logging
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from dovetail.protocol.messages import Failed, Finished, Recall, Recalled, Submit
from dovetail.protocol.settings import CoordinatorSettings, Sampling, TreeSettings
from dovetail.runtime.journal.entries import Entry
from dovetail.runtime.journal.journal import SEGMENT_BYTES, Journal
from dovetail.runtime.journal.segments import BEGUN, HEAD, MAGIC, MAX_SEGMENT, Segments
from dovetail.runtime.session.actions import Emit
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
    journal = Journal(Segments(tmp_path), most=4 * MIB)
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
    for _ in range(2):  # a restart reads no more
        again = Journal(Segments(tmp_path), most=4 * MIB)
        assert 2 * MIB < again.size <= 4 * MIB
        again.close()


def test_running_requests_are_kept_and_a_request_beyond_the_limit_is_refused(
    tmp_path: Path,
) -> None:
    journal = Journal(Segments(tmp_path), most=2 * MIB)
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


def committed(journal: Journal, entry: Entry, tokens: int) -> None:
    journal._note(entry.committed(Emit((7,) * tokens, 0, "", ()), (1.0,) * tokens))
    journal.write()


def test_a_large_running_request_is_seldom_rewritten(tmp_path: Path) -> None:
    class Counting(Segments):
        written = 0

        def begin(self, content: bytes = b"") -> int:
            self.written += len(content)
            return super().begin(content)

        def append(self, content: bytes) -> None:
            self.written += len(content)
            super().append(content)

    now_s = [1000.0]
    segments = Counting(tmp_path)
    journal = Journal(segments, keep_s=1.0, now_s=lambda: now_s[0])
    journal.begin(1)
    size = SEGMENT_BYTES + 4 * MIB
    about = {"sampling": Sampling(), "max_tokens": 1, "tree": TreeSettings(), "seed": 1}
    for number in range(8):
        ticket, part = f"{number}/0", bytes(size // 8)
        plain = Submit(epoch=1, request=1, tokens=(1,), ticket=ticket, memo=part, **about)  # type: ignore[arg-type]
        entry = journal._entries.of[ticket] = Entry(plain, "")
        journal._note(entry.begun())
    for _ in range(100):
        now_s[0] += 1.0
        committed(journal, entry, 8)
        journal.tick()
    assert segments.written <= 7 * size, "the limit is 1 MiB a second, for 100 s"
    journal.close()
    again = Journal(Segments(tmp_path))
    found = again.find("7/0", "/")
    assert found is not None
    assert len(found.tokens) == 800


def test_a_file_too_large_for_a_segment_is_skipped_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(Segments(tmp_path))
    house = House(journal=journal)
    submit(house, 1, ticket="a/0", max_tokens=9)
    house.run()
    journal.close()
    sparse = tmp_path / "segment-00000099"
    sparse.write_bytes(MAGIC)
    os.truncate(sparse, 3 << 30)
    with caplog.at_level(logging.WARNING):
        again = Journal(Segments(tmp_path))
    (record,) = caplog.records
    assert "segment-00000099 is not read: its 3221225472 bytes" in record.getMessage()
    again.begin(2)
    again.tick()
    assert again.find("a/0", "/") is not None
    assert again.state().bytes < MIB
    assert sparse.stat().st_size > MAX_SEGMENT


def test_no_pipe_and_no_link_in_the_folder_is_waited_for_or_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "journal", tmp_path / "other"
    folder.mkdir()
    other.write_bytes(b"theirs")
    for name in (BEGUN, "segment-00000001"):
        os.mkfifo(folder / name)
    journal = Journal(Segments(folder))
    journal.begin(1)
    (folder / BEGUN).symlink_to(other)
    journal._segments.begin()
    assert not journal.failed
    assert other.read_bytes() == b"theirs"


def test_damage_that_looks_like_records_everywhere_is_not_checked_for_ever(tmp_path: Path) -> None:
    one = HEAD.pack(MIB, 0) + b"\x91\xa1ab"
    (tmp_path / "segment-00000001").write_bytes(MAGIC + one * (4 * MIB // len(one)))
    assert Journal(Segments(tmp_path)).found == 0
