"""The gateway over links in memory, with a coordinator that a test plays by hand."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from dovetail.protocol.codec import REQUEST, encode
from dovetail.protocol.errors import LinkClosed
from dovetail.protocol.links.sockets import QUEUE_MESSAGES
from dovetail.protocol.messages import (
    Cancel,
    Describe,
    Described,
    Emitted,
    Failed,
    Hello,
    LoadingState,
    Message,
    Request,
    Status,
    Submit,
    Welcome,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.http import gateway as gateways
from dovetail.runtime.http.asked import Told
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.gateway import Gateway
from dovetail.runtime.text.tokenizer import codec_of
from support import golden
from support.memory_links import MemoryHub, memory_links
from support.scripted import hello

SUBMIT = Submit(
    epoch=0, request=0, tokens=(5, 6), sampling=Sampling(), max_tokens=5, tree=TreeSettings()
)


class Coordinator:
    """Reads what the gateway says, and says what it is told to."""

    def __init__(self) -> None:
        self.hub: MemoryHub = memory_links()
        self.peer = b""

    async def hear(self) -> Request:
        while (arrived := self.hub.receive()) is None:
            await turn()
        self.peer = arrived[0]
        return REQUEST.decode(arrived[1])

    def say(self, message: Message) -> None:
        self.hub.send(self.peer, encode(message))

    async def welcome(self) -> None:
        assert isinstance(await self.hear(), Hello)
        self.say(Welcome(epoch=9))


@contextmanager
def keeping(gateway: Gateway) -> Iterator[None]:
    task = asyncio.create_task(gateway.run())
    try:
        yield
    finally:
        task.cancel()


def play(scene: Callable[[Gateway, Coordinator], Awaitable[None]]) -> None:
    """A scene between a gateway and a coordinator that has welcomed it."""

    async def run() -> None:
        coordinator = Coordinator()
        gateway = Gateway(coordinator.hub.connect)
        with keeping(gateway):
            await coordinator.welcome()
            await until(lambda: not gateway.missing)
            async with asyncio.timeout(60):
                await scene(gateway, coordinator)
            coordinator.hub.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await turn()


async def turn() -> None:
    """Let everybody else do something; all of them are in this loop."""
    await asyncio.sleep(0)


def test_replies_are_told_to_who_asked() -> None:
    async def scene(gateway: Gateway, coordinator: Coordinator) -> None:
        heard: dict[str, list[Told]] = {"first": [], "second": []}
        first, second = (gateway.submit(SUBMIT, heard[name].append) for name in heard)
        assert [(await coordinator.hear()).request for _ in range(2)] == [first, second]  # type: ignore[union-attr]
        for request in (second, first, second):
            coordinator.say(
                Emitted(epoch=9, request=request, tokens=(7,), drafted=(False,), text="x")
            )
        await until(lambda: len(heard["first"]) + len(heard["second"]) == 3)
        assert [len(told) for told in heard.values()] == [1, 2]

    play(scene)


def test_a_request_that_is_cancelled_is_not_heard_of_any_more() -> None:
    async def scene(gateway: Gateway, coordinator: Coordinator) -> None:
        heard: list[Told] = []
        number = gateway.submit(SUBMIT, heard.append)
        gateway.cancel(number)
        gateway.cancel(number)
        assert isinstance(await coordinator.hear(), Submit)
        cancel = await coordinator.hear()
        assert isinstance(cancel, Cancel)
        assert cancel.request == number
        coordinator.say(Failed(epoch=9, session=number, code="internal", text="late"))
        asked = asyncio.create_task(gateway.status())
        assert isinstance(await coordinator.hear(), Status)
        asked.cancel()
        assert heard == []
        assert gateway.running == 0

    play(scene)


def test_a_coordinator_that_goes_fails_what_runs_and_what_is_asked() -> None:
    async def scene(gateway: Gateway, coordinator: Coordinator) -> None:
        heard: list[Told] = []
        gateway.submit(SUBMIT, heard.append)
        asked = asyncio.create_task(gateway.target())
        await coordinator.hear()
        assert isinstance(await coordinator.hear(), Describe)
        coordinator.hub.close()
        with pytest.raises(ApiError):
            await asked
        assert isinstance(heard[0], Failed)
        assert "disconnected: try again" in gateway.missing
        with pytest.raises(ApiError, match="restarts its coordinator") as refused:
            gateway.submit(SUBMIT, heard.append)
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)

    play(scene)


def test_a_question_that_is_refused_is_answered_so() -> None:
    async def scene(gateway: Gateway, coordinator: Coordinator) -> None:
        asked = asyncio.create_task(gateway.target())
        await coordinator.hear()
        coordinator.say(Failed(epoch=9, code="no_target", text="no target worker is registered"))
        with pytest.raises(ApiError, match="no target") as refused:
            await asked
        assert refused.value.status == 503

    play(scene)


def test_a_coordinator_that_reads_nothing_for_a_while_holds_nobody_up() -> None:
    async def scene(gateway: Gateway, coordinator: Coordinator) -> None:
        numbers = [gateway.submit(SUBMIT, lambda _: None) for _ in range(QUEUE_MESSAGES + 50)]
        assert [(await coordinator.hear()).request for _ in numbers] == numbers  # type: ignore[union-attr]

    play(scene)


def test_a_coordinator_that_refuses_us_is_asked_again_later() -> None:
    async def run() -> None:
        coordinator = Coordinator()
        gateway = Gateway(coordinator.hub.connect)
        with keeping(gateway):
            await coordinator.hear()
            coordinator.say(
                Failed(epoch=9, code="version", text="run the same release of dovetail on both")
            )
            await until(lambda: "same release" in gateway.missing)
            async with asyncio.timeout(60):
                await coordinator.welcome()
                await until(lambda: not gateway.missing)
        coordinator.hub.close()

    asyncio.run(run())


def test_a_search_that_waited_for_a_coordinator_is_followed_by_the_next_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pause_s, gaps_s, searches = 0.1, list[float](), 10
    monkeypatch.setattr(gateways, "RETRY_S", pause_s)
    monkeypatch.setattr(gateways, "MOST_RETRY_S", pause_s)

    async def run() -> None:
        ended_s, enough = list[float](), threading.Event()

        def search() -> NoReturn:
            gaps_s.extend(time.monotonic() - end_s for end_s in ended_s[-1:])
            threading.Event().wait(pause_s)
            ended_s.append(time.monotonic())
            if len(ended_s) == searches:
                enough.set()
            raise LinkClosed("nobody is there")

        with keeping(Gateway(search)):
            assert await asyncio.to_thread(enough.wait, 60)

    asyncio.run(run())
    assert min(gaps_s) < pause_s, "a search ends, and the next one waits as long again"


def test_a_question_that_is_not_answered_in_time_names_who_is_loading() -> None:
    """The time is a setting."""
    facts = {"name": "target-2", "roles": ("target",), "host": "here", "pid": 1, "model": "m"}
    reading = LoadingState.model_validate(
        {**facts, "doing": "reading", "done": 0, "total": 0, "bytes_per_s": 0.0}
    )

    async def run() -> None:
        coordinator = Coordinator()
        gateway = Gateway(coordinator.hub.connect, answer_s=0.2)
        with keeping(gateway):
            await coordinator.welcome()
            await until(lambda: not gateway.missing)
            asked = asyncio.create_task(gateway.status())
            await coordinator.hear()
            coordinator.say(
                golden.representative()["reported"].model_copy(update={"loading": (reading,)})
            )
            await asked
            with pytest.raises(ApiError) as found:
                await gateway.status()
        coordinator.hub.close()
        text = str(found.value)
        assert "did not answer within 0.2 s; the target target-2 is reading its tokenizer" in text
        assert "--coordinator.answer_s" in text

    asyncio.run(run())


def test_the_codec_of_the_first_target_may_be_read_ahead() -> None:
    target = hello("target", epoch=1)
    described = Described.model_validate(
        {
            **{name: getattr(target, name) for name in ("limits", "vocabulary", "tokenizer")},
            "epoch": 9,
            "model": "m",
            "fingerprint": "f",
        }
    )
    codec = codec_of(described)

    async def run() -> None:
        coordinator = Coordinator()
        gateway = Gateway(coordinator.hub.connect, read=lambda: codec)
        with keeping(gateway):
            await coordinator.welcome()
            await until(lambda: not gateway.missing)
            asked = asyncio.create_task(gateway.target())
            assert isinstance(await coordinator.hear(), Describe)
            coordinator.say(described)
            assert (await asked).text._tokenizer is codec._tokenizer
        coordinator.hub.close()

    asyncio.run(run())
