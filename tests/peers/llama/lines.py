"""Questions and answers of a process that is asked line by line. Standard library only."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Question:
    """A reply that is asked for, one line of JSON."""

    tokens: Sequence[int]
    """The prompt."""
    max_tokens: int
    ends: Sequence[int]
    """The tokens that end a reply."""
    sampling: Mapping[str, Any]
    """temp, top_k, top_p and min_p."""
    seed: int
    threads: int


def answer(said: TextIO, decode: Callable[[Question], Mapping[str, Any]]) -> None:
    """Answer each line of standard input until it ends.

    An answer has the tokens of the reply, when it began, and for each pass [when it ended, tokens
    that it committed, rows, nanoseconds of the pass].
    """
    for line in sys.stdin:
        try:
            told = decode(Question(**json.loads(line)))
        except Exception as error:  # told to whoever asked
            told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps(told), file=said, flush=True)
