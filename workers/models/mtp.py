"""The multi-token-prediction layer of a checkpoint (MTP, NextN): the matrix and norms that join a
token's embedding with a state, and a decoder layer of the checkpoint's family, as a checkpoint of
that layer alone. Safetensors and GGUF."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers.models.checkpoints.architecture import refuse_content
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint, stored_tensors
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.configured import configured
from dovetail.workers.models.checkpoints.digests import Identity, all_finite, known_digest
from dovetail.workers.models.checkpoints.files import damaged, read_json, shown
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.tensors import Blocks
from dovetail.workers.models.checkpoints.gguf.view import spelled
from dovetail.workers.models.checkpoints.namings import NAMINGS, Naming
from dovetail.workers.models.checkpoints.pieces import Pieces
from dovetail.workers.models.checkpoints.stored import Stored

ROWS = 512  # rows of the embedding with which the layer is proved
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of the number of MTP layers. Some families have a layer but no such key."""
SIZES = ("num_hidden_layers", "hidden_size")
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
UNREAD = ("quantization_config", "compression_config", "architectures", "auto_map")
"""Fields of a configuration that do not hold for the layer: its tensors are decoded."""


@dataclass(frozen=True)
class Layout:
    """The names of an MTP layer's tensors. N is the number of the target's own layers."""

    fusion: str
    embedding_norm: str
    state_norm: str
    norm: str | None  # the norm before the output head; None: there is none
    layer: str  # the prefix of the decoder layer
    halves: int = 1  # 2 if its attention and its experts are two layers of the checkpoint's family

    def at(self, layers: int) -> "Layout":
        """Return the names in a checkpoint with this number of layers."""
        own: dict[str, Any] = vars(self)
        named = {n: s for n, s in own.items() if isinstance(s, str)}
        changed: dict[str, Any] = {n: s.replace("N", str(layers)) for n, s in named.items()}
        return replace(self, **changed)

    @property
    def parts(self) -> list[str]:
        """Return the prefixes of the layers of the family."""
        return [self.layer, *(f"{self.layer[:-2]}{half}." for half in range(1, self.halves))]


def _nextn(norm: str) -> Layout:
    at = "model.layers.N."
    return Layout(f"{at}eh_proj", f"{at}enorm", f"{at}hnorm", f"{at}{norm}", at)


LAYOUTS = (
    Layout(
        "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0."
    ),
    _nextn("shared_head.norm"),
    _nextn("final_layernorm"),
    Layout(
        "model.mtp_linear_proj.0",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        None,
        "model.mtp_block.0.",
    ),
    Layout(
        "mtp_layers.0.input_proj",
        "mtp_layers.0.token_layernorm",
        "mtp_layers.0.hidden_layernorm",
        "mtp_layers.0.final_layernorm",
        "mtp_layers.0.",
    ),
    Layout(
        "mtp.layers.0.eh_proj",
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.1.final_layernorm",
        "mtp.layers.0.",
        halves=2,
    ),
)
"""Qwen's, EXAONE's and Mellum's; DeepSeek's, GLM's and Cohere's, also of GGUF files; Hunyuan's and
Ling's; ERNIE's; that of the speculators library; Nemotron's."""
FULL = {"layer_types": ["full_attention"]}
SPARSE = {"mlp_layer_types": ["sparse"]}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    # attention sees all and rotates: in transformers only layers with a window rotate
    "cohere2_moe": {"layer_types": ["sliding_attention"], "sliding_window": 1 << 20, **SPARSE},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 1},  # none
    "exaone4": {},
    "exaone_moe": {"mlp_layer_types": ["dense"]},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm4_moe_lite": SPARSE,
    "hy_v3": SPARSE,
    "llama": {},
    "mellum": {"layer_types": ["sliding_attention"], **SPARSE},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
    "qwen3_5_moe_text": FULL,
    "qwen3": FULL,
    "qwen3_5_text": FULL,
    "qwen3_next": {**FULL, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "sarvam_moe": {"first_k_dense_replace": 0},
}
"""Model type -> the fields of a configuration whose only layer is like the MTP layer; lists of
types of layers are those of the first layer unless given."""
ENDS = {"nemotron_h": ("model.embeddings.weight", "model.norm_f.weight")}
"""Model type -> the names of embedding and final norm, if unusual."""
FOLDED = {
    "post_norm": "1.norm",
    "shared_head.norm": "1.final_layernorm",
    **{part: f"0.{part}" for part in ("norm", "eh_proj", "enorm", "hnorm")},
    **{part: f"0.{part}" for part in (f"mixer.{one}_proj" for one in "qkvo")},
}
"""Parts of the single block that a GGUF file has for the two layers of Nemotron's MTP layer; others
are of the second one."""


@dataclass(frozen=True)
class Held(Stored):
    """A tensor in memory."""

    numbers: Tensor = field(kw_only=True)

    def read(self, name: str, *, checked: bool = False) -> Tensor:
        return self.numbers


@dataclass(frozen=True)
class MtpLayer:
    """An MTP layer; H is the width of the target's states."""

    source: str
    config: Mapping[str, Any]  # of a model whose only layer is this one
    tensors: Mapping[str, Stored]  # of that model, by its names, without the embedding
    table: str  # that model's name of the embedding
    fusion: Tensor  # [H, 2 H]: reads the embedding, then the state
    embedding_norm: Tensor  # [H], as stored
    state_norm: Tensor  # [H], as stored
    normed: bool  # False if the output head reads the layer's result as it is
    embedding: Stored | None  # the layer's own copy of the embedding [V, H]
    output: Stored | None  # the layer's own output head [V, H]
    layout: Layout
    digest: str  # SHA-256 of configuration and tensors, in hexadecimal

    @contextmanager
    def checkpoint(self, embedding: Tensor, context: int | None) -> Iterator[Checkpoint]:
        """Yield a checkpoint of a model of the layer alone, with rows of the `embedding` [V, H] as
        embedding and output head; `context`: the longest sequence asked for."""
        rows = embedding[:ROWS].contiguous()
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            config = {**self.config, "vocab_size": len(rows)}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            kind = {torch.float16: "F16", torch.bfloat16: "BF16"}.get(rows.dtype, "F32")
            identity = Identity(0, 0, 0, 0, 0)
            held = Held(folder, kind, tuple(rows.shape), 0, rows.nbytes, identity, numbers=rows)
            tensors = {**self.tensors, self.table: held, TABLES[1]: held}
            facts = VocabularyFacts(digest="mtp", size=1, end=(), begin=None, template="")
            language = (self.source, b"", TokenTable.of({}), facts)
            try:
                checkpoint = Checkpoint(
                    folder, known_digest(self.digest), tensors, *language, context
                )
                self._refuse_unused(checkpoint)
                yield checkpoint
            except CheckpointError as error:
                said = str(error).replace(f"{folder}/config.json", self.source)
                said = said.replace(str(folder), self.source)
                said = said.replace("model.norm", self.layout.norm or "model.norm")
                for number, part in enumerate(self.layout.parts):
                    said = said.replace(f"model.layers.{number}.", part)
                raise CheckpointError(said) from None

    def _refuse_unused(self, checkpoint: Checkpoint) -> None:
        """`CheckpointError` naming a tensor that the layer does not use."""
        model = configured(checkpoint)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        naming = NAMINGS.get(model.config.model_type, Naming())
        unused = Pieces(naming, checkpoint.tensors, shapes).superfluous()
        if unused:
            raise damaged(
                f"{checkpoint.folder} has tensor {unused[0]}, which a layer of model type "
                f"{model.config.model_type} does not use"
            )


def mtp_layer(folder: Path, source: Path | None = None) -> MtpLayer:
    """Return the MTP layer of the model in a folder, or of a folder `source` of such a layer alone;
    `CheckpointError` if there is none, or one that is not computed."""
    return _read(*_found(folder, source), alone=source is not None)


def check_mtp(folder: Path) -> None:
    """`CheckpointError` if the model in a folder has no MTP layer, or one that is not computed, by
    its configuration and the names of its tensors."""
    _found(folder, None)


def _found(
    folder: Path, source: Path | None
) -> tuple[str, Mapping[str, Any], str, Layout, Mapping[str, Stored]]:
    """Return the name, configuration, model type, layout and tensors of an MTP layer."""
    file = folder / "config.json"
    content = text_part(read_json(file))
    refuse_content(content, file)
    for key in (*SIZES, *COUNTS):
        number = content.get(key)
        if type(number) is not int and (number or key in SIZES):
            raise CheckpointError(f"{file}: {key} is {shown(number)}; it must be an integer")
    named = spelled(str(source or folder))
    kind, layers = str(content["model_type"]), content["num_hidden_layers"]
    tensors = stored_tensors(source or folder, mtp=True)
    if kind == "nemotron_h":
        tensors = _unfolded(tensors, f"backbone.layers.{layers}.")
    layouts = [one.at(layers) for one in LAYOUTS]
    layouts = [one for one in layouts if f"{one.fusion}.weight" in tensors]
    if not layouts:
        raise CheckpointError(
            f"{named} has no MTP layer (tensors such as {LAYOUTS[0].fusion}.weight or "
            f"{LAYOUTS[1].at(layers).fusion}.weight): some copies leave it out; choose another "
            "draft, or use a checkpoint that has it"
        )
    layout = next((one for one in layouts if f"{one.norm}.weight" in tensors), layouts[0])
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{named}: the MTP layer of model type {kind} is not computed here, only that of "
            f"{', '.join(sorted(FAMILIES))}; choose another draft"
        )
    count = next((content[key] for key in COUNTS if content.get(key)), 1)
    count = max(count, -(-len(_numbers(layout.layer, tensors)) // layout.halves))
    if count != 1:
        raise CheckpointError(
            f"{named} has {count} MTP layers in a chain, and one is supported; choose another draft"
        )
    return named, content, kind, layout, tensors


def _unfolded(tensors: Mapping[str, Stored], block: str) -> dict[str, Stored]:
    """Return tensors, with those of the block with a prefix as the two layers of Nemotron's."""
    found = dict[str, Stored]()
    for name, stored in tensors.items():
        part, dot, end = name.removeprefix(block).rpartition(".")
        own = f"mtp.layers.{FOLDED.get(part, f'1.{part}')}{dot}{end}"
        found[own if name.startswith(block) else name] = stored
    return found


def _numbers(layer: str, names: Iterable[str]) -> set[int]:
    """Return the numbers of the layers from the one with the prefix `layer` on."""
    stem, first = layer[:-1].rpartition(".")[0], int(layer[:-1].rpartition(".")[2])
    found = {name[len(stem) + 1 :].partition(".")[0] for name in names if name.startswith(stem)}
    return {int(one) for one in found if one.isdecimal() and int(one) >= first}


def _read(
    source: str,
    content: Mapping[str, Any],
    kind: str,
    layout: Layout,
    tensors: Mapping[str, Stored],
    *,
    alone: bool,
) -> MtpLayer:
    """Return a layer; `alone`: it is stored apart from its target, perhaps with separate tables."""
    hidden = content["hidden_size"]
    own = dict[str, Tensor]()
    for name, shape in (
        (layout.fusion, (hidden, 2 * hidden)),
        (layout.embedding_norm, (hidden,)),
        (layout.state_norm, (hidden,)),
    ):
        stored = tensors.get(f"{name}.weight")
        if stored is None:
            raise damaged(f"{source} lacks tensor {name}.weight of its MTP layer")
        if stored.shape != shape:
            found = f"tensor {name}.weight has the shape {list(stored.shape)}"
            raise damaged(f"{source}: {found} instead of {list(shape)}")
        own[name] = stored.read(f"{name}.weight", checked=True)
    beside = {f"{name}.weight" for name in own}
    copies = {part: f"{layout.layer}{part}.weight" for part in ("embed_tokens", "shared_head.head")}
    norm = f"{layout.norm}.weight"
    table, last = ENDS.get(kind, ("model.embed_tokens.weight", "model.norm.weight"))
    final = tensors.get(norm) or tensors.get(last)
    if final is None:
        raise damaged(f"{source} lacks tensor {norm} of its MTP layer")
    layer = {
        f"model.layers.{number}.{name.removeprefix(part)}": stored
        for number, part in enumerate(layout.parts)
        for name, stored in tensors.items()
        if name.startswith(part) and name not in (beside | {*copies.values(), norm})
    }
    namespace = "mtp" if layout.layer.startswith("mtp") else "model.mtp"
    strange = [
        name
        for name in tensors
        if name.startswith(namespace)
        and not name.startswith(tuple(layout.parts))
        and name not in beside | {norm}
    ]
    if strange:
        raise damaged(f"{source} has tensor {strange[0]}, which no supported MTP layer has")
    config = {key: value for key, value in content.items() if key not in UNREAD}
    kinds = ("layer_types", "mlp_layer_types", "layers_block_type")
    config |= {key: config[key][:1] for key in kinds if isinstance(config.get(key), list)}
    config |= FAMILIES[kind]
    told = {key: content.get(f"mtp_{key}") for key in kinds}
    config |= {key: value for key, value in told.items() if value is not None}
    config |= {key: 0 for key in COUNTS if key in config}
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config |= {"num_hidden_layers": layout.halves, "tie_word_embeddings": False}
    own_tensors = {**layer, last: final}
    embedding, output = (
        tensors.get(name) or (tensors.get(whole) if alone else None)
        for name, whole in zip(copies.values(), TABLES, strict=True)
    )
    return MtpLayer(
        source,
        config,
        own_tensors,
        table,
        fusion=own[layout.fusion],
        embedding_norm=own[layout.embedding_norm],
        state_norm=own[layout.state_norm],
        normed=layout.norm is not None,
        embedding=embedding,
        output=output,
        layout=layout,
        digest=_digest(config, own_tensors, own, layout.layer),
    )


def _digest(
    config: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    own: Mapping[str, Tensor],
    layer: str,
) -> str:
    """Return the SHA-256 of a layer; `CheckpointError` for NaN and infinity."""
    whole = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in own.items():
        whole.update(f"\0{name}\0".encode())
        whole.update(_bytes_of(tensor))
    for name, stored in sorted(tensors.items()):
        whole.update(f"\0{name}\0{stored.kind}\0{stored.shape}\0".encode())
        if type(stored) not in (Stored, Blocks):  # decoding refuses what is not finite
            whole.update(_bytes_of(stored.read(name)))
            continue
        kind, block = stored.kind, stored.content(name)
        if isinstance(stored, Blocks):
            kind = KINDS[stored.placed.place.kind].name
        if not all_finite(block, kind):
            raise stored.not_finite(name.replace("model.layers.0.", layer))
        whole.update(block)
    return whole.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    numbers: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return numbers
