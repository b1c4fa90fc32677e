"""A process that is told to end while pydantic builds what checks its values ends as it was told
to: what the signal raises comes out, rather than an error of pydantic's."""

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, NoReturn

import msgpack
import pytest
from pydantic_core import core_schema

from dovetail.protocol.codec import Dialect, encode
from dovetail.protocol.interruptions import uninterrupted
from dovetail.protocol.messages import Message
from dovetail.protocol.settings import Frozen

ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class ToldError(Exception):
    """The process was told to end by a signal, the argument."""


class Signalling:
    """A type that signals this process as often as pydantic's compiled half looks at it."""

    number = signal.SIGTERM

    def __repr__(self) -> str:
        signal.raise_signal(self.number)
        return "Signalling()"

    @classmethod
    def __get_pydantic_core_schema__(cls, _type: Any, _handler: Any) -> core_schema.CoreSchema:
        return core_schema.nullable_schema(core_schema.literal_schema([cls()]))


class Value(Frozen):
    signalling: Signalling | None = None


class Interrupted(Message):
    type: Literal["interrupted"] = "interrupted"
    signalling: Signalling | None = None


class Plain(Message):
    type: Literal["plain"] = "plain"


@pytest.fixture(autouse=True)
def told() -> Iterator[Callable[[int, FrameType | None], NoReturn]]:
    """Every signal that ends a process raises `ToldError`, by the handler that this yields."""

    def tell(number: int, _frame: FrameType | None) -> NoReturn:
        raise ToldError(number)

    former = {number: signal.signal(number, tell) for number in ENDINGS}
    yield tell
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_while_a_dialect_is_built_ends_the_process_as_it_says(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signalling, "number", number)
    dialect: Dialect[Interrupted | Plain] = Dialect(Interrupted | Plain)
    with pytest.raises(ToldError, match=str(int(number))):
        dialect.decode([msgpack.packb({"type": "nobody"})])


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_while_the_first_message_of_a_kind_is_read_ends_the_process_as_it_says(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signalling, "number", number)

    class First(Message):
        """A kind of which there is no message yet."""

        type: Literal["first"] = "first"
        signalling: Signalling | None = None

    dialect: Dialect[First | Plain] = Dialect(First | Plain)
    assert dialect.decode(encode(Plain(epoch=1))) == Plain(epoch=1)
    with pytest.raises(ToldError, match=str(int(number))):
        dialect.decode([msgpack.packb({"type": "first", "epoch": 1})])


@pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)
def test_a_signal_while_the_first_value_of_a_kind_is_made_ends_the_process_as_it_says(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signalling, "number", number)

    class Another(Value):
        """A kind of which there is no value yet."""

    with pytest.raises(ToldError, match=str(int(number))):
        Another()


def test_what_is_uninterrupted_ends_before_what_the_signal_raises(
    told: Callable[[int, FrameType | None], NoReturn],
) -> None:
    done = []

    def work() -> None:
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(ToldError, match=str(int(signal.SIGTERM))):
        work()
    assert done
    assert all(signal.getsignal(number) is told for number in ENDINGS)


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_thread_that_no_signal_interrupts_needs_nothing_held_back() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    former = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert seen == [former]
