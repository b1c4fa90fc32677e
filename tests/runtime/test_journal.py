"""Coordinators that are killed at any moment, and others that go on from their journals. The oracle
is the same request without it: what its client is told in all is the same."""

import errno
import os
import re
from pathlib import Path

import pytest

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import (
    Cancel,
    Failed,
    Finished,
    Limits,
    Open,
    Recall,
    Recalled,
    Submit,
)
from dovetail.protocol.settings import CoordinatorSettings, Sampling
from dovetail.runtime.journal.entries import Entries
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.journal.segments import MAGIC, Segments, packed
from support.cases import everyday
from support.houses import DYNAMIC, PROMPT, House
from support.lives import LONG_PROMPT, MOST, TICKET, Lives, every, undisturbed
from support.scripted import (
    READS,
    ROOMY,
    ScriptedDraft,
    ScriptedTarget,
    continuation,
)

CASES = {
    "plain": {},
    "features": {"house": {"reads": READS}},
    "no draft": {"house": {"draft": False}},
    "logprobs": {"logprobs": 2},
    "scored": {"logprobs": 1, "scored": True, "tokens": LONG_PROMPT},
    "stop": {"stop": ("w7",)},
    "long prompt": {"tokens": LONG_PROMPT},
}


@pytest.mark.parametrize("case", everyday(CASES, "plain", "scored"))
@pytest.mark.parametrize("unwritten", [True, False])
def test_a_coordinator_that_is_killed_at_any_moment_is_followed_by_another_and_nothing_differs(
    tmp_path: Path, case: str, unwritten: bool
) -> None:
    """The client is told each token once, and the same."""
    asked = CASES[case]
    house, fields = asked.get("house", {}), {k: v for k, v in asked.items() if k != "house"}
    whole = undisturbed(tmp_path / "whole", **asked)
    assert whole.end is not None
    moment = 1
    while True:
        lives = Lives(tmp_path / f"{moment}", **house)
        lives.ask(**fields)
        lives.steps(moment)
        if lives.end is not None:
            break
        lives.killed(unwritten=unwritten)
        lives.starts()
        lives.ask(again=True, **fields)
        lives.run()
        found = (lives.tokens, lives.text, lives.logprobs, lives.scores)
        assert found == (whole.tokens, whole.text, whole.logprobs, whole.scores), moment
        assert isinstance(lives.end, Finished)
        assert lives.end.result.token_ids == tuple(whole.tokens)
        assert lives.end.result.text == whole.text
        assert lives.end.result.finish_reason == whole.end.result.finish_reason
        assert lives.end.margins == whole.end.margins
        assert not lives.house.coordinator.requests
        lives.journal.close()
        moment += 3
    assert moment > 10


def test_a_session_goes_on_from_the_rows_that_its_workers_hold(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.ask(tokens=LONG_PROMPT)
    lives.steps(12)
    known = len(lives.tokens)
    assert known > 2
    lives.killed()
    workers = lives.house.workers
    lives.starts()
    for worker in workers:
        worker.seen.clear()
    lives.ask(again=True, tokens=LONG_PROMPT)
    lives.run()
    opened = [one for worker in workers for one in worker.seen if isinstance(one, Open)]
    assert {one.base for one in opened} == {1}
    assert all(one.session == 2 and one.kept >= len(LONG_PROMPT) for one in opened)
    assert isinstance(lives.end, Finished)
    assert lives.end.result.reused_tokens == len(LONG_PROMPT)
    assert lives.house.coordinator._tally.tau == lives.end.result.tau


def test_what_a_worker_holds_of_sessions_that_nobody_knows_is_forgotten(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.ask(ticket="", tokens=LONG_PROMPT)
    lives.steps(12)
    lives.killed()
    lives.starts()
    assert all(not worker.kept for worker in lives.house.workers)


def test_a_request_waits_for_its_target_and_is_claimed_again_by_whoever_has_the_ticket(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path)
    lives.ask()
    lives.steps(20)
    lives.killed()
    old = lives.house
    lives.starts(workers=False)
    lives.ask(again=True)
    lives.run()
    assert lives.end is None
    lives.join(old)
    lives.run()
    assert isinstance(lives.end, Finished)
    assert lives.tokens == continuation(PROMPT, MOST)


def test_a_target_of_another_fingerprint_is_no_place_for_a_reply_that_has_begun(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path, settings=CoordinatorSettings(recovery_s=5.0))
    lives.ask()
    lives.steps(20)
    assert lives.tokens
    lives.killed()
    lives.starts(workers=False)
    lives.join_another()
    lives.ask(again=True)
    lives.run()
    assert lives.end is None
    lives.house.later_ns += 5 * 10**9
    lives.run()
    assert isinstance(lives.end, Failed)
    assert lives.end.code == "worker_lost"
    assert "no target of" in lives.end.text


def test_a_reply_that_was_left_goes_on_and_one_that_has_ended_is_told_again(
    tmp_path: Path,
) -> None:
    whole = undisturbed(tmp_path / "whole")
    lives = Lives(tmp_path / "left")
    lives.ask()
    lives.steps(20)
    begun = len(lives.tokens)
    assert 0 < begun < MOST
    client = lives.house.client
    client._send(Cancel(epoch=client.epoch, request=1))
    lives.house.run()
    lives.drain()
    assert isinstance(lives.end, Finished)
    assert lives.end.result.finish_reason == "cancelled"
    for _ in range(2):
        lives.tokens, lives.end = lives.tokens[:5], None
        lives.text = "".join(f" w{token}" for token in lives.tokens)
        lives.ask(again=True)
        lives.run()
        assert isinstance(lives.end, Finished)
        assert (lives.tokens, lives.text) == (whole.tokens, whole.text)


def test_a_running_reply_is_handed_over_to_the_client_that_asks_for_it_last(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path)
    second = lives.house.connect()
    lives.ask()
    lives.steps(20)
    assert 0 < len(lives.tokens) < len(continuation(PROMPT, MOST))
    first, lives.house.client = lives.house.client, second
    lives.tokens, lives.text = [], ""
    lives.ask(again=True)
    lives.run()
    assert lives.tokens == continuation(PROMPT, MOST)
    last = list(iter(lambda: first.receive(0), None))[-1]
    assert isinstance(last, Failed)
    assert last.code == "ticket"


def test_a_ticket_is_its_owners_alone(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.ask(owner="alice", memo=b"what it takes to answer")
    lives.run()
    client = lives.house.client
    for owner, found in (("alice", b"what it takes to answer"), ("bob", None)):
        client._send(Recall(epoch=client.epoch, request=3, ticket=TICKET, owner=owner))
        lives.house.run()
        reply = client.receive(0)
        assert (reply.memo if isinstance(reply, Recalled) else None) == found
    lives.ask(owner="bob")
    lives.run()
    assert isinstance(lives.end, Failed)
    assert lives.end.code == "ticket"


def test_tokens_that_depend_on_a_draft_are_not_decoded_again(tmp_path: Path) -> None:
    drawn = Sampling(temperature=1.0, acceptance="rejection")
    lives = Lives(tmp_path, draft=False)
    lives.tokens = [5]
    lives.ask(again=True, sampling=drawn)
    lives.run()
    assert isinstance(lives.end, Failed)
    assert (lives.end.code, "rejection sampling" in lives.end.text) == ("coordinator_lost", True)


# -- the folder ------------------------------------------------------------------------------------


def test_a_journal_is_its_owners_alone_and_one_coordinators_at_a_time(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "journal")
    Journal(segments).begin(7)
    files = list((tmp_path / "journal").iterdir())
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match=r"another coordinator's.*name another folder"):
        Segments(tmp_path / "journal")
    segments.close(remove=True)
    assert not (tmp_path / "journal").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be kept in .*coordinator.journal"):
        Segments(tmp_path / "file" / "journal")


def test_a_folder_with_other_files_keeps_its_rights_and_takes_no_journal(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "notes").write_text("")
    with pytest.raises(UserError, match=r"other files, such as notes: name a folder for it alone"):
        Segments(home)
    assert home.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in home.iterdir()] == ["notes"]


def test_a_folder_that_was_open_to_others_is_closed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    Segments(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    Segments(folder).close()
    (said,) = caplog.messages
    assert said == f"{folder}, which others could open, is open to its owner alone now"


@pytest.mark.parametrize("cut", [1, 7, 9, 30])
def test_a_record_that_is_not_whole_ends_its_segment(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    lives = undisturbed(tmp_path, tokens=LONG_PROMPT)
    lives.journal.close()
    (path,) = tmp_path.glob("segment-*")
    whole = list(Segments(tmp_path).read(1))
    os.truncate(path, path.stat().st_size - cut)
    assert [*Segments.read(_unlocked(tmp_path), 1)] == whole[:-1]
    assert Journal(_unlocked(tmp_path)).find(TICKET, "/") is not None
    assert not caplog.records
    path.write_bytes(path.read_bytes() + packed(b"\xc1"))
    entries = Journal(_unlocked(tmp_path))
    assert entries.find(TICKET, "/") is not None


DAMAGE = {"header": (0, 4), "length": (3, 4), "body": (9, 10), "block": (0, 300)}
"""The bytes of a record, from its beginning, that are not what was written."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_costs_what_it_hit_and_is_said(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it is: a reply has the beginning of its tokens, or all of them if it began behind
    the damage."""
    first = tmp_path / "whole" / "segment-00000001"
    lives = undisturbed(first.parent)
    first_ends = first.stat().st_size
    lives.tokens, lives.text, lives.end = [], "", None
    lives.ask(ticket="reply/1", seed=2)
    lives.run()
    lives.journal.close()
    content, whole = first.read_bytes(), {**every(lives.journal._entries)}
    places = [len(MAGIC)]
    for record in Segments(first.parent).read(1):
        assert isinstance(record, bytes)
        places.append(places[-1] + len(packed(record)))
    begin, end = DAMAGE[damage]
    for place in places[:-2:7]:
        hurt = bytearray(content)
        hurt[place + begin : place + end] = bytes(one ^ 0x55 for one in hurt[place:][begin:end])
        file = tmp_path / damage / f"{place}" / first.name
        file.parent.mkdir(0o700, parents=True)
        file.write_bytes(hurt)
        caplog.clear()
        segments = Segments(file.parent)
        found = Journal(segments)._entries
        segments.close()
        (said,) = (one.getMessage() for one in caplog.records)
        assert said.startswith(f"{file} is damaged at byte {place}: ")
        size = next(one for one in places if one >= place + end) - place
        assert f": {size} bytes are not read" in said
        for ticket, entry in every(found).items():
            assert entry.tokens == whole[ticket].tokens[: len(entry.tokens)]
        if place < first_ends - end:
            assert every(found)["reply/1"] == whole["reply/1"]
        else:
            assert every(found)[TICKET] == whole[TICKET]
        assert not found.epochs or place < places[2]


def test_a_reply_whose_journal_is_damaged_goes_on_to_the_same_tokens(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole", tokens=LONG_PROMPT)
    lives = Lives(tmp_path / "hurt")
    lives.ask(tokens=LONG_PROMPT)
    lives.steps(40)
    lives.killed()
    (path,) = lives.folder.glob("segment-*")
    content = bytearray(path.read_bytes())
    places = [found.start() for found in re.finditer(b"committed", content)]
    assert len(places) > 2
    content[places[1]] ^= 1
    path.write_bytes(content)
    lives.starts()
    entry = lives.journal.find(TICKET, "/")
    assert entry is not None
    assert 0 < len(entry.tokens) < len(lives.tokens)
    lives.ask(again=True, tokens=LONG_PROMPT)
    lives.run()
    assert (lives.tokens, lives.text) == (whole.tokens, whole.text)


def test_zeros_where_a_machine_failed_are_no_damage_and_a_wrong_byte_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives = undisturbed(tmp_path)
    lives.journal.close()
    (path,) = tmp_path.glob("segment-*")
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    Journal(_unlocked(tmp_path))
    assert not caplog.records
    with path.open("ab") as file:
        file.write(b"\1" * 100)
    Journal(_unlocked(tmp_path))
    assert f"damaged at byte {size}: 200 bytes are not read" in caplog.text
    path.write_bytes(b"D" + path.read_bytes()[1:size])
    assert every(Journal(_unlocked(tmp_path))._entries) == every(lives.journal._entries)
    assert f"damaged at byte 0: {len(MAGIC)} bytes are not read" in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"something else\n", "no segment of a journal"),
        (b"dovetail journal 2\n" + packed(b"\x91\xa4term"), "of 'dovetail journal 2', and this"),
    ],
)
def test_a_file_that_is_no_segment_is_said_to_be_none(
    tmp_path: Path, content: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "segment-00000001").write_bytes(content)
    assert Journal(Segments(tmp_path)).found == 0
    assert f"segment-00000001 is {said}" in caplog.text


def _unlocked(folder: Path) -> Segments:
    (folder / "lock").unlink(missing_ok=True)
    return Segments(folder)


def test_a_disk_that_takes_nothing_more_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lives = Lives(tmp_path)

    def full(_: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lives.journal._segments, "append", full)
    lives.ask()
    lives.run()
    assert lives.tokens == continuation(PROMPT, MOST)
    told = lives.house.report()
    assert told.journal is not None
    assert "No space left" in told.journal.failed
    assert told.degraded
    assert any("journal" in reason and "No space left" in reason for reason in told.reasons)
    assert "has stopped: No space left" in caplog.text
    assert lives.house.complete().result.token_ids == tuple(lives.tokens)


def test_segments_and_entries_go_when_nobody_wants_them(tmp_path: Path) -> None:
    now = [1000.0]
    segments = Segments(tmp_path)
    journal = Journal(segments, keep_s=60.0, now_s=lambda: now[0])
    house = House(journal=journal, limits=ROOMY)
    client = house.client
    for number in range(40):
        fields = {"tokens": PROMPT, "max_tokens": 4, "seed": 1, "sampling": Sampling()}
        about = {"ticket": f"{number}", "tree": DYNAMIC}
        client._send(Submit(epoch=client.epoch, request=number, **fields, **about))
        house.run()
        house.replies()
        now[0] += 10.0
        journal.tick()
    assert len(every(journal._entries)) <= 7
    assert len(segments.all) <= 3
    assert sum(path.stat().st_size for path in tmp_path.glob("segment-*")) == segments.size
    journal.close()
    assert len(every(Journal(Segments(tmp_path))._entries)) <= 14


def test_entries_are_what_their_records_say_without_spans(
    tmp_path: Path,
) -> None:
    lives = undisturbed(tmp_path, logprobs=2, trace=True)
    entry = lives.journal.find(TICKET, "/")
    assert entry is not None
    assert lives.end.spans
    assert entry.finished == lives.end.model_copy(update={"spans": ()})
    again = Entries()
    for record in entry.snapshot():
        again.apply(record)
    assert every(again)[TICKET] == entry


def test_everybody_who_has_no_ticket_ends_with_the_coordinator(tmp_path: Path) -> None:
    lives = Lives(tmp_path, limits=Limits(context=512))
    lives.ask(ticket="")
    lives.run()
    assert lives.tokens == continuation(PROMPT, MOST)
    assert lives.journal.state().replies == 0
    assert lives.house.workers[0].__class__ is ScriptedTarget
    assert lives.house.workers[1].__class__ is ScriptedDraft
