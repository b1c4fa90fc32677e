"""A side of `loads --before`: a stack of one installation, which decodes streams when a line of
JSON asks for them.

    python -m benchmarks.streams_side WEIGHTS DRAFT INFLATE TOKENS TEMPERATURE PROMPTS
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.child import obey
from benchmarks.loads import Streams, running
from dovetail.launch.bench.methods import read_prompt_set

STACK = ExitStack()


def prepare() -> tuple[Mapping[str, Any], Mapping[str, Callable[..., Mapping[str, Any]]]]:
    """Start the stack."""
    weights, draft, inflate, tokens, temperature, prompts = sys.argv[1:]
    texts = [prompt.turns[0] for prompt in read_prompt_set(Path(prompts), None).prompts]
    client = STACK.enter_context(running(weights, draft, inflate))
    streams = Streams(client, texts, int(tokens), float(temperature))

    def run(method: str, count: int, turn: int) -> Mapping[str, Any]:
        burst = streams.run(method, count, turn)
        replies = json.dumps(burst.replies)
        return {
            "rate": burst.rate,
            "drafted": burst.drafted,
            "tau": burst.tau,
            "replies": hashlib.sha256(replies.encode()).hexdigest(),
        }

    return {}, {"run": run}


if __name__ == "__main__":
    with STACK:
        obey(prepare)
