"""A draft worker's description of itself."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.protocol.arrays import Array
from dovetail.protocol.calibration import ContextCurve
from dovetail.protocol.messages import Hello, Limits, Reads, VocabularyFacts
from dovetail.protocol.vocabulary import TokenTable

MAX_OPEN = 1024
"""The most sessions held at a time, each with its own cache; memory is the real bound."""


@dataclass(frozen=True)
class Identity:
    """The description that a draft worker gives of itself. Without a vocabulary it knows no other
    tokens than it is sent."""

    name: str
    model: str
    device: str
    threads: int
    context: int
    vocabulary: VocabularyFacts | None = None
    table: TokenTable | None = None
    weights: str = ""
    curves: Sequence[ContextCurve] = ()
    """The cost of a level of its tree, as the machine's profile file has it."""
    kept_tokens: int = 0
    """Tokens of ended sessions whose rows it keeps."""
    together: int = 1
    """The most sessions that it serves in shared passes; 1: there are no such passes."""
    kept_beside: int = 0
    """Additional tokens that each session counts as, for its states."""

    def hello(self, epoch: int, *, reads: Reads | None, prompt_rows: int, shares: bool) -> Hello:
        """Return the introduction of an incarnation. `reads`: the features that it reads;
        `prompt_rows`: the rows of a chunk of a prompt, 0 if it reads prompts whole; `shares`:
        whether sessions may begin with rows of others."""
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
