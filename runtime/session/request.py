"""A client's request in tokens, and the command that opens its session on a worker. Pure."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.protocol.errors import ProtocolError, RequestError, StaleError
from dovetail.protocol.messages import Constraint, Open, Reads, Scored, TokenLogprobs
from dovetail.protocol.prefixes import TOKEN_BYTES as TOKEN_BYTES
from dovetail.protocol.prefixes import digest_of
from dovetail.protocol.settings import Sampling, TreeSettings


@dataclass(frozen=True)
class Base:
    """The session whose cache another one reuses, and the number of reused tokens."""

    session: int | None
    """None: the rows are those of stored blocks."""
    tokens: int
    shared: bool = False
    """True if the base stays unchanged, running or kept; False if it was kept and is taken over."""


@dataclass(frozen=True)
class Kept:
    """A session, ended or running: its packed log, and the worker's rows of it."""

    session: int
    log: bytes
    rows: int
    tokens: int
    """Tokens that the worker may have in its log, including some beyond the end of the reply."""
    scope: str = ""
    """The scope of the request: no other scope may reuse it, or find out how much of a prompt was
    sent before."""


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as the prefix cache compares them."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


@dataclass(frozen=True)
class Request:
    """A client's request, in tokens."""

    prompt: tuple[int, ...]
    key: bytes
    seed: int
    sampling: Sampling
    max_tokens: int
    tree: TreeSettings
    end: tuple[int, ...]
    vocabulary_size: int
    stop: tuple[str, ...] = ()
    record: bool = False
    progress: bool = False
    logprobs: int | None = None
    scored: bool = False
    owner: str = ""
    scope: str = ""
    """Whose cached rows the request may reuse: those of requests with the same scope."""
    blocks: bytes = b""
    """The scope of stored blocks; empty: none are stored or reused."""
    least_capacity: int = 0
    constraint: Constraint | None = None
    packed: bytes = field(init=False, repr=False)
    """The prompt in the form that the prefix cache compares; computed with the request, when a
    millisecond does not matter."""
    most_nodes: int = field(init=False, repr=False)
    """The most nodes of a tree; stored, since every round needs it."""
    most_levels: int = field(init=False, repr=False)  # the most levels of a tree
    rejects: bool = field(init=False, repr=False)
    """True under rejection sampling, where the reply depends on the proposals."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack(self.prompt))
        object.__setattr__(self, "most_nodes", self.tree.most_nodes)
        object.__setattr__(self, "most_levels", self.tree.most_levels)
        object.__setattr__(self, "rejects", self.sampling.rejects)

    @property
    def capacity(self) -> int:
        """The most tokens of prompt and reply together, at least one for the reply."""
        return max(self.least_capacity, len(self.prompt) + max(1, self.max_tokens))

    @property
    def may_reuse(self) -> bool:
        """Whether the request may reuse an ended session: not if its tokens depend on the draft,
        nor if each token of the prompt is scored."""
        return not (self.scored or self.rejects)

    def log(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the first `count` tokens of the token log; `tokens`: those of the reply."""
        begun = len(self.prompt)
        return self.prompt if count == begun else (*self.prompt, *tokens[: count - begun])

    def open_command(
        self, log: tuple[int, ...], *, epoch: int, session: int, round: int, reads: Reads | None
    ) -> Open:
        """Return the command for a worker to prefill this beginning of the token log; `round`: the
        one completed by the next token; `reads`: the features that the draft reads."""
        return Open(
            epoch=epoch,
            session=session,
            round=round,
            key=self.key,
            prompt=log,
            capacity=self.capacity,
            vocabulary_size=self.vocabulary_size,
            end=self.end,
            sampling=self.sampling,
            constraint=self.constraint,
            tree=self.tree,
            features=reads,
            replied=len(log) - len(self.prompt),
            scope=self.blocks if self.may_reuse else b"",
        )

    def for_target(
        self, command: Open, base: Base | None, *, features_from: int | None, begun: bool
    ) -> Open:
        """Return the command for the target. `features_from`: the first position whose features it
        returns, None if no draft reads them; `begun`: the reply already has tokens."""
        own: dict[str, object] = {"logprobs": self.logprobs, "scored": self.scored and not begun}
        kept = base.tokens if base is not None else 0
        if base is not None:
            own |= _going_on_from(base)
        if features_from is not None and features_from != kept:
            own["features_from"] = features_from
        return command.model_copy(update=own)


def for_draft(command: Open, base: Base | None, fingerprint: str) -> Open:
    """Return the command for the draft; `fingerprint`: of its target."""
    own = {} if base is None else _going_on_from(base)
    if command.features is not None:
        own["scope"] = draft_scope(command.scope, fingerprint)
    return command.model_copy(update=own) if own else command


def draft_scope(scope: bytes, fingerprint: str) -> bytes:
    """Return the scope of the blocks of a draft that reads this target, on which its rows
    depend."""
    return digest_of(scope, fingerprint) if scope else scope


def _going_on_from(base: Base) -> dict[str, object]:
    stored = base.session is None
    return {"base": base.session, "kept": base.tokens, "shared": base.shared and not stored}


def base_of(command: Open) -> Base | None:
    """Return the session that a command reuses, if any."""
    if command.base is None:
        return Base(None, command.kept, True) if command.kept else None
    return Base(command.base, command.kept, command.shared)


# -- checks of requests, also used by the HTTP process ---------------------------------------------


def check_ids(where: str, ids: Iterable[int], size: int) -> None:
    """Raise `RequestError` for a token id of `where` beyond a vocabulary of this size."""
    if (beyond := next((token for token in ids if token >= size), None)) is not None:
        text = f"token id {beyond} of {where} is beyond the vocabulary of {size}"
        raise RequestError("settings", text)


def too_long(count: str, context: int) -> RequestError:
    """Return the error for a prompt of this many tokens, which leaves no room for a reply."""
    text = f"the prompt has {count} tokens, but the target holds at most {context} with its reply: "
    return RequestError("prompt_too_long", f"{text}shorten it to at most {context - 1}")


def begun(prompt: tuple[int, ...], begin: int | None) -> tuple[int, ...]:
    """Return a prompt; an empty one becomes `begin`, the token that begins texts, if any."""
    if not prompt and begin is None:
        text = "the prompt is empty, and the target has no token that begins a text: give it at "
        raise RequestError("settings", f"{text}least one token")
    return prompt or (begin or 0,)


def check_least(min_tokens: int, max_tokens: int) -> None:
    """Raise `RequestError` if a reply's minimum length exceeds its maximum."""
    if min_tokens > max_tokens:
        text = f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens}): lower one or "
        raise RequestError("settings", f"{text}raise the other")


def check_logprobs(logprobs: Sequence[TokenLogprobs], tokens: int, request: Request) -> None:
    """Raise `ProtocolError` unless there are as many log-probabilities as requested."""
    expected = 0 if request.logprobs is None else tokens
    if len(logprobs) != expected or not _fit(logprobs, request):
        raise ProtocolError(
            f"{len(logprobs)} log-probabilities of {tokens} tokens, "
            f"requested with {request.logprobs} alternatives of each"
        )


def _fit(logprobs: Sequence[TokenLogprobs], request: Request) -> bool:
    """Return whether each has the requested number of alternatives, all of them valid tokens."""
    size = request.vocabulary_size
    most = min(request.logprobs or 0, size)
    return all(
        len(said.top) == most and all(token < size for token, _ in said.top) for said in logprobs
    )


class PromptScores:
    """Tracks the scores of a prompt's tokens, some of which another target may send again."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._next = 1  # position of the next token whose score the target sends
        self.told = 1  # position of the first token whose score was not sent to the client

    def restart(self) -> None:
        """Expect the scores from the beginning: another target prefills the prompt."""
        self._next = 1

    def take(
        self, event: Scored, request: Request, *, expected: bool
    ) -> tuple[int, tuple[TokenLogprobs, ...]] | None:
        """Return the position and the scores that were not sent to the client yet, or None. Raises
        `ProtocolError` unless the scores are `expected` and fit."""
        stop = event.start + len(event.logprobs)
        if event.start < self._next:
            raise StaleError(
                f"session {self._session} was not waiting for scores of position {event.start}"
            )
        if (
            not expected
            or event.start != self._next
            or not event.start < stop <= len(request.prompt)
            or not _fit(event.logprobs, request)
        ):
            raise ProtocolError(
                f"log-probabilities of positions {event.start} to {stop - 1} were not requested"
            )
        self._next = stop
        if stop <= self.told:
            return None
        start, self.told = max(event.start, self.told), stop
        return start, event.logprobs[start - event.start :]

    def check_whole(self, request: Request) -> None:
        """Raise `ProtocolError` unless all tokens of the prompt have been scored."""
        if self._next != len(request.prompt):
            raise ProtocolError(
                f"log-probabilities of {self._next - 1} tokens of a prompt of {len(request.prompt)}"
            )
