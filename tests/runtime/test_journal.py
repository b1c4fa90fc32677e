"""Coordinators that are killed at any moment, and others that go on from their journals. The oracle
is the same request without it: what its client is told in all is the same."""

import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
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
from dovetail.runtime.journal.database import FILE, LOGGED, OURS, WAL_BYTES, Database
from dovetail.runtime.journal.entries import Entry, rebuilt
from dovetail.runtime.journal.journal import Journal
from support.cases import everyday
from support.houses import DYNAMIC, PROMPT, House
from support.lives import LONG_PROMPT, MOST, TICKET, Lives, every, undisturbed
from support.scripted import READS, ROOMY, ScriptedDraft, ScriptedTarget, continuation

FULL = "database or disk is full"
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


@pytest.mark.parametrize("salt", ["", "tenant 7"])
def test_a_session_goes_on_from_the_rows_that_its_workers_hold(tmp_path: Path, salt: str) -> None:
    lives = Lives(tmp_path)
    lives.ask(tokens=LONG_PROMPT, salt=salt)
    lives.steps(12)
    known = len(lives.tokens)
    assert known > 2
    lives.killed()
    workers = lives.house.workers
    lives.starts()
    for worker in workers:
        worker.seen.clear()
    lives.ask(again=True, tokens=LONG_PROMPT, salt=salt)
    lives.run()
    opened = [one for worker in workers for one in worker.seen if isinstance(one, Open)]
    assert {one.base for one in opened} == {1}
    assert all(one.session == 2 and one.kept >= len(LONG_PROMPT) for one in opened)
    assert isinstance(lives.end, Finished)
    assert lives.end.result.reused_tokens == len(LONG_PROMPT)
    assert lives.house.coordinator._shared.tally.tau == lives.end.result.tau


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
    assert "no target with" in lives.end.text


def test_a_reply_that_was_left_goes_on_and_one_that_has_ended_is_told_again(tmp_path: Path) -> None:
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


def test_a_running_reply_is_handed_over_to_the_client_that_asks_for_it_last(tmp_path: Path) -> None:
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
    folder = tmp_path / "journal"
    base = Database(folder)
    Journal(base).begin(7)
    assert {path.name for path in folder.iterdir()} == {*OURS}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match=r"used by another coordinator.*name another folder"):
        Database(folder)
    base.close(remove=True)
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be kept in .*coordinator.journal"):
        Database(tmp_path / "file" / "journal")


def test_a_journal_of_an_earlier_release_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "segment-00000001").write_bytes(b"dovetail journal 1\n")
    with pytest.raises(UserError, match=r"segment-00000001 belongs to a journal of an earlier "):
        Database(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["segment-00000001"]


@pytest.mark.parametrize("name", OURS)
def test_a_link_or_a_pipe_under_a_name_of_ours_is_neither_followed_nor_waited_for(
    tmp_path: Path, name: str
) -> None:
    folder, other = tmp_path / "journal", tmp_path / "other"
    other.write_bytes(b"theirs")
    for make in (lambda path: path.symlink_to(other), os.mkfifo):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder / name)
        with pytest.raises(UserError, match=f"has other files, such as {name}: "):
            Database(folder)
    assert other.read_bytes() == b"theirs"


def test_a_folder_with_other_files_keeps_its_rights_and_takes_no_journal(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "notes").write_text("")
    with pytest.raises(UserError, match=r"other files, such as notes: name a folder of its own"):
        Database(home)
    assert home.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in home.iterdir()] == ["notes"]


def test_a_folder_that_was_open_to_others_is_closed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    Database(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    Database(folder).close()
    (said,) = caplog.messages
    assert said == f"{folder}, which other users could open, is now open to its owner only"


def two_replies(folder: Path) -> tuple[Lives, dict[str, Entry]]:
    """A journal with two replies, which still writes, and their entries."""
    lives = undisturbed(folder)
    lives.tokens, lives.text, lives.end = [], "", None
    lives.ask(ticket="reply/1", seed=2)
    lives.run()
    return lives, every(lives.journal)


def opened(folder: Path, files: Mapping[str, bytes]) -> Journal:
    """The journal of a folder with these files."""
    folder.mkdir(0o700)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Journal(Database(folder))


def are_beginnings(found: Mapping[str, Entry], whole: Mapping[str, Entry]) -> bool:
    """Whether all that was found are beginnings of what was written."""
    return all(
        one.tokens == whole[ticket].tokens[: len(one.tokens)] for ticket, one in found.items()
    )


def test_a_log_that_was_torn_when_a_machine_failed_has_all_transactions_in_front_of_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives, whole = two_replies(tmp_path / "whole")
    files = {name: (lives.folder / name).read_bytes() for name in (FILE, LOGGED)}
    least, log = 0, files[LOGGED]
    for cut in (*range(0, len(log), len(log) // 23), len(log)):
        torn = log[:cut] + bytes(200 * (cut % 2))  # a file system may leave zeros
        journal = opened(tmp_path / f"{cut}", {**files, LOGGED: torn})
        found = every(journal)
        assert are_beginnings(found, whole)
        tokens = sum(len(entry.tokens) for entry in found.values())
        assert tokens >= least
        least = tokens
        journal.close()
    assert found == whole
    assert not caplog.records


def test_damage_costs_the_replies_that_it_hit_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives, whole = two_replies(tmp_path / "whole")
    lives.journal.close()
    content = (lives.folder / FILE).read_bytes()
    kept = 0
    for place in range(0, len(content), len(content) // 40):
        caplog.clear()
        hurt = bytearray(content)
        hurt[place : place + 20] = bytes(one ^ 0x55 for one in hurt[place : place + 20])
        journal = opened(tmp_path / f"{place}", {FILE: bytes(hurt)})
        found = every(journal)
        assert are_beginnings(found, whole)
        if found != whole:
            assert f"{FILE} is damaged" in caplog.text
            assert not journal._epochs
        kept += found == whole or bool(found)
        journal.begin(2)
        journal.close()
        again = Journal(Database(tmp_path / f"{place}"))
        assert {name: one.tokens for name, one in every(again).items()} == {
            name: one.tokens for name, one in found.items()
        }
        again.close()
    assert kept > 20


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("alter table records add column more blob", "it has columns ['place', "),
        ("alter table records rename column record to entry", "it has columns ['place', "),
        ("create table others (a)", "it has the table 'others', written by another release"),
        ("drop table records; create view records as select 1", "it has the view 'records'"),
        (
            "create trigger slow after insert on records begin select 1; end",
            "it has the trigger 'slow', ",
        ),
        *((place, "its SQLite format is newer") for place in (18, 19, 46)),
    ],
)
def test_a_file_of_another_release_is_refused_by_name_and_stays(
    tmp_path: Path, spoil: str | int, why: str
) -> None:
    lives, _ = two_replies(tmp_path)
    lives.journal.close()
    path = lives.folder / FILE
    if isinstance(spoil, str):
        with closing(sqlite3.connect(path, isolation_level=None)) as base:
            base.executescript(spoil)
    else:
        content = bytearray(path.read_bytes())
        content[spoil] = 3
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(UserError, match=re.escape(f"the journal {path} cannot be used: {why}")):
        Database(lives.folder)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_put_aside_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"something else\n" * 999
    opened(tmp_path / "journal", {FILE: content}).close(remove=True)
    (tmp_path / "journal" / FILE).write_bytes(content)
    for _ in range(2):  # what was put aside is no other program's
        journal = Journal(Database(tmp_path / "journal"))
        journal.begin(1)
        assert not journal.failed
        journal.close(remove=True)
    for name in (f"{FILE}.unreadable-1", f"{FILE}.unreadable-2"):
        assert (tmp_path / "journal" / name).read_bytes() == content
        assert f"(file is not a database): 0 records are read; it is kept as {name}" in caplog.text


def test_a_reply_whose_journal_is_damaged_goes_on_to_the_same_tokens(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole", tokens=LONG_PROMPT)
    lives = Lives(tmp_path / "hurt")
    lives.ask(tokens=LONG_PROMPT)
    lives.steps(40)
    lives.killed()
    path = lives.folder / FILE
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


def test_a_disk_that_takes_nothing_more_ends_the_journal_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives = Lives(tmp_path)
    base = lives.journal._base._base
    (pages,) = base.execute("pragma page_count").fetchone()
    base.execute(f"pragma max_page_count = {pages}")
    lives.ask(memo=bytes(9999))
    lives.run()
    assert lives.tokens == continuation(PROMPT, MOST)
    told = lives.house.report()
    assert told.journal is not None
    assert told.journal.failed == FULL
    assert told.degraded
    assert any("journal" in reason and FULL in reason for reason in told.reasons)
    assert f"has stopped: {FULL}" in caplog.text
    assert lives.house.complete().result.token_ids == tuple(lives.tokens)


def test_replies_go_from_memory_and_disk_when_nobody_wants_them(tmp_path: Path) -> None:
    now = [1000.0]
    journal = Journal(Database(tmp_path), keep_s=60.0, now_s=lambda: now[0])
    house = House(journal=journal, limits=ROOMY)
    client = house.client
    for number in range(40):
        fields = {"tokens": PROMPT, "max_tokens": 4, "seed": 1, "sampling": Sampling()}
        about = {"ticket": f"{number}", "tree": DYNAMIC, "memo": b"memo of %d;" % number * 999}
        client._send(Submit(epoch=client.epoch, request=number, **fields, **about))
        house.run()
        house.replies()
        now[0] += 10.0
        journal.tick()
    assert len(every(journal)) <= 7
    files = [path.read_bytes() for path in tmp_path.iterdir()]
    assert any(b"memo of 39;" in content for content in files)
    journal.close()
    again = Journal(Database(tmp_path), keep_s=60.0, now_s=lambda: now[0])
    assert 0 < len(every(again)) <= 7
    again.close()
    (content,) = (path.read_bytes() for path in tmp_path.glob(FILE))
    assert b"memo of 3;" not in content
    assert len(content) < 12 * 999 * 20


def test_the_write_ahead_log_is_moved_into_the_database_as_it_grows(tmp_path: Path) -> None:
    base = Database(tmp_path)
    for number in range(40):
        base.write([(1, number, bytes(1 << 20))])
        base.sync()
        assert (tmp_path / LOGGED).stat().st_size <= WAL_BYTES + (2 << 20)
    base.close()
    again = Database(tmp_path)
    assert len(again.find(1)) == 40


def test_entries_are_what_their_records_say_without_spans(tmp_path: Path) -> None:
    lives = undisturbed(tmp_path, logprobs=2, trace=True)
    entry = lives.journal.find(TICKET, "/")
    assert entry is not None
    assert lives.end.spans
    assert entry.finished == lives.end.model_copy(update={"spans": ()})
    assert rebuilt(entry.reply, [*entry.snapshot()]) == entry


def test_everybody_who_has_no_ticket_ends_with_the_coordinator(tmp_path: Path) -> None:
    lives = Lives(tmp_path, limits=Limits(context=512))
    lives.ask(ticket="")
    lives.run()
    assert lives.tokens == continuation(PROMPT, MOST)
    assert lives.journal.state().replies == 0
    assert lives.house.workers[0].__class__ is ScriptedTarget
    assert lives.house.workers[1].__class__ is ScriptedDraft


def test_who_reads_the_file_holds_up_nobody_who_writes(tmp_path: Path) -> None:
    base = Database(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as reader:
        base.write([(1, 0, bytes(WAL_BYTES))])
        reader.execute("begin")
        reader.execute("select count(*) from records").fetchone()
        base.write([(1, 1, b"more")])
        base._base.execute("pragma busy_timeout = 0")
        syncing = threading.Thread(target=base.sync)
        syncing.start()
        number = 2
        while syncing.is_alive():
            base.write([(1, number, b"more")])
            number += 1
        syncing.join()
    base.sync()
    assert (tmp_path / LOGGED).stat().st_size == 0
    base.close()
