"""Measures how a large mixture of experts is loaded: seconds and peak memory, beside what its file
and its packed weights allow.

    python tests/measures/mixture.py [--weights int8] [--weights half] [--layers N] [--folder F]

The checkpoint is written first, unless it is there: random bf16 weights in the shape of
Qwen3-30B-A3B with a smaller vocabulary, 1.25 GB a layer, 7.7 GB with the six layers that it has
unless told. Each type of weights is loaded in a process of its own, after the files have been
dropped from the page cache. Two bounds: peak memory at most 1.1 times the packed weights, above
what the process held before; seconds at most 1.5 times those of one read of the files, which is
timed in the same way, and of packing them at 1 GB/s a core. A first start also digests the files,
which is timed by itself. Times are of this machine at this hour; nothing else should run on it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "hidden_act": "silu",
    "vocab_size": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "dtype": "bfloat16",
}
MEMORY, TIME = 1.1, 1.5
PACKING_BYTES_S = 1e9
BLOCK_BYTES = 8 << 20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""proc(5): sets VmHWM back to what is resident now."""


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint, a file for each layer and one for the rest."""
    import torch
    from safetensors.torch import save_file

    from support.models import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    hidden, units, experts = (
        config[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    heads, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    generator, where = torch.Generator().manual_seed(0), {}

    def random(rows: int, columns: int) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=generator)
        return (numbers / columns**0.5).bfloat16()

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    for layer in range(config["num_hidden_layers"]):
        at, tensors = f"model.layers.{layer}", dict[str, torch.Tensor]()
        for name, shape in (
            ("self_attn.q_proj", (heads, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, heads)),
            ("mlp.gate", (experts, hidden)),
        ):
            tensors[f"{at}.{name}.weight"] = random(*shape)
        for name, width in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", config["head_dim"]),
            ("self_attn.k_norm", config["head_dim"]),
        ):
            tensors[f"{at}.{name}.weight"] = ones(width)
        for expert in range(experts):
            one = f"{at}.mlp.experts.{expert}"
            tensors[f"{one}.gate_proj.weight"] = random(units, hidden)
            tensors[f"{one}.up_proj.weight"] = random(units, hidden)
            tensors[f"{one}.down_proj.weight"] = random(hidden, units)
        save(f"model-{layer + 1:05d}.safetensors", tensors)
    rest = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "lm_head.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    save("model-00000.safetensors", rest)
    write_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forget(folder: Path) -> None:
    """Drop the weight files from the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            os.fsync(content.fileno())
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Return the seconds of one read of the weight files, block by block."""
    began, block = time.perf_counter(), memoryview(bytearray(BLOCK_BYTES))
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as content:
            while content.readinto(block):
                pass
    return time.perf_counter() - began


def memory(field: str) -> int:
    """Return bytes that this process has, by a field of /proc/self/status."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def load(folder: Path, weights: str, warm_up: Path) -> dict[str, float]:
    """Load in this process: seconds of digests, seconds of a later start, and memory of both."""
    from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
    from dovetail.workers.models.loading import load_language_model

    load_language_model(str(warm_up), weights=weights, device="cpu", backend="kernels")
    forget(folder)
    began = time.perf_counter()
    open_checkpoint(str(folder))
    digested = time.perf_counter() - began
    forget(folder)
    before = memory("VmRSS")
    CLEAR.write_text(RESET_PEAK)
    began = time.perf_counter()
    model = load_language_model(str(folder), weights=weights, device="cpu", backend="kernels")
    return {
        "digested": digested,
        "seconds": time.perf_counter() - began,
        "peak": memory("VmHWM") - before,
        "packed": packed_bytes(model.back_end),
    }


def packed_bytes(back_end: Any) -> int:
    """Return the bytes of a model's packed matrices, and of its table of embeddings."""
    matrices = [back_end._head._matrix]
    for layer in back_end._layers:
        matrices += layer.plan.matrices
        if (experts := layer.plan.experts) is not None:
            matrices += [experts.router.logits, *experts.gate_up, *experts.down]
    table = back_end._model.get_input_embeddings().weight
    return sum(matrix.nbytes for matrix in matrices) + table.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--weights", action="append", choices=("int8", "half", "fp32"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="Where the checkpoint is, or is to be kept.")
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sys.path[0] = str(ROOT / "tests")
    if asked.load:
        folder, weights, warm_up = asked.load
        print(json.dumps(load(Path(folder), weights, Path(warm_up))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch) / "mixture"
        warm_up = Path(scratch) / "small"
        if not (folder / "model.safetensors.index.json").exists():
            write(folder, CONFIG | {"num_hidden_layers": asked.layers})
        write(warm_up, CONFIG | {"num_hidden_layers": 1, "num_experts": 16})
        measure(folder, warm_up, asked.weights or ["int8", "half"])


def measure(folder: Path, warm_up: Path, kinds: list[str]) -> None:
    """Print a line for each type of weights."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    cores = len(os.sched_getaffinity(0))
    for weights in kinds:
        forget(folder)
        once = read(folder)
        command = [sys.executable, __file__, "--load", str(folder), weights, str(warm_up)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        bound = TIME * (once + size / PACKING_BYTES_S / cores)
        ratio = found["peak"] / found["packed"]
        print(
            f"{weights}: file {size / 1e9:.2f} GB read in {once:.1f} s, packed "
            f"{found['packed'] / 1e9:.2f} GB; digest {found['digested']:.1f} s, loaded in "
            f"{found['seconds']:.1f} s (bound {bound:.1f}), peak {found['peak'] / 1e9:.2f} GB, "
            f"{ratio:.3f} of packed (bound {MEMORY})"
        )


if __name__ == "__main__":
    main()
