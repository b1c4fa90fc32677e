"""Pending requests with their receivers, pending queries, and the target of requests."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from dovetail.protocol.messages import (
    Described,
    Emitted,
    Failed,
    Finished,
    Forgotten,
    PromptRead,
    PromptScored,
    Recalled,
    Reported,
    Seen,
    Submit,
)
from dovetail.protocol.messages import Told as ToldPart
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.text.tokenizer import TextCodec

Told = Emitted | PromptScored | PromptRead | Finished | Failed
A = TypeVar("A", Described, Reported, Seen, Recalled, Forgotten)


@dataclass(frozen=True)
class Aliases:
    """Other names of models, written as `NAME=MODEL,...`; NAME may contain *, and MODEL may be
    missing, which stands for the only one."""

    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, text: str) -> "Aliases":
        """Read the setting `http.aliases`; `ValueError` if a name is missing."""
        parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
        pairs = tuple((name.strip(), model.strip()) for name, _, model in parts)
        if not all(name for name, _ in pairs):
            raise ValueError("write NAME=MODEL, such as gpt-4o=smollm2, or * for any name")
        return cls(pairs)

    def covers(self, name: str, model: str) -> bool:
        """Return whether a name stands for this model."""
        return any(
            fnmatchcase(name, pattern) and served in ("", model) for pattern, served in self.pairs
        )

    def listed(self, model: str) -> tuple[str, ...]:
        """Return the names of a model, without patterns."""
        return tuple(n for n, served in self.pairs if "*" not in n and served in ("", model))


@dataclass(frozen=True)
class RequestTarget:
    """The current target of requests."""

    described: Described
    text: TextCodec

    @property
    def context(self) -> int:
        """The most tokens of prompt and reply together."""
        return self.described.limits.context

    def name(self, known: Mapping[str, str]) -> str:
        """Return its name without the path of a folder. `known`: names by the ends of paths."""
        own = self.described.model
        if not own.startswith(("/", "./", "../", "~")):
            return own
        named = (name for end, name in known.items() if own.endswith(end))
        return next(named, own.rstrip("/").rpartition("/")[2])


@dataclass
class Asked:
    """A request that has not ended."""

    submit: Submit
    tell: Callable[[Told], None]
    told: ToldPart  # the delivered part of its reply

    def count(self, reply: Emitted | PromptScored) -> None:
        """Record what was delivered."""
        self.told = self.told.after(reply)

    @property
    def again(self) -> Submit:
        """Return the request as sent to another coordinator."""
        return self.submit.model_copy(update={"told": self.told, "again": True})


class Questions:
    """The unanswered queries; the coordinator answers them in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[type[Any], asyncio.Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, kind: type[A]) -> asyncio.Future[A]:
        """Return a future for the answer, of this type, to a query that is sent now."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, answer))
        return answer

    def answered(self, reply: Described | Reported | Seen | Recalled | Forgotten) -> None:
        """Resolve the first query, if it expects this type and its caller still waits."""
        if not self._waiting:
            return
        kind, answer = self._waiting.popleft()
        if isinstance(reply, kind) and not answer.done():
            answer.set_result(reply)

    def failed(self, error: ApiError) -> None:
        """Fail the first query."""
        _, answer = self._waiting.popleft()
        if not answer.done():
            answer.set_exception(error)
