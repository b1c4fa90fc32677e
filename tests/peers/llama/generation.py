"""The process: llama-cpp-python's own `Llama` decodes what it is asked for, line by line, with or
without its own prompt lookup.

Runs under a Python that has llama-cpp-python and gguf. Nothing of ours takes part in decoding: the
package's loop, its sampling and its rule of acceptance as they come. What is not named here is its
default, the cache of 16-bit floats among it. A line of JSON asks, a line of JSON answers.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from peers.llama.conversion import write_once
from peers.llama.lines import Question, answer

CONTEXT_STEP = 512
"""A context has room for a multiple of so many tokens: as much as the longest reply so far
needed."""
CACHES = {"f16": 1, "f32": 0}
"""Numbers of ggml's types."""
WARNING, ERROR = 3, 4
SEEDS = (1 << 32) - 1
"""llama.cpp takes the largest number of 32 bits for a wish to choose a seed itself."""


class Watched(llama_cpp.Llama):  # type: ignore[misc]  # untyped library
    """Notes every pass: its rows, and how long it took."""

    passes: list[tuple[int, int]]

    def eval(self, tokens: Sequence[int]) -> None:
        began = time.monotonic_ns()
        super().eval(tokens)
        llama_cpp.llama_synchronize(self.ctx)
        self.passes.append((len(tokens), time.monotonic_ns() - began))


class Decoder:
    """A model in a context that grows with what is asked for."""

    def __init__(self, file: Path, *, cache: str, lookup: int) -> None:
        """`lookup`: tokens that prompt lookup proposes at a time; 0: none is used."""
        self._file, self._cache, self._lookup = file, CACHES[cache], lookup
        self._room = CONTEXT_STEP
        self._llama = self._load()

    def decode(self, asked: Question) -> Mapping[str, Any]:
        """Return one reply as `lines.answer` tells it."""
        self._make_room(len(asked.tokens) + asked.max_tokens)
        llama_cpp.llama_set_n_threads(self._llama.ctx, asked.threads, asked.threads)
        self._llama.set_seed(asked.seed % SEEDS)
        self._llama.reset()
        self._llama.passes = []
        made: list[int] = []
        committed: list[int] = []
        ended: list[int] = []
        began = time.monotonic_ns()
        for token in self._llama.generate(
            list(asked.tokens), repeat_penalty=1.0, typical_p=1.0, **asked.sampling
        ):
            made.append(token)
            if len(self._llama.passes) > len(committed):
                committed.append(0)
                ended.append(0)
            committed[-1] += 1
            ended[-1] = time.monotonic_ns()
            if token in asked.ends or len(made) == asked.max_tokens:
                break
        rounds = [
            (at, count, rows, pass_ns)
            for at, count, (rows, pass_ns) in zip(ended, committed, self._llama.passes, strict=True)
        ]
        return {"tokens": made, "began_ns": began, "rounds": rounds}

    def close(self) -> None:
        """Free the model, while there is somebody to hear what llama.cpp logs."""
        self._llama.close()

    def _make_room(self, tokens: int) -> None:
        if tokens > self._room:
            self._room = -(-tokens // CONTEXT_STEP) * CONTEXT_STEP
            self._llama.close()
            self._llama = self._load()

    def _load(self) -> Watched:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=self._lookup) if self._lookup else None
        return Watched(
            str(self._file),
            n_ctx=self._room,
            type_k=self._cache,
            type_v=self._cache,
            draft_model=draft,
            verbose=False,
        )


def keep_silent() -> Any:
    """Only what llama.cpp holds for a warning or an error is printed; the object has to live as
    long as the engine."""

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # untyped library
    def log(level: int, text: bytes, _: Any) -> None:
        if level in (WARNING, ERROR) and b"dummy tokens" not in text:
            print(text.decode(errors="replace"), end="", file=sys.stderr)

    llama_cpp.llama_log_set(log, None)
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("file", type=Path)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--cache", choices=CACHES, required=True)
    parser.add_argument("--lookup", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    asked = parser.parse_args()
    end_with(asked.parent)
    end_when_told()
    said = claim_stdout()
    os.sched_setaffinity(0, [int(core) for core in asked.cores.split(",")])
    _silence = keep_silent()
    write_once(asked.folder, asked.kind, asked.file)
    decoder = Decoder(asked.file, cache=asked.cache, lookup=asked.lookup)
    print(
        json.dumps({"engine": f"llama-cpp-python {llama_cpp.__version__}"}), file=said, flush=True
    )
    try:
        answer(said, decoder.decode)
    finally:
        decoder.close()


if __name__ == "__main__":
    main()
