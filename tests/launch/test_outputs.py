"""A disk that becomes full while something is written is told with the name of the file and a
remedy, whatever is written."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.launch.bench.turns import open_journal
from dovetail.launch.commands import stratify
from dovetail.launch.files.outputs import open_answers, open_records
from dovetail.launch.planning.acceptance import About
from dovetail.launch.settings.thresholds import write_thresholds
from dovetail.protocol.errors import OutputError, UserError
from dovetail.protocol.messages import RoundRecord
from dovetail.protocol.settings import Sampling
from dovetail.runtime.telemetry.trace import write_trace
from simulation.folder import Folder
from support.records import read_records

RECORD = RoundRecord(
    round=1, prefix=3, tokens=(), parents=(), scores=(), verified=0, accepted=(), bonus=5
)


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process can grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def answers(path: Path) -> None:
    with open_answers(path) as file, no_room():
        file.write("a", [])


def records(path: Path) -> None:
    with open_records(path) as file, no_room():
        file.write("a", 0, RECORD)


def journal(path: Path) -> None:
    with open_journal(path, {"version": "1"}) as file, no_room():
        file.end({"format": 1})


def rounds(path: Path) -> None:
    with no_room(), stratify._kept(path, {"target": "x"}) as (_, keep):
        keep(stratify.PromptRounds("a", ()))


def thresholds(path: Path) -> None:
    with no_room():
        write_thresholds(path, [0.5], {"holds_for": {}}, [])


def trace(path: Path) -> None:
    with no_room():
        write_trace(path, [])


@pytest.mark.parametrize("write", [answers, records, journal, rounds, thresholds, trace])
def test_whatever_writes_names_its_file_when_there_is_no_room(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "out"
    with pytest.raises(
        OutputError,
        match=f"^cannot write .* to {path}: File too large; raise the limit of a file's size",
    ):
        write(path)


def test_the_folder_of_a_recording_that_cannot_be_begun_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    about = About(
        target="t", target_model="t", draft_model="d", head=False, vocabulary_size=9, end=(), context=9, sampling=Sampling(), seed=0, sharpening=1.0,  # noqa: E501
        nodes=1, depth=1, width=1, max_tokens=1,
    )  # fmt: skip
    with pytest.raises(
        Exception,
        match=r"a recording cannot be written to .*file/out: Not a directory; a part of that "
        r"path is a file",
    ):
        Folder(tmp_path / "file" / "out", about)


def round_of(number: int, bonus: int = 7) -> RoundRecord:
    return RoundRecord(
        round=number,
        prefix=10 + number,
        tokens=(4, 5),
        parents=(-1, 0),
        scores=(-0.5, -1.25),
        verified=2,
        accepted=(0,),
        bonus=bonus,
        verify_ns=3,
    )


def test_what_is_written_is_read_as_replies_in_the_order_in_which_they_began(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rounds.jsonl"
    with open_records(path) as records:
        for id, turn, number in (("a", 0, 1), ("b\u2028", 0, 1), ("a", 0, 2), ("a", 1, 1)):
            records.write(id, turn, round_of(number))
    replies = read_records(path)
    assert [(reply.id, reply.turn, [one.round for one in reply.rounds]) for reply in replies] == [
        ("a", 0, [1, 2]),
        ("b\u2028", 0, [1]),
        ("a", 1, [1]),
    ]
    assert replies[0].rounds == (round_of(1), round_of(2))


def test_a_run_that_goes_on_drops_a_torn_line_and_a_reply_that_is_done_again_replaces_the_half_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rounds.jsonl"
    with open_records(path) as records:
        records.write("a", 0, round_of(1, bonus=1))
        records.write("a", 0, round_of(2, bonus=1))
    with path.open("ab") as file:
        file.write(b'{"id": "a", "tu')
    assert [one.bonus for one in read_records(path)[0].rounds] == [1, 1]
    with open_records(path, go_on=True) as records:
        records.write("a", 0, round_of(1, bonus=2))
    assert [one.bonus for one in read_records(path)[0].rounds] == [2]
    with open_records(path) as records:
        records.write("", 0, round_of(1))
    assert [reply.id for reply in read_records(path)] == [""]


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        '{"id": "a", "turn": 0}\n',
        '{"id": "a", "turn": 0, "record": {"round": 1}}\n',
        '{"id": "a", "turn": 1e400, "record": {}}\n',
        "[1]\n",
    ],
)
def test_a_file_of_something_else_is_named_with_its_line_and_stays_as_it_is(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"notes\.txt line 1 is not a round"):
        read_records(path)
    with pytest.raises(UserError, match="line 1"), open_records(path):
        pass
    assert path.read_text() == text


def test_a_file_without_rounds_is_named_with_the_command_that_writes_them(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="generate --record"):
        read_records(tmp_path / "empty")
    with pytest.raises(UserError, match="cannot be read"):
        read_records(tmp_path / "missing")
