"""Checkpoints written as GGUF files by the `gguf` package, as llama.cpp's converter would, and the
checkpoint of the same numbers in safetensors. Names are the package's; blocks of codes are random,
and what they stand for is what the package says."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from support.gguf_facts import EXPERT_COUNTS, facts_of, first_of, layers_of

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "granite": "granite",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "olmoe": "olmoe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gpt_oss": "gpt-oss",
    "starcoder2": "starcoder2",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "seed_oss": "seed_oss",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "arcee": "arcee",
    "exaone4": "exaone4",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "jais2": "jais2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    "minicpm3": "minicpm3",
    "kimi_linear": "kimi-linear",
    "youtu": "deepseek2",
    "afmoe": "afmoe",
    "apertus": "apertus",
    "cohere": "command-r",
    "exaone": "exaone",
    "glm": "chatglm",
    "exaone_moe": "exaone-moe",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granite_swa",
    "hy_v3": "hy_v3",
    "mellum": "mellum",
}
"""transformers' model types, and llama.cpp's architectures."""
SWA_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}
"""Tensors of Granite with windows, whose files have the shared MLP as in the checkpoint."""
PERMUTED = (
    *("llama", "mistral", "mixtral", "granite", "granitemoe", "smollm3", "ministral3", "arcee"),
    *("granitemoehybrid", "bamba", "nemotron_h", "olmo", "granite_swa", "granitemoe_swa"),
    "granitemoeshared",
)
"""Model types of which files have rows next to each other that are rotated together."""
BARE = re.compile(r"(e_score_correction|expert_bias)(?:_bias)?$")
"""Names of corrections, which have the end of a bias in files."""
SAME_NAMES = {"granite_swa": "granitehybrid", "hy_v3": "dots1", "mellum": "qwen3moe"}
"""Architectures that the package does not know -> others with the same names."""
OWN_NAMES = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
"""Tensors of layers whose names the package does not know -> their names in files."""
HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
    **dict.fromkeys((Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S), (0,)),
}
"""Offsets of the 16-bit scales in a block, in bytes."""
BLOCKED = (*(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0), Type.MXFP4, *HALVES)
PLAIN = (Type.F32, Type.F16, Type.BF16)
LARGEST_CODES = {Type.Q6_K: 4096, Type.Q5_K: 2048, Type.Q4_K: 1024}
"""About the largest number that codes and inner scales give; of other types less."""

Kinds = Callable[[str, tuple[int, ...]], Type]


def write_gguf(
    folder: Path,
    file: Path,
    kinds: Kinds,
    *,
    extra: Mapping[str, np.ndarray] | None = None,
    whole_latents: bool = False,
    architecture: str | None = None,
    without: Sequence[str] = (),
    fused: bool = False,
    **more: Any,
) -> Path:
    """Write the checkpoint of a folder as a GGUF file whose tensors have the types that `kinds`
    returns for their names in it and their shapes; return a folder with the checkpoint of the same
    numbers, whose config.json is that of `folder`. `more`: keys to add or replace; None removes
    one. `extra`: fp32 tensors to add. `architecture`: one to use instead. `without`: parts of names
    of tensors that are left out. `fused`: queries, keys and values are one tensor."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    architecture = architecture or architecture_of(config)
    names = named(config, weights, whole_latents, architecture)
    writer = gguf.GGUFWriter(file, architecture)
    facts = {**facts_of(config, architecture), **_tokens(config), **_activations(weights), **more}
    for key, value in facts.items():
        if value is not None:
            _add(writer, key, value)
    seeds = np.random.default_rng(0)
    same = dict(weights)
    if fused or architecture == "bailingmoe2":
        names = _fused(names, weights)
    for name, (own, change) in names.items():
        whole = change(torch.arange(sum(weights[n].numel() for n in own)).double())
        numbers = change(torch.cat([weights[n].double().flatten() for n in own]))
        shift = 1.0 if _shifted(architecture, name) else 0.0
        kind = kinds(name, tuple(whole.shape)) if name.endswith(".weight") else Type.F32
        numbers_alone = ("ffn_gate_inp", "shortconv.conv", "conv1d", "ssm_norm", "altup", "laurel")
        exact = any(part in name for part in numbers_alone)
        kind = Type.F32 if whole.ndim < 2 or exact else kind
        decays = name.endswith("ssm_a")
        numbers = numbers.float().exp().neg() if decays else numbers
        data, found = coded(numbers.float().numpy() + shift, kind, seeds)
        if not any(part in name for part in without):
            writer.add_tensor(name, data, raw_dtype=kind)
        found = torch.from_numpy(found).neg().log().numpy() if decays else found
        flat = torch.cat([same[n].float().flatten() for n in own])
        flat[whole.long().flatten()] = torch.from_numpy(found).flatten() - shift
        first = 0
        for n in own:
            count = weights[n].numel()
            same[n] = flat[first : first + count].view(weights[n].shape).clone()
            first += count
    beside = {**(extra or {}), **_proportions(config)}
    for name, numbers_beside in beside.items():
        writer.add_tensor(name, numbers_beside)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin = file.with_suffix(".twin")
    shutil.copytree(folder, twin)
    save_file(same, twin / "model.safetensors", metadata={"format": "pt"})
    return twin


def _activations(weights: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the parameters of Apertus's activations, which files have as lists under keys."""
    found: dict[str, list[float]] = {}
    for name in sorted(name for name in weights if ".act_fn." in name):
        found.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(float(weights[name]))
    return found


def _proportions(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the divisors of rotary frequencies that Gemma 4's files have for full attention."""
    if config["model_type"] != "gemma4_text":
        return {}
    half = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(half * share)
    return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)}


def architecture_of(config: Mapping[str, Any]) -> str:
    """llama.cpp's architecture of a configuration."""
    sparse = "moe" in config.get("layers_block_type", ())
    return ARCHITECTURES[config["model_type"]] + ("_moe" if sparse else "")


def coded(numbers: np.ndarray, kind: Type, seeds: np.random.Generator) -> tuple[np.ndarray, Any]:
    """The bytes of numbers as a type, and what these stand for; types that the package does not
    write are of random codes."""
    if kind in (*PLAIN, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0):
        data = gguf.quants.quantize(numbers, kind)
        return data, gguf.quants.dequantize(data, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = seeds.integers(0, 256, (numbers.size // block, size), dtype=np.uint8)
    largest = 4 * float(numbers.std()) / LARGEST_CODES.get(kind, 128)
    for place in HALVES.get(kind, ()):
        scales = seeds.uniform(0.5, 1, len(data)).astype(np.float32) * largest
        data[:, place : place + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind == Type.MXFP4:
        data[:, 0] = seeds.integers(121, 125, len(data))
    found = gguf.quants.dequantize(data, kind).reshape(numbers.shape)
    return data.reshape(*numbers.shape[:-1], -1), found


def named(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    whole_latents: bool,
    architecture: str,
) -> dict[str, tuple[Sequence[str], Callable[[torch.Tensor], torch.Tensor]]]:
    """Return by the name of each tensor of the file the checkpoint's tensors that it is made of,
    and how it is made of their numbers behind each other."""
    layers = layers_of(config)
    known_as = SAME_NAMES.get(architecture, architecture)
    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == known_as)
    table = gguf.get_tensor_name_map(arch, layers)
    apart = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)  # before `_fused`
    tied = config.get("tie_word_embeddings", config["model_type"] == "gpt2")
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        if (name == "lm_head.weight" and tied) or ".act_fn." in name:
            continue
        shape = tuple(tensor.shape)
        if ".altup_" in name:  # linears of a list, which are one tensor
            stem, number, _ = name.rsplit(".", 2)
            own = [f"{stem}.{i}.weight" for i in range(config["altup_num_inputs"] - 1)]
            if number == "0":
                found[table.get_name(f"{stem}.weight", (".weight",))] = own, _shaped((-1, *shape))
            continue
        layer = next((f"blk.{part}" for part in name.split(".") if part.isdecimal()), "")
        if (rest := name.rpartition(f"{layer[4:]}.")[2]) in OWN_NAMES:
            found[f"{layer}.{OWN_NAMES[rest]}"] = [name], _shaped(shape)
        elif architecture == "granite_swa" and rest in SWA_NAMES:
            found[f"{layer}.{SWA_NAMES[rest]}"] = [name], _shaped(shape)
        elif (halves := _apart(config, layer, rest, shape)) is not None:
            found |= {own: ([name], change) for own, change in halves.items()}
        elif ".experts." in name and config["model_type"] == "gpt_oss":
            found.update(_gpt_oss_experts(table, name, shape))
        elif ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            number, _, rest = rest.partition(".")
            if number == "0":
                count = first_of(config, *EXPERT_COUNTS)
                own = [f"{stem}.experts.{i}.{rest}" for i in range(count)]
                instead = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
                part = instead.get(rest.split(".")[0], rest.split(".")[0])
                mlp = stem.replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
                mlp = re.sub(r"backbone(.*)mixer$", r"model\1mlp", mlp)
                file_name = table.get_name(f"{mlp}.experts.{part}.weight", (".weight",))
                found[file_name] = own, _shaped((count, *shape))
        elif name.endswith("kv_b_proj.weight") and not whole_latents and architecture != "minicpm3":
            found.update(_latents_apart(table, config, name, shape))
        elif name.endswith("moe.input_linear.weight"):
            found.update(_merged_experts(name.split(".")[2], name, shape))
        else:
            in_file = BARE.sub(r"\1.bias", f"{name}.weight" if name.endswith(".sinks") else name)
            in_file = in_file.replace(".dt_bias", ".dt_proj.bias")
            known = table.get_name(in_file, (".weight", ".bias"))
            dense = in_file.replace("block_sparse_moe", "mlp")
            known = known or apart.get_name(dense, (".weight", ".bias"))
            assert known is not None, name
            if architecture == "hy_v3":
                known = known.removesuffix(".bias")
            found[known] = [name], _changed(config, name, shape)
    return found


def _fused(names: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Fuse the queries, keys and values of a layer, as the converter does with --fuse-qkv."""
    found = dict(names)
    for query in [name for name in names if ".attn_q." in name]:
        parts = [found.pop(query.replace("attn_q.", f"attn_{part}.")) for part in "qkv"]
        own = [name for names_of_part, _ in parts for name in names_of_part]
        sizes = [weights[name].numel() for name in own]
        changes = [change for _, change in parts]

        def joined(flat: torch.Tensor, changes: Any = changes, sizes: Any = sizes) -> torch.Tensor:
            pieces = zip(changes, flat.split(sizes), strict=True)
            return torch.cat([change(piece) for change, piece in pieces])

        found[query.replace("attn_q.", "attn_qkv.")] = own, joined
    return found


def _apart(
    config: Mapping[str, Any], layer: str, name: str, shape: tuple[int, ...]
) -> dict[str, Any] | None:
    """A tensor of a layer that files have as two or by another name, and how; None for others."""

    def rows(low: int, high: int) -> Any:
        return lambda flat: flat.view(shape)[low:high].contiguous()

    def turned(low: int, high: int) -> Any:
        return lambda flat: flat.view(shape).transpose(1, 2)[:, low:high].contiguous()

    if name == "shared_mlp.input_linear.weight":
        end, half = ("_shexp" if config["num_local_experts"] else ""), shape[0] // 2
        return {
            f"{layer}.ffn_gate{end}.weight": rows(0, half),
            f"{layer}.ffn_up{end}.weight": rows(half, shape[0]),
        }
    if name == "shared_mlp.output_linear.weight":
        end = "_shexp" if config["num_local_experts"] else ""
        return {f"{layer}.ffn_down{end}.weight": _shaped(shape)}
    if name == "linear_attn.in_proj_qkvz.weight":
        order, keys = _by_key_head(config)
        return {
            f"{layer}.attn_qkv.weight": lambda flat: flat.view(shape)[order[:keys]],
            f"{layer}.attn_gate.weight": lambda flat: flat.view(shape)[order[keys:]],
        }
    if name == "feed_forward.experts.gate_up_proj":
        half = shape[2] // 2
        return {
            f"{layer}.ffn_gate_exps.weight": turned(0, half),
            f"{layer}.ffn_up_exps.weight": turned(half, shape[2]),
        }
    if name == "feed_forward.experts.down_proj":
        return {f"{layer}.ffn_down_exps.weight": turned(0, shape[2])}
    stacks = {"experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps"}
    if name in stacks:
        return {f"{layer}.{stacks[name]}.weight": _shaped(shape)}
    return None


def _by_key_head(config: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the rows of queries, keys, values and gates in a matrix whose rows are grouped by key
    head, and how many of them come before the gates."""
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    places = torch.arange(heads * 2 * (width + each)).view(heads, -1)
    parts = [part.flatten() for part in places.split([width, width, each, each], dim=1)]
    return torch.cat(parts), heads * (2 * width + each)


def _changed(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    kind = config["model_type"]
    permuted = kind in PERMUTED
    if name.endswith((".A_log", ".D")) and ".self_attn." not in name and "linear" not in name:
        return _shaped((*shape, 1))
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return _shaped((config.get("mamba_n_groups") or config["n_groups"], -1))
    if ".query_key_value." in name:
        heads = config["num_attention_heads"]
        return lambda flat: (
            flat.view(heads, 3, -1, *shape[1:]).transpose(0, 1).reshape(shape).contiguous()
        )
    heads = config.get("num_attention_heads", 0)
    if permuted and ".q_proj." in name:
        return _permuted(shape, heads)
    if permuted and ".k_proj." in name:
        return _permuted(shape, config.get("num_key_value_heads", heads))
    if kind.startswith("qwen3_5_") and ".linear_attn." in name and "norm" not in name:
        return _tiled(config, name, tuple(count for count in shape if count > 1))
    if 1 in shape:  # as files have it that llama.cpp has quantised
        return lambda flat: flat.view([count for count in shape if count > 1])
    if kind == "gpt2" and len(shape) == 2 and ".h." in name:
        return lambda flat: flat.view(shape).t().contiguous()
    return _shaped(shape)


def _permuted(shape: tuple[int, ...], heads: int) -> Any:
    """llama.cpp's order of the rows of queries and keys."""
    return lambda flat: (
        flat.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def _tiled(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """llama.cpp's order of value heads: the first of each key head, then the second of each."""
    keys = config["linear_num_key_heads"]
    first = 2 * keys * config["linear_key_head_dim"]
    behind, inputs = any(part in name for part in ("qkv", "conv1d")), ".out_proj." in name

    def tiled(flat: torch.Tensor) -> torch.Tensor:
        whole = flat.view(shape).t() if inputs else flat.view(shape)
        others, own = whole.split([first, len(whole) - first]) if behind else (whole[:0], whole)
        each = config["linear_num_value_heads"] // keys
        heads = own.reshape(keys, each, -1, *own.shape[1:]).transpose(0, 1).reshape(own.shape)
        moved = torch.cat([others, heads])
        return (moved.t() if inputs else moved).contiguous()

    return tiled


def _shaped(shape: tuple[int, ...]) -> Any:
    return lambda flat: flat.view(shape)


def _merged_experts(layer: str, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Gate and up matrices of all experts, which are one tensor of the checkpoint."""
    return {
        f"blk.{layer}.ffn_{part}_exps.weight": (
            [name],
            lambda flat, index=index: flat.view(shape).chunk(2, dim=1)[index].contiguous(),
        )
        for index, part in enumerate(("gate", "up"))
    }


def _latents_apart(
    table: Any, config: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    """The matrix that makes keys of latents, its dimensions changed, and that of values."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]

    def part(flat: torch.Tensor, keys: bool) -> torch.Tensor:
        by_head = flat.view(heads, -1, shape[-1])
        found = by_head[:, :plain].transpose(1, 2) if keys else by_head[:, plain:]
        return found.contiguous()

    return {
        table.get_name(name.replace("kv_b_proj", own), (".weight",)): (
            [name],
            lambda flat, keys=keys: part(flat, keys),
        )
        for own, keys in (("k_b_proj", True), ("v_b_proj", False))
    }


def _gpt_oss_experts(table: Any, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    bias = name.endswith("_bias")
    end, stem = ("bias" if bias else "weight"), name.removesuffix("_bias")

    def turned(flat: torch.Tensor) -> torch.Tensor:
        found = flat.view(shape)
        return found if bias else found.transpose(1, 2)

    def known(part: str) -> str:
        old, new = part.split(">")
        wanted = f"{stem}.{end}".replace(old, new)
        return str(table.get_name(wanted, (".weight", ".bias")))

    if "down_proj" in stem:
        return {known("x>x"): ([name], lambda flat: turned(flat).contiguous())}
    return {
        known("gate_up_proj>gate_proj"): ([name], lambda flat: turned(flat)[:, ::2].contiguous()),
        known("gate_up_proj>up_proj"): ([name], lambda flat: turned(flat)[:, 1::2].contiguous()),
    }


def _shifted(architecture: str, name: str) -> bool:
    plus_one = architecture.startswith(("gemma", "qwen35", "qwen3next"))
    plus_one = plus_one and architecture not in ("gemma3n", "gemma4")
    if architecture == "nemotron":
        return "norm" in name and name.endswith(".weight")
    return plus_one and "norm" in name and "ssm_norm" not in name


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """A vocabulary of letters in GPT-2's spelling, with a begin and an end token."""
    size = config["vocab_size"]
    spelling = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 1024))
    letters = [chr(number) for number in spelling]
    tokens = ["<begin>", "<end>", *letters[: size - 3]]
    tokens.append(tokens[-2] + tokens[-1])
    control = [3, 3, *([1] * (size - 2))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": control,
        "tokenizer.ggml.merges": [f"{tokens[-3]} {tokens[-2]}"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def tokens_of(folder: Path) -> dict[str, Any]:
    """The facts of the byte-level tokenizer of a folder, which splits as GPT-2 does."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    special = {one["content"]: one["id"] for one in content["added_tokens"]}
    tokens = {index: token for token, index in {**vocabulary, **special}.items()}
    generation = json.loads((folder / "generation_config.json").read_text())
    return {
        "tokenizer.ggml.tokens": [tokens[index] for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [
            3 if tokens[index] in special else 1 for index in range(len(tokens))
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": generation["bos_token_id"],
        "tokenizer.ggml.eos_token_id": generation["eos_token_id"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
