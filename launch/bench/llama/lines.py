"""Answers lines of JSON with lines of JSON. Standard library only."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO


def answer(said: TextIO, decode: Callable[..., Mapping[str, Any]]) -> None:
    """Answer each line of standard input until it ends."""
    for line in sys.stdin:
        try:
            told = decode(**json.loads(line))
        except Exception as error:  # told to whoever asked
            told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps(told), file=said, flush=True)
