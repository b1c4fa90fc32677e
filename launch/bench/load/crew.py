"""Keeps so many requests under way until all have been asked: a closed loop, as `vllm bench serve
--max-concurrency` without a rate. Knows nothing of what is asked."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from dovetail.launch.bench.load.request import Reply


@dataclass(frozen=True)
class Load:
    """The replies of requests that ran at once, in the order in which they ended."""

    replies: tuple[Reply, ...]
    seconds: float
    """From the first request to the last end."""
    interrupted: bool = False
    """Ctrl-C came: requests that were under way are no replies."""


def run(
    ask: Callable[[int], Reply], requests: int, concurrency: int, step: Callable[[], None]
) -> Load:
    """Ask requests 0 to `requests` - 1, `concurrency` at a time; `step` hears of each end.

    The threads are daemons: what is under way when Ctrl-C comes ends with this process.
    """
    waiting, ended = SimpleQueue[int](), SimpleQueue[Reply | BaseException]()
    for number in range(requests):
        waiting.put(number)
    replies: list[Reply] = []
    began_s = time.perf_counter()
    for _ in range(min(concurrency, requests)):
        threading.Thread(target=_work, args=(ask, waiting, ended), daemon=True).start()
    interrupted = False
    try:
        while len(replies) < requests:
            reply = ended.get()
            if isinstance(reply, BaseException):
                raise reply
            replies.append(reply)
            step()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for _ in _taken(waiting):
            pass
    return Load(tuple(replies), time.perf_counter() - began_s, interrupted)


def _work(
    ask: Callable[[int], Reply],
    waiting: SimpleQueue[int],
    ended: SimpleQueue[Reply | BaseException],
) -> None:
    """Ask what is still to be asked; a mistake of ours is raised where all is waited for."""
    try:
        for number in _taken(waiting):
            ended.put(ask(number))
    except BaseException as error:
        ended.put(error)


def _taken(waiting: SimpleQueue[int]) -> Iterator[int]:
    """Take what is left, number by number, until nothing is."""
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return
