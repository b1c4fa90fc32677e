"""A draft worker's registration."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.protocol.arrays import Array
from dovetail.protocol.calibration import ContextCurve
from dovetail.protocol.messages import Hello, Limits, Reads, VocabularyFacts
from dovetail.protocol.vocabulary import TokenTable

MAX_OPEN = 1024  # the most open sessions, each with its own cache; memory is the real bound


@dataclass(frozen=True)
class Identity:
    """What a draft worker registers with. Without a vocabulary it knows only the tokens that it is
    sent."""

    name: str
    model: str
    device: str
    threads: int
    context: int
    vocabulary: VocabularyFacts | None = None
    table: TokenTable | None = None
    weights: str = ""
    curves: Sequence[ContextCurve] = ()
    """The cost of a level of its tree, from this machine's profile file."""
    kept_tokens: int = 0  # the number of tokens of ended sessions whose rows it can keep
    together: int = 1  # the most sessions that it drafts for in one pass
    kept_beside: int = 0  # tokens by which each session counts more, for its recurrent states

    def hello(self, epoch: int, *, reads: Reads | None, prompt_rows: int, shares: bool) -> Hello:
        """Return the registration. `reads`: the features that it reads; `prompt_rows`: the chunk
        size of prefill, 0 if prompts are read whole; `shares`: whether sessions may start from rows
        of others."""
        return Hello(
            epoch=epoch,
            roles=("draft",),
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=self.model,
            device=self.device,
            weights=self.weights,
            threads=self.threads,
            limits=Limits(
                context=self.context,
                sessions=MAX_OPEN,
                kept=self.kept_tokens,
                prompt_rows=prompt_rows,
                together=self.together,
                shares=shares and bool(self.kept_tokens),
            ),
            vocabulary=self.vocabulary,
            table=None if self.table is None else Array.of(self.table.packed),
            reads=reads,
            cores=tuple(sorted(os.sched_getaffinity(0))) if self.device == "cpu" else (),
            curves=tuple(self.curves),
        )
