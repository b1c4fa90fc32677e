"""A request, and all that its client has been told of it."""

from dataclasses import dataclass, field
from itertools import pairwise

from dovetail.protocol.messages import NOTHING_TOLD, Failed, Finished, Result, TokenLogprobs
from dovetail.protocol.messages import Told as Heard
from explore.clock import MS
from explore.schedules import Reply, Wish


@dataclass
class Told:
    """A request and all that its client has been told of it."""

    wish: Wish
    expected: Reply | None = None
    """The reply that it must have; None: who asks is about to find out."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scored: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | Failed | None = None
    heard_ns: list[int] = field(default_factory=list)  # when it was told tokens
    cancelled: bool = False
    most: int | None = None
    """The tokens that had been committed when its client cancelled it; None: it has not."""
    losses: int = 0  # targets that were lost before the request came
    late: bool = False
    """Its client did not read for some time, so that it heard of it later than it happened."""
    heard: Heard = NOTHING_TOLD
    """The client's account of what it was told, for the next coordinator."""
    asked: bool = False  # some coordinator was asked for it
    again: bool = False  # its client has come back for it, to another coordinator
    void: bool = False
    """Nobody waits for it any more: the client has left, or its coordinator has gone."""
    sabotaged: bool = False  # something that the coordinator does about it raises

    @property
    def open(self) -> bool:
        return self.end is None and not self.void

    @property
    def longest_pause_ms(self) -> float:
        """Between two times that it was told tokens."""
        return max(after - before for before, after in pairwise(self.heard_ns)) / MS

    @property
    def undisturbed(self) -> Reply:
        assert self.expected is not None
        return self.expected

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished)
        return self.end

    @property
    def result(self) -> Result:
        return self.finished.result

    def reply(self) -> Reply:
        return Reply(
            tuple(self.tokens),
            self.text,
            self.result.finish_reason,
            tuple(self.logprobs),
            tuple(self.scored),
        )
