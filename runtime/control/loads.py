"""The load: sessions that run at once on the same workers. Pure: counts in, words out."""

from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class Load:
    """Sessions on a session's workers, itself included, beyond prompts and with a target."""

    target: int = 1  # on its target, each with at least one row in a pass
    draft: int = 1  # on its draft
    alone: bool = field(init=False, repr=False)  # True if no other session runs on these workers
    level: tuple[int, int] = field(init=False, repr=False)
    """Loads of one level are treated alike: 1, 2, 3 and 4, 5 to 8, 9 to 16, ..."""

    def __post_init__(self) -> None:
        target, draft = self.target, self.draft
        object.__setattr__(self, "alone", target <= 1 and draft <= 1)
        object.__setattr__(self, "level", ((target - 1).bit_length(), (draft - 1).bit_length()))

    def __str__(self) -> str:
        return f"{self.target} sessions on the target, {self.draft} on the draft"


ALONE = Load()
load_of = cache(Load)  # returns the load of these counts, cached because every round needs it
