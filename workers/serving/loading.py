"""Reports a worker's loading progress to its coordinator before it registers. Uses links and
messages; independent of models."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import LinkError
from dovetail.protocol.links import Link
from dovetail.protocol.messages import Loading, LoadingState, Role

TELL_EVERY_S = 0.25


class Telling:
    """Sends the number of bytes checked or loaded, a few times a second. The loss of the
    coordinator is noticed only at registration."""

    def __init__(
        self,
        link: Link,
        name: str,
        roles: Sequence[Role],
        model: str,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link, self._clock_s = link, clock_s
        self._who = {
            "name": name,
            "roles": tuple(roles),
            "host": socket.gethostname()[:512],
            "pid": os.getpid(),
            "model": model[:512],
        }
        self._doing = ""
        self._began_s = self._told_s = 0.0

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Report progress, at a limited rate; always at the start and end of a phase."""
        now_s = self._clock_s()
        if doing != self._doing or done == 0:
            self._doing, self._began_s = doing, now_s
        elif now_s - self._told_s < TELL_EVERY_S and done < total:
            return
        self._told_s = now_s
        rate = done / (now_s - self._began_s) if now_s > self._began_s else 0.0
        state = LoadingState.model_validate(
            {**self._who, "doing": doing, "done": done, "total": total, "bytes_per_s": rate}
        )
        with suppress(LinkError):
            self._link.offer(encode(Loading(epoch=0, state=state)))
