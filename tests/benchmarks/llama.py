"""llama.cpp's side: a Llama checkpoint written as GGUF in one of its own types, and passes of its engine over a cache of so many tokens.

Runs under a Python that has llama-cpp-python and gguf; imports neither torch nor dovetail. Everything that is not named here is llama.cpp's default,
the cache of 16-bit floats among it.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.child import obey, timed

TYPES = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A tensor's name in a Llama checkpoint of transformers -> in GGUF (there within blk.N)."""


# -- the model as GGUF -------------------------------------------------------------------------------------------------------------------------


def write_gguf(folder: Path, kind: str, file: Path) -> None:
    """The Llama checkpoint in `folder` with matrices of type `kind`; norms stay fp32, as llama.cpp's own tools leave them."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    _describe(writer, config, TYPES[kind][1])
    for name, values in (tensor for shard in sorted(folder.glob("*.safetensors")) for tensor in _tensors(shard)):
        for projection, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
            values = _interleave(values, heads) if projection in name else values
        kept = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else TYPES[kind][0]
        writer.add_tensor(_translate(name), gguf.quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: Mapping[str, Any], file_type: gguf.LlamaFileType) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(file_type)


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a safetensors file as fp32; numpy knows no bf16, so the header (JSON behind its length) is read by hand."""
    content = np.memmap(file, mode="r", dtype=np.uint8)
    size = int(content[:8].view("<u8")[0])
    for name, entry in json.loads(bytes(content[8 : 8 + size])).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            yield name, _as_fp32(content[8 + size + start : 8 + size + stop], entry["dtype"]).reshape(entry["shape"])


def _as_fp32(raw: Any, dtype: str) -> Any:
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def _interleave(weight: Any, heads: int) -> Any:
    """llama.cpp rotates neighbouring outputs of a Llama, transformers those half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _translate(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


# -- its engine --------------------------------------------------------------------------------------------------------------------------------


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
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash_attention)
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {capacity} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(capacity, 0, 1)
        self.length = 0
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def decode(self, tokens: list[int], start: int, *, all_rows: bool) -> None:
        """A pass over `tokens` at positions start, start+1, ...; logits of all rows, or of the last one alone."""
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

    def logits(self, rows: int) -> Any:
        """Those of the last pass, [rows, V]."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (rows, self.vocabulary)).copy()

    def forget(self, start: int) -> None:
        """Free the cache from position `start` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, start, -1)
        self.length = start


def prepare(folder: Path, kind: str, file: Path, *, capacity: int, context: int, threads: int, flash_attention: bool) -> tuple[Any, Any]:
    """A greeting, and what this side can do: a pass of so many rows behind `context` cached tokens, a prefill, the logits of a text."""
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        write_gguf(folder, kind, unfinished)
        unfinished.rename(file)
    engine = Engine(file, capacity=capacity, threads=threads, flash_attention=flash_attention)

    def verify(rows: int) -> Mapping[str, Any]:
        if engine.length != context:
            engine.forget(0)
            engine.decode(_tokens(context, engine.vocabulary), 0, all_rows=False)
        tokens = _tokens(rows, engine.vocabulary)
        seconds = timed(lambda: engine.decode(tokens, context, all_rows=True))
        engine.forget(context)
        return seconds

    def prefill(rows: int) -> Mapping[str, Any]:
        """All rows' logits are asked for: else the last layer's MLP is computed for one row alone, most of the work where a model has so few layers."""
        engine.forget(0)
        tokens = _tokens(rows, engine.vocabulary)
        return timed(lambda: engine.decode(tokens, 0, all_rows=True))

    def logits(tokens: list[int], out: str) -> Mapping[str, Any]:
        engine.forget(0)
        engine.decode(tokens, 0, all_rows=True)
        np.save(out, engine.logits(len(tokens)))
        return {}

    can: dict[str, Callable[..., Mapping[str, Any]]] = {"verify": verify, "prefill": prefill, "logits": logits}
    system = llama_cpp.llama_print_system_info().decode().strip()
    return {"engine": f"llama-cpp-python {llama_cpp.__version__}", "system": system, "bytes": llama_cpp.llama_model_size(engine._model)}, can


def _tokens(count: int, vocabulary: int) -> list[int]:
    return [(7 * i + 3) % vocabulary for i in range(count)]


def _keep_silent() -> Any:
    """Only what llama.cpp holds for a warning or an error is printed; the object has to live as long as the engine."""

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _: Any) -> None:
        if level in (3, 4) and b"dummy tokens" not in text:
            print(text.decode(errors="replace"), end="")

    llama_cpp.llama_log_set(log, None)
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=TYPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--flash-attention", action="store_true")
    arguments = parser.parse_args()
    _silence = _keep_silent()
    obey(lambda: prepare(**vars(arguments)))


if __name__ == "__main__":
    main()
