"""Keeps a number of requests in flight until all have ended: a closed loop, like `vllm bench serve
--max-concurrency` without a request rate. Knows nothing of what is asked."""

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
    seconds: float  # from the start of the first request to the end of the last
    interrupted: bool = False
    """True if Ctrl-C came; requests that were in flight then are not among the replies."""


def run(
    ask: Callable[[int], Reply], requests: int, concurrency: int, step: Callable[[], None]
) -> Load:
    """Send requests 0 to `requests` - 1, `concurrency` at a time; `step` is called at the end of
    each.

    The threads are daemons: requests in flight when Ctrl-C comes end with this process.
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
    """Send what is still to be sent. An exception is a bug of ours, and is raised by `run`."""
    try:
        for number in _taken(waiting):
            ended.put(ask(number))
    except BaseException as error:
        ended.put(error)


def _taken(waiting: SimpleQueue[int]) -> Iterator[int]:
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return
