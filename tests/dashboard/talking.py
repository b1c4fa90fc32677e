"""Somebody who has a server decode all the time, so that there is something to see."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import httpx

from support.patience import PATIENCE_S
from support.stacks import PROMPTS

TOKENS = 300


@contextlib.contextmanager
def talking(url: str, *, streams: int = 2, speculate: bool = True) -> Iterator[None]:
    """So many chats at a time, one after the other, until the end of the block."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_talk, args=(url, ended, first, speculate), daemon=True)
        for first in range(streams)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def _talk(url: str, ended: threading.Event, first: int, speculate: bool) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        for number in itertools.count(first, 3):
            content = PROMPTS[number % len(PROMPTS)][0]
            body = {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": TOKENS,
                "stream": True,
                "dovetail": {"speculate": speculate},
            }
            with (
                contextlib.suppress(httpx.HTTPError),
                client.stream("POST", "/v1/chat/completions", json=body) as reply,
            ):
                for _ in reply.iter_lines():
                    if ended.is_set():
                        return
            if ended.wait(0.2):
                return
