"""Replies that are asked for again while something else goes wrong: whoever asks last has all of
it, once."""

from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import NOTHING_TOLD, Emitted, Failed, Finished, Submit
from dovetail.protocol.settings import CoordinatorSettings, Sampling
from dovetail.runtime.journal.database import Database
from support.houses import DYNAMIC, PROMPT
from support.lives import LONG_PROMPT, MOST, TICKET, Lives, undisturbed
from support.scripted import continuation


def goes_to(second: Any, lives: Lives, has: int = 0) -> Any:
    """Another client asks from now on, who has so many tokens; return the first one."""
    first, lives.house.client = lives.house.client, second
    lives.tokens = lives.tokens[:has]
    lives.text = "".join(f" w{token}" for token in lives.tokens)
    lives.logprobs, lives.scores, lives.end = [], [], None
    return first


def last_word(client: Any) -> Any:
    return [*iter(lambda: client.receive(0), None)][-1]


def test_who_takes_over_a_running_reply_has_the_scores_of_its_prompt_too(tmp_path: Path) -> None:
    asked = {"logprobs": 1, "scored": True, "tokens": LONG_PROMPT}
    whole = undisturbed(tmp_path / "whole", **asked)
    lives = Lives(tmp_path / "taken")
    second = lives.house.connect()
    lives.ask(**asked)
    lives.steps(20)
    assert lives.scores
    assert lives.tokens
    first = goes_to(second, lives)
    lives.ask(again=True, **asked)
    lives.run()
    found = (lives.tokens, lives.text, lives.logprobs, lives.scores)
    assert found == (whole.tokens, whole.text, whole.logprobs, whole.scores)
    assert isinstance(lives.end, Finished)
    told = last_word(first)
    assert isinstance(told, Failed)
    assert told.code == "ticket"
    assert not lives.house.coordinator.requests


@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_is_lost_and_comes_back_to_its_sessions_goes_on(
    tmp_path: Path, place: int
) -> None:
    whole = undisturbed(tmp_path / "whole")
    lives = Lives(tmp_path / "lost")
    lives.ask()
    lives.steps(20)
    assert 0 < len(lives.tokens) < MOST
    worker = lives.house.workers[place]
    assert worker.logs
    lives.house.lose(worker)
    lives.house.coordinator.look_around()
    lives.comes(worker)
    lives.run()
    assert (lives.tokens, lives.text) == (whole.tokens, whole.text)


@pytest.mark.parametrize("has", [0, 3, 12])
def test_what_the_first_client_had_beyond_the_journal_is_told_to_the_second(
    tmp_path: Path, has: int
) -> None:
    """The disk has lost what was written last; a client that has it comes back, and then one that
    has less, or as much."""
    lives = Lives(tmp_path)
    lives.ask()
    while len(lives.tokens) < 15:
        lives.steps(4)
    entry = lives.journal.find(TICKET, "/")
    assert entry is not None
    lives.journal._note(entry, entry.serves(1, entry.fingerprint, 0.0, 2))  # it knows of two tokens
    lives.journal.write()
    lives.killed()
    lives.starts()
    second = lives.house.connect()
    lives.ask(again=True)
    lives.steps(2)
    (running,) = lives.house.coordinator._running.values()
    assert running.delivery.ahead.tokens
    goes_to(second, lives, has)
    lives.ask(again=True)
    lives.run()
    assert isinstance(lives.end, Finished)
    assert lives.tokens == continuation(PROMPT, MOST)
    assert lives.end.result.text == lives.text


def test_of_two_clients_whose_requests_are_read_at_once_the_last_has_the_reply(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path)
    lives.ask()
    lives.steps(20)
    lives.killed()
    lives.starts()
    read: list[Any] = []
    lives.house.coordinator._defer = lambda work, done: read.append((work, done))
    goes_to(lives.house.connect(), lives)
    lives.ask(again=True)
    lives.house.run()
    first = goes_to(lives.house.connect(), lives)
    lives.ask(again=True)
    lives.house.run()
    assert len(read) == 2
    for work, done in read:
        done(work())
    lives.run()
    assert isinstance(lives.end, Finished)
    assert lives.tokens == continuation(PROMPT, MOST)
    told = last_word(first)
    assert isinstance(told, Failed)
    assert told.code == "ticket"


def test_tokens_that_only_the_client_has_are_decoded_on_the_same_kind_of_target(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path, settings=CoordinatorSettings(recovery_s=5.0))
    lives.ask()
    lives.steps(20)
    entry = lives.journal.find(TICKET, "/")
    assert entry is not None
    lives.journal._note(entry, entry.serves(1, entry.fingerprint, 0.0, 0))  # it knows of none
    lives.journal.write()
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


@pytest.mark.parametrize("comes", [True, False])
def test_a_reply_that_no_journal_knows_goes_on_only_where_its_tokens_were_computed(
    tmp_path: Path, comes: bool
) -> None:
    """The tokens that the client has are decoded again, and not told twice; on another target they
    would be of another text."""
    whole = undisturbed(tmp_path / "whole")
    lives = Lives(tmp_path / "lost", settings=CoordinatorSettings(recovery_s=5.0))
    lives.ask()
    lives.steps(20)
    begun, old = len(lives.tokens), lives.house
    assert begun
    lives.killed()
    lives.folder = tmp_path / "another"
    lives.starts(workers=False)
    lives.join_another()
    lives.ask(again=True)
    lives.run()
    assert lives.end is None
    assert len(lives.tokens) == begun
    if comes:
        lives.join(old)
        lives.run()
        assert isinstance(lives.end, Finished)
        assert (lives.tokens, lives.text) == (whole.tokens, whole.text)
    else:
        lives.house.later_ns += 5 * 10**9
        lives.run()
        assert isinstance(lives.end, Failed)
        assert f"no target with {lives.fingerprint} registered" in str(lives.end.text)


def test_a_reply_in_the_queue_whose_target_goes_waits_for_it_and_holds_up_nobody(
    tmp_path: Path,
) -> None:
    settings = CoordinatorSettings(recovery_s=5.0, key_sessions=1)
    lives = Lives(tmp_path, settings=settings, draft=False)
    lives.ask()
    lives.steps(20)
    old = lives.house
    lives.killed()
    lives.starts(workers=False)
    lives.join(old)
    lives.house.connect().submit(tokens=(9, 8, 7), max_tokens=400)
    lives.steps(2)
    lives.ask(again=True)
    lives.steps(20)
    assert lives.house.coordinator.report().totals.queued == 1
    lives.house.lose(lives.house.workers[0])
    lives.join_another()
    for _ in range(2):  # the one that ran ends, then the one that waited
        lives.house.later_ns += 5 * 10**9
        lives.run()
    assert isinstance(lives.end, Failed)
    assert f"no target with {lives.fingerprint} registered" in lives.end.text
    fresh = lives.house.connect()
    assert fresh.complete(fresh.submit(tokens=PROMPT, max_tokens=4)).result.token_ids


def test_tokens_of_several_targets_have_no_fingerprint() -> None:
    told, one = NOTHING_TOLD, Emitted(epoch=1, request=1, tokens=(3,), drafted=(False,), text="")
    for fingerprint, then in (("a", "a"), ("", "a"), ("a", "a"), ("b", ""), ("b", ""), ("", "")):
        told = told.after(one.model_copy(update={"fingerprint": fingerprint}))
        assert told.fingerprint == then
    assert told.tokens == 6


def test_who_asks_with_another_clients_ticket_changes_nothing(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    thief = lives.house.connect()
    lives.ask(owner="alice")
    lives.steps(20)
    fields = {"tokens": PROMPT, "max_tokens": 4, "sampling": Sampling(), "tree": DYNAMIC}
    thief._send(Submit(epoch=thief.epoch, request=9, ticket=TICKET, owner="bob", **fields))
    lives.house.coordinator.pump()
    entry = lives.journal.find(TICKET, "/alice")
    assert entry is not None
    assert entry.left_s is None


def test_a_long_reply_is_told_again_in_pieces_that_can_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = undisturbed(tmp_path, logprobs=1)
    monkeypatch.setattr("dovetail.runtime.engine.claims.MAX_JOINED", 7)
    entry = whole.journal.find(TICKET, "/")
    assert entry is not None
    again = Submit.model_validate({**dict(entry.submit), "epoch": 1, "request": 2})
    lives = whole
    tokens, text, logprobs = lives.tokens, lives.text, lives.logprobs
    lives.tokens, lives.text, lives.logprobs, lives.end = [], "", [], None
    pieces = [*lives.house.coordinator._claims.ended(again, entry)]
    for piece in pieces:
        lives.take(piece)
    assert len(pieces) == 1 + -(-len(tokens) // 7)
    assert (lives.tokens, lives.text, lives.logprobs) == (tokens, text, logprobs)


# -- the folder ------------------------------------------------------------------------------------


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    Database(tmp_path).close()
    (tmp_path / "notes").write_text("foreign")
    lives = undisturbed(tmp_path)
    lives.journal.close(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert (tmp_path / "notes").read_text() == "foreign"


def test_a_journal_that_has_stopped_forgets_all_the_same(tmp_path: Path) -> None:
    lives = undisturbed(tmp_path)
    lives.journal.failed = "the disk is full"
    lives.journal._failed_s = 4e9 - 9
    lives.journal._now_s = lambda: 4e9
    lives.house.coordinator.tick()
    assert lives.journal.state().replies == 0
    (fault,) = (fault for fault in lives.house.report().faults if fault.part == "journal")
    assert fault.since_s == 9.0
    assert fault.why.startswith("it has stopped: the disk is full, and restart the coordinator")
    assert str(tmp_path) in fault.why


def test_a_file_is_no_folder_for_a_journal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="which is not a folder: name one with"):
        Database(tmp_path / "file")
