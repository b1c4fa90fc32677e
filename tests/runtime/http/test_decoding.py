"""One HTTP request while it is decoded, over a gateway that a test plays by hand."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.protocol.messages import Emitted, Failed, PromptRead
from dovetail.runtime.http import decoding
from dovetail.runtime.http.asked import Told
from dovetail.runtime.http.decoding import Run
from dovetail.runtime.http.errors import ApiError

FULL = Failed(epoch=1, code="capacity", text="the queue is full")
ENDED = Failed(epoch=1, code="internal", text="it ends")


class Coordinator:
    """Keeps what is asked of it, and whom to tell."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tells: list[Callable[[Told], None]] = []
        self.cancelled: list[int] = []

    def submit(self, submit: Any, tell: Callable[[Told], None]) -> int:
        self.asked.append(submit)
        self.tells.append(tell)
        return len(self.asked)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def emitted(token: int) -> Emitted:
    return Emitted(epoch=1, request=1, tokens=(token,), drafted=(False,), text=f"w{token}")


def test_replies_without_a_place_in_the_queue_are_asked_for_again_as_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "RETRY_AFTER_S", 0.0)

    async def answer() -> None:
        coordinator = Coordinator()
        tells = coordinator.tells
        run = Run(coordinator)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(lambda: (tells[0](FULL), tells[1](emitted(5))))
        await run.begin(SimpleNamespace(submits=(0, 1)))  # type: ignore[arg-type]
        assert [index for index, _ in await run.take()] == [1]
        assert coordinator.asked == [0, 1]
        tells[1](ENDED)
        assert coordinator.asked == [0, 1, 0]
        tells[2](FULL)
        await asyncio.sleep(0.01)
        assert coordinator.asked == [0, 1, 0, 0]
        tells[3](ENDED)
        assert [index for index, _ in await run.take()] == [1, 0]
        assert not await run.take()

    asyncio.run(answer())


def test_nobody_asks_again_for_an_answer_that_was_given_up() -> None:
    async def answer() -> None:
        coordinator = Coordinator()
        tells = coordinator.tells
        run = Run(coordinator)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(lambda: (tells[0](FULL), tells[1](emitted(5))))
        await run.begin(SimpleNamespace(submits=(0, 1)))  # type: ignore[arg-type]
        run.close()
        tells[1](ENDED)
        assert coordinator.asked == [0, 1]
        assert coordinator.cancelled == [2]

    asyncio.run(answer())


def test_an_answer_is_refused_if_the_queue_has_no_place_for_any_reply() -> None:
    async def answer() -> None:
        coordinator = Coordinator()
        run = Run(coordinator)  # type: ignore[arg-type]

        def refuse() -> None:
            for tell in coordinator.tells:
                tell(FULL)

        asyncio.get_running_loop().call_soon(refuse)
        with pytest.raises(ApiError) as refused:
            await run.begin(SimpleNamespace(submits=(0, 1)))  # type: ignore[arg-type]
        assert refused.value.status == 429
        assert coordinator.asked == [0, 1]

    asyncio.run(answer())


def test_a_deadline_begins_with_the_first_token_and_before_it_with_any_progress() -> None:
    clock = Clock()
    read = PromptRead(epoch=1, request=1, total=9, cached=0, done=3)

    async def begun() -> tuple[Run, Callable[[Told], None]]:
        coordinator = Coordinator()
        run = Run(coordinator, deadline_s=10.0)  # type: ignore[arg-type]
        await run.begin(SimpleNamespace(submits=(0,)), 0.0)  # type: ignore[arg-type]
        return run, coordinator.tells[0]

    async def answer() -> None:
        run, tell = await begun()
        for told in (read, read, read, emitted(5), emitted(6)):
            clock.now_s += 9.0
            tell(told)
            assert await run.take() == [(0, told)]
        clock.now_s += 2.0  # 11 s after the first token
        with pytest.raises(ApiError, match="the reply has taken longer than 10 s"):
            await run.take()
        run, tell = await begun()
        clock.now_s += 9.0
        tell(read)
        await run.take()
        clock.now_s += 11.0
        with pytest.raises(ApiError, match=r"for 10 s .* the request made no progress"):
            await run.take()

    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(answer())
