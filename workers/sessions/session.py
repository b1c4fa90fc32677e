"""The state of a session of the target."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dovetail.protocol.messages import Reads, TokenLogprobs
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.workers.models.segment import Cache
from dovetail.workers.sessions.blocks import Chain, Source
from dovetail.workers.sessions.features import HeldFeatures, places_of
from dovetail.workers.sessions.logprobs import token_logprobs
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.sampling import LookingBack


@dataclass
class TargetSession:
    """One sequence that the target verifies."""

    log: list[int]
    """The prompt and every committed token; the last one is the root and has no row in the
    cache."""
    cache: Cache
    capacity: int
    sampling: Sampling
    tree: TreeSettings
    key: bytes
    noise: NoiseCache | None  # None: greedy, or not coupled
    looking_back: LookingBack | None  # processors that look back at earlier tokens, if any
    reads: Reads | None  # the features of this target that the session's draft reads
    logprobs: int | None
    """How many alternatives each token's log-probabilities include; None: no log-probabilities."""
    round: int = 0
    own: int = 0  # slots of the cache that verification writes to; later ones belong to the draft
    chain: Chain | None = None  # the stored blocks of its rows; None: they are not stored
    restored: Source = ""  # where the first rows came from, if from stored blocks
    held: HeldFeatures = field(default_factory=HeldFeatures)
    """Features of verdicts that are held back."""

    @property
    def places(self) -> Sequence[int]:
        """The layers whose states the draft reads."""
        return places_of(self.reads)

    def scores(
        self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int]
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of the `tokens` that follow some rows of logits [M, V], if
        requested."""
        if self.logprobs is None:
            return ()
        return token_logprobs([logits[row] for row in rows], tokens, self.logprobs)

    def store_rows(self) -> None:
        """Store the blocks of its rows that are not stored yet, if they are to be."""
        if self.chain is not None:
            self.chain.extend(self.log, self.cache, self.cache.length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self.log += tokens
        if self.looking_back is not None:
            self.looking_back.extend(tokens)
