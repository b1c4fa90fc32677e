"""The round rules."""

import pytest

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.workers.sessions.rounds import check_round, find_session


def test_the_next_round_of_the_same_length_passes() -> None:
    check_round(1, last=3, round=4, length=10, prefix=10)


@pytest.mark.parametrize("round_", [0, 2, 3])
def test_a_round_that_is_done_is_stale_whatever_it_assumes(round_: int) -> None:
    with pytest.raises(StaleError):
        check_round(1, last=3, round=round_, length=10, prefix=99)


@pytest.mark.parametrize(
    ("round_", "prefix", "words"),
    [
        (5, 10, "got round 5 after round 3"),
        (4, 11, "assumes 11 tokens, but the log here has 10"),
    ],
)
def test_a_round_too_many_or_another_length_is_refused(
    round_: int, prefix: int, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        check_round(1, last=3, round=round_, length=10, prefix=prefix)
    assert refusal.value.code == "prefix"


@pytest.mark.parametrize(("round_", "left_out"), [(4, 0), (4, 3), (5, 1), (7, 3)])
def test_rounds_may_be_missing_whose_tokens_come_along(round_: int, left_out: int) -> None:
    check_round(1, last=3, round=round_, length=10, prefix=10, left_out=left_out)


@pytest.mark.parametrize(
    ("round_", "prefix", "words"),
    [
        (8, 10, "got round 8 after round 3"),
        (5, 11, "assumes 11 tokens, but the log here has 10"),
    ],
)
def test_more_missing_rounds_than_tokens_and_tokens_that_do_not_add_up_are_refused(
    round_: int, prefix: int, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        check_round(1, last=3, round=round_, length=10, prefix=prefix, left_out=3)
    with pytest.raises(StaleError):
        check_round(1, last=3, round=3, length=10, prefix=10, left_out=3)


def test_a_session_is_found_or_refused() -> None:
    assert find_session({4: "here"}, 4) == "here"
    with pytest.raises(RequestError, match="session 5 is not open") as refusal:
        find_session({4: "here"}, 5)
    assert refusal.value.code == "session"
