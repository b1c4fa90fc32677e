"""The file of rounds: written as they come, read as replies."""

from pathlib import Path

import pytest

from dovetail.launch.files.records import open_records
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord
from support.records import read_records


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
