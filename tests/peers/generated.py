"""A reply of another engine: its tokens, and what each pass of its target was. Numbers alone; knows
no engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One pass of the target: what it committed, what it looked at, and when that was over."""

    ended_ns: int
    committed: int
    rows: int
    """Rows of the pass: in the first round the prompt's too."""
    pass_ns: int


@dataclass(frozen=True)
class Generated:
    """A reply. The first round computes the prompt too."""

    tokens: tuple[int, ...]
    began_ns: int
    rounds: tuple[Round, ...]
