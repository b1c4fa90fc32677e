"""How much runs at once on a session's workers. Pure: counts in, words out."""

from typing import NamedTuple


class Load(NamedTuple):
    """How many sessions run on a session's workers, itself counted: beyond their prompts, and not
    waiting for a target."""

    target: int = 1
    """On its target: each has a row in a pass at least."""
    draft: int = 1
    """On its draft, which serves one after the other."""

    @property
    def alone(self) -> bool:
        """Whether nobody else is in the session's way."""
        return self.target <= 1 and self.draft <= 1

    @property
    def level(self) -> tuple[int, int]:
        """Loads of one level are taken to be alike: 1, 2, 3 and 4, 5 to 8, 9 to 16, ..."""
        return (self.target - 1).bit_length(), (self.draft - 1).bit_length()

    def __str__(self) -> str:
        return f"{self.target} sessions on the target, {self.draft} on the draft"


ALONE = Load()
