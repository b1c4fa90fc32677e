"""Keys of GGUF files that are missing, or that say something unusual, are taken as llama.cpp takes
them, or refused."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.configured import read_config
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.gguf.view import view_of
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from support.architectures import VARIED, write_tiny
from support.gguf_files import architecture_of, write_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(
    folder: Path, kind: str, facts: dict[str, Any], *, sizes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The configuration of a tiny file of which some keys of its architecture have other values, or
    are missing where these are None."""
    write_tiny(kind, folder / "model", **(sizes or {}))
    file = folder / "model.gguf"
    architecture = architecture_of(json.loads((folder / "model" / "config.json").read_text()))
    own = {
        key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}": value
        for key, value in facts.items()
    }
    write_gguf(folder / "model", file, lambda *_: Type.F32, **own)
    found: dict[str, Any] = json.loads((view_of(file) / "config.json").read_text())
    return found


@pytest.mark.parametrize("kind", ["glm4", "qwen3_next", "stablelm", "phi", "gpt_neox", "nemotron"])
def test_a_file_that_does_not_say_how_much_of_a_head_it_rotates_rotates_all(
    tmp_path: Path, kind: str
) -> None:
    """transformers rotates a share of its own where a configuration says none."""
    config = config_of(tmp_path, kind, {"rope.dimension_count": None})
    assert config["rope_parameters"]["partial_rotary_factor"] == 1.0


@pytest.mark.parametrize(
    ("kind", "facts", "field", "value"),
    [
        ("gemma4_text", {"final_logit_softcapping": None}, "final_logit_softcapping", 30.0),
        ("glm4_moe", {"expert_weights_norm": None}, "norm_topk_prob", False),
        ("dots1", {"expert_weights_norm": None}, "norm_topk_prob", False),
        ("nemotron_h", {"expert_weights_norm": None}, "norm_topk_prob", False),
        ("nemotron_h", {"attention.layer_norm_rms_epsilon": 0.5}, "layer_norm_epsilon", 0.5),
    ],
)
def test_what_a_file_does_not_say_is_what_llama_cpp_takes(
    tmp_path: Path, kind: str, facts: dict[str, Any], field: str, value: Any
) -> None:
    assert config_of(tmp_path, kind, facts, sizes=VARIED.get(kind))[field] == value


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 2048,
}


@pytest.mark.parametrize("original", [256, None])
def test_yarn_with_the_original_context_has_the_positions_of_its_factor(
    tmp_path: Path, original: int | None
) -> None:
    yarn = {**YARN, "rope.scaling.original_context_length": original, "context_length": 256}
    config_of(tmp_path, "llama", yarn)
    config = read_config(view_of(tmp_path / "model.gguf") / "config.json")
    assert (config.max_position_embeddings, context_of(config)) == (256, 1024)


def test_a_factor_without_a_kind_of_scaling_is_linear(tmp_path: Path) -> None:
    found = config_of(tmp_path, "llama", {"rope.scaling.factor": 4.0})["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        ("deepseek_v3", {"expert_gating_func": None}, "by gating function 1 with corrections"),
        ("phi3", {"rope.scaling.attn_factor": 1.25}, r"by 1\.25 and has no rope_factors"),
        (
            "phi3",
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
            r"a scaling of kind longrope and the factor 4\.0",
        ),
        ("afmoe", {"expert_used_count": 0}, "a token uses 0 of its 8 experts"),
        ("glm4_moe", {"expert_used_count": 9}, "a token uses 9 of its 8 experts"),
        ("gpt_oss", {"expert_used_count": 9}, "a token uses 9 of its 8 experts"),
        ("glm4_moe", {"expert_group_count": 3}, "a token uses 2 of 3 groups of its 8 experts"),
        ("glm4_moe", {"expert_group_count": 8}, "a token uses 2 of 8 groups of its 8 experts"),
        ("glm4_moe", {"expert_group_used_count": 0}, "a token uses 0 of 4 groups"),
        ("kimi_linear", {"expert_group_used_count": 5}, "a token uses 5 of 4 groups"),
        (
            "deepseek_v3",
            {**YARN, "rope.scaling.yarn_log_multiplier": 0.0},
            "yarn_log_multiplier is 0.0, no positive",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, kind: str, facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_of(tmp_path, kind, facts, sizes=VARIED.get(kind))


def tokens(*names: str, kind: int = 3) -> dict[str, Any]:
    """A vocabulary that has tokens of these names from 30 on, of this type: control tokens."""
    letters = [chr(number) for number in range(0x21, 0x50)]
    whole = [*letters[:30], *names, *letters[30 : 47 - len(names)], "AB"]
    return {
        "tokenizer.ggml.tokens": whole,
        "tokenizer.ggml.token_type": [1] * 30 + [kind] * len(names) + [1] * (18 - len(names)),
        "tokenizer.ggml.merges": ["A B"],
        "tokenizer.ggml.eos_token_id": 1,
    }


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (("</s>", "<|repo_name|>", "[EOS]", "<|file_sep|>"), {1, 30, 31, 32, 33}),
        (("<|end|>", "<|return|>", "<|call|>"), {1, 31, 32}),
        (("<|end|>", "<|flush|>", "<|calls|>"), {1, 31, 32}),
        (("<|tool_response>", "</s>"), {1, 30}),
    ],
)
def test_control_tokens_end_a_reply_by_their_text_as_llama_cpp_has_it(
    tmp_path: Path, names: tuple[str, ...], ends: set[int]
) -> None:
    config_of(tmp_path, "llama", tokens(*names))
    _, facts = read_tokenizer(view_of(tmp_path / "model.gguf"))
    assert set(facts.end) == ends


@pytest.mark.parametrize("kind", [1, 4], ids=["normal", "user"])
def test_only_control_tokens_end_a_reply_by_their_text(tmp_path: Path, kind: int) -> None:
    whole = tokens("</s>", "<EOT>", "<|fim_pad|>", kind=kind) | {"tokenizer.ggml.eot_token_id": 31}
    config_of(tmp_path, "llama", whole)
    tokenizer, facts = read_tokenizer(view_of(tmp_path / "model.gguf"))
    assert facts.end == (1, 31)
    added = json.loads(tokenizer)["added_tokens"]
    assert [one["id"] for one in added if one["special"]] == ([31] if kind == 1 else [])


NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.sliding_window": 0,
    "logit_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.dimension_sections": [0, 0, 0, 0],
    "pooling_type": 0,
    "expert_count": 0,
    "expert_weights_scale": 1.0,
    "use_parallel_residual": False,
    "rope.freq_base_swa": 5000.0,
    "attention.sliding_window_pattern": [True, False],
    "attention.layer_norm_epsilon": 0.5,
}


def test_keys_at_neutral_values_are_taken(tmp_path: Path) -> None:
    plain = config_of(tmp_path / "plain", "qwen2", {"rope.freq_base": 10000.0})
    assert config_of(tmp_path / "more", "qwen2", {"rope.freq_base": 10000.0, **NEUTRAL}) == plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("attention.causal", False), ("logit_scale", 0.5), ("pooling_type", 3)),
        *(("attention.sliding_window", 4096), ("expert_weights_scale", 2.5)),
        ("rope.dimension_sections", [8, 8, 0, 0]),
    ],
)
def test_a_key_that_changes_the_function_is_refused_with_its_value(
    tmp_path: Path, key: str, value: Any
) -> None:
    words = rf"model\.gguf.*key qwen2\.{re.escape(key)} is {re.escape(str(value)[:2])}"
    with pytest.raises(CheckpointError, match=words):
        config_of(tmp_path, "qwen2", {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokenizer.ggml.precompiled_charsmap", 5), ("general.sampling.mirostat", [1, 2])],
)
def test_a_damaged_value_of_a_key_that_is_not_obeyed_is_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(key)):
        config_of(tmp_path, "llama", {key: value})


@pytest.mark.parametrize(("kind", "value"), [("phi", True), ("cohere2", True), ("llama", False)])
def test_the_order_of_attention_and_mlp_must_be_that_of_the_architecture(
    tmp_path: Path, kind: str, value: bool
) -> None:
    config_of(tmp_path / "same", kind, {"use_parallel_residual": value})
    with pytest.raises(CheckpointError, match="use_parallel_residual is not known"):
        config_of(tmp_path / "other", kind, {"use_parallel_residual": not value})


def test_the_old_name_of_a_linear_scaling_is_read(tmp_path: Path) -> None:
    found = config_of(tmp_path, "llama", {"rope.scale_linear": 8.0})["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("linear", 8.0)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        *((27, "I64"), (41, "Q1_0"), (42, "Q2_0"), (139, "IQ4_K"), (146, "IQ4_KSS")),
        *((157, "IQ2_KL"), (212, "Q4_K_R4"), (338, "IQ3_K_R4"), (32, "Q4_0_4_8"), (36, "I2_S")),
    ],
)
def test_a_type_that_is_not_read_is_refused_by_its_name(
    tmp_path: Path, number: int, name: str
) -> None:
    config_of(tmp_path, "llama", {})
    file, tensor = tmp_path / "model.gguf", b"blk.0.ffn_down.weight"
    content = bytearray(file.read_bytes())
    place = content.index(tensor) + len(tensor) + 4 + 2 * 8  # dimensions, of 32 and 64 bits
    content[place : place + 4] = struct.pack("<I", number)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"ffn_down\.weight is of type {name}\b"):
        view_of(file)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("granite", "logit_scale"),
        ("qwen3_5_text", "rope.dimension_sections"),
        ("gemma4_text", "embedding_length_per_layer_input"),
        ("gemma4_text", "attention.key_length_swa"),
        ("gemma4_text", "attention.sliding_window_pattern"),
        ("ernie4_5_moe", "interleave_moe_layer_step"),
        ("hunyuan_v1_moe", "expert_feed_forward_length"),
        ("minimax_m2", "expert_feed_forward_length"),
        ("minimax_m2", "expert_gating_func"),
        ("lfm2_moe", "expert_gating_func"),
        ("dots1", "expert_gating_func"),
    ],
)
def test_a_key_that_llama_cpp_needs_is_missed_by_name(tmp_path: Path, kind: str, key: str) -> None:
    sizes = VARIED["gemma4_text"] if kind == "gemma4_text" else {}
    with pytest.raises(CheckpointError, match=rf"key .*\.{re.escape(key)} is missing"):
        config_of(tmp_path, kind, {key: None}, sizes=sizes)


def test_values_are_as_wide_as_an_even_share_where_a_file_does_not_say(tmp_path: Path) -> None:
    """And of another width than keys, which is not computed here."""
    with pytest.raises(CheckpointError, match="its values are of another width than its keys"):
        config_of(tmp_path, "qwen3", {"attention.value_length": None}, sizes={"head_dim": 32})


@pytest.mark.parametrize("parallel", [False, True])
def test_an_mlp_of_stablelm_with_a_norm_reads_behind_attention(
    tmp_path: Path, parallel: bool
) -> None:
    config = config_of(tmp_path, "stablelm", {"use_parallel_residual": parallel})
    assert not config["use_parallel_residual"]


@pytest.mark.parametrize(("name", "strips"), [("Phi3", True), ("Phi 4", False)])
def test_tokens_of_phi_3_take_the_spaces_behind_them(
    tmp_path: Path, name: str, strips: bool
) -> None:
    config_of(tmp_path, "phi3", {**tokens("</s>", "<|endoftext|>"), "general.name": name})
    tokenizer, _ = read_tokenizer(view_of(tmp_path / "model.gguf"))
    added = {one["content"]: one["rstrip"] for one in json.loads(tokenizer)["added_tokens"]}
    assert added == {"</s>": strips, "<|endoftext|>": False}


def with_keys(file: Path, keys: dict[bytes, bytes]) -> None:
    """Insert keys before those of a file, each with its type and encoded value."""

    def packed(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text

    content = file.read_bytes()
    counts = struct.unpack_from("<IQQ", content, 4)
    added = b"".join(packed(key) + value for key, value in keys.items())
    filler = packed(b"general.filler") + struct.pack("<I", 8) + bytes(8)
    empty = -(len(added) + len(filler)) % 32  # what follows stays at whole multiples
    filler = filler[:-8] + packed(b"x" * empty)
    head = b"GGUF" + struct.pack("<IQQ", counts[0], counts[1], counts[2] + len(keys) + 1)
    file.write_bytes(head + added + filler + content[24:])


def test_odd_unused_keys_are_ignored(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", {})
    number, text = struct.pack("<I", 7), struct.pack("<Q", 2) + b"\xff\xfe"
    listed = struct.pack("<IIQ", 9, 4, 1) + number
    with_keys(
        tmp_path / "model.gguf",
        {
            b"general.note": struct.pack("<I", 8) + text,
            b"general.notes": struct.pack("<IIQ", 9, 8, 2) + text + text,
            b"general.\xff": struct.pack("<I", 4) + number,
            b"general.architecture": struct.pack("<IQ", 8, 5) + b"llama",
            b"general.none": struct.pack("<IIQ", 9, 4, 0),
            b"general.no_texts": struct.pack("<IIQ", 9, 8, 0),
            b"general.truths": struct.pack("<IIQ", 9, 7, 3) + b"\0\1\1",
            b"general.lists": struct.pack("<IIQ", 9, 9, 2) + listed[4:] * 2,
            b"general.long": struct.pack("<IQ", 8, 17 << 20) + bytes(17 << 20),
            b"tokenizer.ggml.unheard_of": struct.pack("<Id", 12, 0.5),
        },
    )
    assert json.loads((view_of(tmp_path / "model.gguf") / "config.json").read_text()) == config
    with_keys(tmp_path / "model.gguf", {b"tokenizer.chat_template": struct.pack("<I", 8) + text})
    with pytest.raises(CheckpointError, match=r"chat_template has text that is not UTF-8; take"):
        view_of(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("tensor", "key", "value", "lacking"),
    [
        ("blk.0.attn_q.weight", None, 0, "a description of its tensors; use .* safetensors"),
        ("blk.0.indexer.k_norm.weight", None, 0, "a sparse indexer; use a model of another"),
        ("enc.blk.0.attn_q.weight", None, 0, "an encoder;"),
        ("blk.0.time_mix_w1.weight", None, 0, "RWKV's recurrent states;"),
        ("blk.0.ssm_x.weight", None, 0, "the recurrent states of Mamba-1;"),
        ("fc.weight", None, 0, "the states of the model that it drafts for;"),
        ("blk.0.attn_q.weight", "attention.causal", False, "bidirectional attention;"),
        ("blk.0.attn_q.weight", "attention.causal", True, "a description of its tensors;"),
        ("blk.0.attn_q.weight", "attention.max_alibi_bias", 8.0, r"attention scores .* \(ALiBi\);"),
        ("blk.0.attn_q.weight", "num_loops", 2, "layers that run several times;"),
    ],
)
def test_the_refusal_of_an_architecture_names_what_is_missing(
    tmp_path: Path, tensor: str, key: str | None, value: float, lacking: str
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "other")
    writer.add_block_count(1)
    if key is not None:
        add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"other.{key}", value)
    writer.add_tensor(tensor, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"\(architecture other\) .*: it needs {lacking}"):
        view_of(tmp_path / "model.gguf")
