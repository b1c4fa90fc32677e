"""llama.cpp's side: a model written as GGUF in one of its own types, and passes of its engine over
a cache of so many tokens.

Runs under a Python that has llama-cpp-python and gguf; of dovetail it imports only what runs there
too. Everything that is not named here is llama.cpp's default, the cache of 16-bit floats among it.
"""

import argparse
import ctypes
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.child import obey, timed
from peers.llama.conversion import write_once
from peers.llama.generation import keep_silent

FILLED = 1024
"""Cached tokens that are computed; those behind them have the same keys and values, rotated on."""


class Engine:
    """One sequence in a context of llama.cpp."""

    def __init__(self, file: Path, *, capacity: int, threads: int, flash_attention: bool) -> None:
        llama_cpp.llama_backend_init()
        model_options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_options)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = math.ceil(capacity / 256) * 256
        options.n_batch = max(options.n_batch, capacity)
        options.n_seq_max, options.kv_unified = 2, True
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash_attention)
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {capacity} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(capacity, 0, 1)
        self.length = 0
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )

    def decode(self, tokens: list[int], start: int, *, all_rows: bool) -> None:
        """A pass over `tokens` at positions start, start+1, ...; logits of all rows, or of the last
        one alone."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, start + row, 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = all_rows
        batch.logits[len(tokens) - 1] = True
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode answers {code}")
        llama_cpp.llama_synchronize(self._context)
        self.length = start + len(tokens)

    def fill(self, context: int) -> None:
        """Have so many cached tokens: copies of the first ones, one behind the other, in a moment
        where a prefill would take an hour."""
        self.forget(0)
        first = min(context, FILLED)
        self.decode(_tokens(first, self.vocabulary), 0, all_rows=False)
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        kept = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, kept, size, 0)
        for start in range(first, context, first):
            if not llama_cpp.llama_state_seq_set_data(self._context, kept, size, 1):
                raise RuntimeError("llama.cpp does not take the state of a sequence")
            llama_cpp.llama_memory_seq_add(self._memory, 1, 0, -1, start)
            llama_cpp.llama_memory_seq_cp(self._memory, 1, 0, 0, -1)
            llama_cpp.llama_memory_seq_rm(self._memory, 1, 0, -1)
        self.forget(context)

    def logits(self, rows: int) -> Any:
        """Those of the last pass, [rows, V]."""
        return np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (rows, self.vocabulary)
        ).copy()

    def forget(self, start: int) -> None:
        """Free the cache from position `start` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, start, -1)
        self.length = start


def quantize(source: Path, kind: str, file: Path) -> None:
    """Write the model of a GGUF file with matrices of a type as llama.cpp's own quantizer does."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(
        str(source).encode(), str(file).encode(), ctypes.byref(options)
    ):
        raise RuntimeError(f"llama.cpp does not write {source} as {kind}")


def prepare(
    source: Path,
    kind: str,
    file: Path,
    *,
    capacity: int,
    context: int,
    threads: int,
    flash_attention: bool,
) -> tuple[Any, Any]:
    """A greeting, and what this side can do: a pass of so many rows behind `context` cached tokens,
    a prefill, the logits of a text. A file that is not there is written from `source`, the folder
    of a checkpoint or another GGUF file."""
    if source.is_dir():
        write_once(source, kind, file)
    elif not file.exists():
        quantize(source, kind, file)
    engine = Engine(file, capacity=capacity, threads=threads, flash_attention=flash_attention)

    def verify(rows: int) -> Mapping[str, Any]:
        if engine.length != context:
            engine.fill(context)
        tokens = _tokens(rows, engine.vocabulary)
        seconds = timed(lambda: engine.decode(tokens, context, all_rows=True))
        engine.forget(context)
        return seconds

    def prefill(rows: int) -> Mapping[str, Any]:
        """All rows' logits are asked for: else the last layer's MLP is computed for one row alone,
        most of the work where a model has so few layers."""
        engine.forget(0)
        tokens = _tokens(rows, engine.vocabulary)
        return timed(lambda: engine.decode(tokens, 0, all_rows=True))

    def logits(tokens: list[int], out: str) -> Mapping[str, Any]:
        engine.forget(0)
        engine.decode(tokens, 0, all_rows=True)
        np.save(out, engine.logits(len(tokens)))
        return {}

    can: dict[str, Callable[..., Mapping[str, Any]]] = {
        "verify": verify,
        "prefill": prefill,
        "logits": logits,
    }
    system = llama_cpp.llama_print_system_info().decode().strip()
    return {
        "engine": f"llama-cpp-python {llama_cpp.__version__}",
        "system": system,
        "bytes": llama_cpp.llama_model_size(engine._model),
    }, can


def _tokens(count: int, vocabulary: int) -> list[int]:
    return [(7 * i + 3) % vocabulary for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("kind")
    parser.add_argument("file", type=Path)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--flash-attention", action="store_true")
    arguments = parser.parse_args()
    _silence = keep_silent()
    obey(lambda: prepare(**vars(arguments)))


if __name__ == "__main__":
    main()
