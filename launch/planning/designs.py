"""Sizes of models by their config.json: a target, a small draft, a head, a substitute of few bits;
and the types of weights that a target can have here, with the loss of each."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.launch.planning.machines import SIZES
from dovetail.launch.planning.planner import Hardware, Seconds, Target
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.calibration import RowsSeconds, StateTraffic
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.experts import DENSE, Mixture, count_experts
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.heads.reduced.rows import HeadRows, reduced_rows
from dovetail.workers.models.backends.placement import coded_bytes, needed_bytes, substitute_bytes
from dovetail.workers.models.backends.sizes import (
    INT4,
    WEIGHT_BYTES,
    Sizes,
    has_sizes,
    in_a_file,
    sizes_of,
    traffic_of,
    weighed,
    with_host_experts,
)
from dovetail.workers.models.checkpoints.architecture import refuse_content
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import (
    Tensor,
    cache_bytes,
    half_of,
    host_footprint,
    in_blocks,
    in_pieces,
    pass_bytes,
    read_tensors,
    sizes_by_tensors,
)
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.families.names import DESCRIBED

LOSSES = {
    "fp32": "the checkpoint's function",
    "half": "the checkpoint's function",
    "int8": "another function: logits move by about 4 %; checked on loading, may be refused",
    INT4: "another function: logits move by about 10 %; the first load takes longer",
    FILE: "the file's blocks; activations in int8 move logits by about 1 %",
}
"""Type of weights -> its loss, measured on the embedded target (`selftest --card`)."""
EXACT = "the file's function"
"""Weights `file` with activations in fp32, in words."""
CACHE_LOSSES = {
    "fp32": "",
    "half": "; keys and values in fp16 move logits by 1e-4 to 2e-3",
    "q8": "; keys and values in 8 bits move logits by 1e-2",
}
"""Type of keys and values -> its loss."""


def on_kernels(folder: Path) -> bool:
    """Return whether the kernels are available and compute models of a folder's family."""
    if not kernels.available():
        return False
    return text_part(read_json(folder / "config.json")).get("model_type") in DESCRIBED


def planned_types(configuration: Configuration, folder: Path) -> list[str]:
    """Return the types of weights to plan: the named one, or all that the target in a folder can
    have, its own first."""
    target = configuration.settings.target
    if configuration.given("target.weights"):
        return [target.weights]
    if target.backend == "library" or not on_kernels(folder):
        return ["fp32"]
    half = _stores_16_bits(folder, read_tensors(folder))
    plain = [*(["half"] if half else []), "fp32", "int8"]
    if in_blocks(folder):
        return [FILE, *plain]
    whole = count_experts(read_config(folder, "target model"))[0] > 1 and not in_pieces(folder)
    return plain if whole else [*plain, INT4]


def _stores_16_bits(folder: Path, tensors: Sequence[Tensor]) -> bool:
    if tensors:
        return half_of(tensors)
    config = read_config(folder, "target model")
    return str(config.get("dtype") or config.get("torch_dtype")).endswith("16")


def loss_of(weights: str, activations: str, cache: str) -> str:
    """Describe the loss of these weights, activations and cache; empty if it was not measured. The
    loss of a half cache is mentioned only for lossless weights."""
    exact = (weights, activations) == (FILE, "fp32")
    loss = EXACT if exact else LOSSES.get(weights, "")
    named = loss and (exact or weights in ("fp32", "half") or cache == "q8")
    return loss + CACHE_LOSSES[cache] if named else loss


if TYPE_CHECKING:
    from dovetail.workers.serving import design

LOOKUP = "ngram"  # the kind of draft that looks up earlier text
HALF = 2  # bytes of a number of a draft
SAID = ("llama", "gpt2", "gpt_bigcode")
"""Model types whose config.json, if complete, determines all counted sizes."""
DEVICE = "cuda:0"  # the device for which a draft's pass is priced: the slowest case is a GPU
GROUP_BITS = 0.5  # bytes per weight for the scale and the offset of a group of 64 (HQQ)
CONTEXT = 4096
HEAD_DIM = 128


def read_design(folder: Path) -> "Design":
    """Return the design of the target in a folder. `CheckpointError` if there is no config.json
    with its sizes."""
    return design_of(read_config(folder, "target model"), folder)


def design_of(config: Mapping[str, Any], folder: Path) -> "Design":
    """Return the design of a config.json in this folder. transformers gives the sizes of layers,
    since families name experts, states and heads differently."""
    tensors = read_tensors(folder)
    if config.get("model_type") in SAID:
        return Design(config, tensors=tensors)
    from dovetail.workers.serving import design  # torch comes in here

    return Design(config, design.read_design(TargetSettings(model=str(folder))), tensors)


def read_config(
    folder: Path, what: str, defaults: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """A folder's config.json, with transformers' defaults and `defaults`; `CheckpointError` without
    the model's sizes."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError:
        why = f"the {what} {folder} has no config.json"
        raise CheckpointError(f"{why}: name a folder that has one, or a hub id") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder / 'config.json'} is not JSON") from None
    config = {**(defaults or {}), **text_part(config)} if isinstance(config, dict) else config
    if isinstance(config, dict) and (config.get("model_type") not in SAID or not has_sizes(config)):
        config = _completed(config, folder / "config.json")
    if not isinstance(config, dict) or not has_sizes(config):
        if isinstance(config, dict):
            refuse_content(config, folder / "config.json")
        names = "hidden_size, num_hidden_layers, num_attention_heads ..."
        why = f"lacks the model's sizes, or has an impossible one ({names})"
        raise CheckpointError(
            f"{folder / 'config.json'} {why}; use the one that belongs to the model"
        )
    return config


def _completed(config: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return the fields of a config.json, completed by transformers unless it does not know the
    model type, as of some heads."""
    from dovetail.workers.models import transformers  # torch comes in here

    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return config
    from dovetail.workers.models.checkpoints.configured import full_config

    return full_config(file)


def config_of(name: str) -> Mapping[str, Any]:
    """Return the fields of config.json of a model of a known size."""
    size = SIZES[name]
    return {
        "model_type": "llama",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.inner,
        "num_attention_heads": size.hidden // HEAD_DIM,
        "num_key_value_heads": size.keys // HEAD_DIM,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": CONTEXT,
        "dtype": "float16",
    }


@dataclass(frozen=True)
class Design:
    """A decoder, by its config.json."""

    config: Mapping[str, Any]
    weighed: "design.Design | None" = None
    """Its parts as built by transformers; None if its config.json determines all of them."""
    tensors: Sequence[Tensor] = ()  # the tensors of its checkpoint; empty if that is not here
    file_bytes: int = 0  # the size of a GGUF file that is not here; 0: none was named

    @property
    def uncoded(self) -> str:
        """Return the parts of its layers that levels of fixed shapes on a GPU do not cover; empty:
        they cover all."""
        return "" if self.weighed is None else self.weighed.uncoded

    @property
    def mixture(self) -> Mixture:
        """Return its experts, and their share of a layer's weights."""
        if self.weighed is None or self.weighed.mixture == DENSE:
            return DENSE
        mixture, vocabulary = self.weighed.mixture, self.vocabulary * self.hidden
        whole = self.weighed.weights
        return replace(mixture, share=mixture.share * whole / max(1, whole - vocabulary))

    def sizes(self, weights: str, cache: str = "fp32") -> Sizes:
        """Return the sizes of its parts in weights of a type, with keys and values of another; with
        experts, of the mean layer."""
        if weights == FILE and self.file_bytes:
            tied = bool(self.config.get("tie_word_embeddings"))
            return in_a_file(self.sizes("half", cache), self.file_bytes, tied=tied)
        sizes = sizes_of(self.config, "int8" if weights == FILE else weights, cache)
        if self.tensors:
            return sizes_by_tensors(sizes, self.tensors, weights)
        return sizes if self.weighed is None else weighed(sizes, weights, self.weighed.matrices)

    def width(self, weights: str) -> float:
        """Return the bytes of one weight of a type; the average for blocks."""
        if weights not in (FILE, INT4):
            return WEIGHT_BYTES[weights]
        sizes = self.sizes(weights)
        return (sizes.layers * sizes.layer + sizes.head) / self.parameters

    def target(
        self, weights: str, device: str, cache: str = "fp32", *, host_experts: bool = False
    ) -> Target:
        """Return the parts of a target with weights of a type, some of them on a device, and keys
        and values of a type; `host_experts`: the experts stay on the CPU."""
        sizes = self.sizes(weights, cache)
        sizes = with_host_experts(sizes) if host_experts else sizes
        traffic = traffic_of(self.config)

        def on_device(computed: int, resident: int) -> int:
            return needed_bytes(sizes, computed, resident, device)

        return Target(
            sizes.layers,
            sizes.layer,
            sizes.head,
            on_device,
            lambda computed, resident: host_footprint(sizes, computed, resident).size,
            self.mixture,
            StateTraffic(*(part / sizes.layers for part in (traffic.states, traffic.row))),
        )

    @property
    def parameters(self) -> int:
        """Return the approximate number of weights in its matrices."""
        return self.layers * self.block + self.head

    @property
    def active(self) -> int:
        return round(self.layers * self.block * self.mixture.active) + self.head

    @property
    def layers(self) -> int:
        return sizes_of(self.config, "half").layers

    @property
    def block(self) -> int:
        """Approximate weights of a layer."""
        return self.sizes("half").layer // HALF

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return sizes_of(self.config, "half").head // HALF

    @property
    def hidden(self) -> int:
        return int(self.config.get("hidden_size") or self.config["n_embd"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    def working_bytes(self, layers: int) -> int:
        """Return the memory of a draft of this many such layers, without weights: embedding, the
        keys and values of a long conversation, a pass."""
        sizes = sizes_of(self.config, "half")
        return sizes.embedding + layers * cache_bytes(sizes) + pass_bytes(sizes, DEVICE)


@dataclass(frozen=True)
class DraftSize:
    """The size of a draft: the bytes and operations of a pass, and its memory."""

    layers: int
    layer_weights: int
    other_weights: int  # weights of its fusion and output head
    layer_bytes: int
    other_bytes: int
    beside_bytes: int  # bytes that are not read in every pass: embedding, keys and values, a pass
    shared_bytes: Callable[[int], int] = lambda _resident: 0
    """Bytes of a substitute in its target's process, by resident layers."""

    @property
    def pass_bytes(self) -> int:
        return self.layers * self.layer_bytes + self.other_bytes

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.other_weights

    @property
    def bytes(self) -> int:
        return self.pass_bytes + self.beside_bytes

    def level_s(
        self, hardware: Hardware, measured: RowsSeconds | None, layer_s: Seconds | None = None
    ) -> Callable[[int, int], float]:
        """t_D over rows, and the seconds of a level without its pass. `layer_s`: of a target's
        layer, for a draft that uses its resident ones."""
        each = hardware.draft.seconds(self.layer_weights, self.layer_bytes, 1.0)
        rest = hardware.draft.seconds(self.other_weights, self.other_bytes, passes=1.0)
        if measured is not None:
            whole, layers = cache(measured.at), self.layers * self.layer_bytes / self.pass_bytes
            each, rest = (
                lambda rows: layers / self.layers * whole(rows),
                lambda rows: (1.0 - layers) * whole(rows),
            )

        def level_s(rows: int, resident: int) -> float:
            lent = 0 if layer_s is None else resident
            theirs_s = 0.0 if layer_s is None else lent * layer_s(rows)
            return (self.layers - lent) * each(rows) + theirs_s + rest(rows) + hardware.level_s

        return level_s


def small_size(own: Design) -> DraftSize:
    """A smaller model, in 16 bits, or in the blocks of its file."""
    if not any(tensor.packed_bytes for tensor in own.tensors):
        return _plain_size(own, own.layers, 0)
    sizes = own.sizes(FILE)
    beside = own.working_bytes(own.layers)
    return DraftSize(own.layers, own.block, own.head, sizes.layer, sizes.head, beside)


def head_size(
    own: Design, blocks: int, head_rows: HeadRows = "all", *, on_cpu: bool = False
) -> DraftSize:
    """A head of this many blocks in 16 bits, or in 8 if it is quantized according to config.json,
    with an output head over its own vocabulary, or reduced by `draft.head_rows`."""
    vocabulary = own.config.get("draft_vocab_size")
    if not vocabulary:
        rows = reduced_rows(head_rows, own.vocabulary, HALF * own.hidden, on_cpu=on_cpu)
        vocabulary = rows or own.vocabulary
    own = replace(own, config={**own.config, "vocab_size": vocabulary})
    each = 1 if own.config.get("quantization_config") else HALF
    return _plain_size(own, blocks, 2 * own.hidden**2, each)


def _plain_size(own: Design, layers: int, fusion: int, each: int = HALF) -> DraftSize:
    other = own.head + fusion
    return DraftSize(
        layers, own.block, other, own.block * each, other * each, own.working_bytes(layers)
    )


def substitute_size(target: Design, bits: int, weights: str, cache: str = "fp32") -> DraftSize:
    """A target's own layers in a few bits, and its head in 16; `weights` and `cache`: the
    target's."""
    layer_bytes = round(target.block * (bits + GROUP_BITS) / 8)
    own = "int8" if weights in (FILE, INT4) else weights
    shared = partial(coded_bytes, sizes_of(target.config, own, cache), own, bits)
    head_bytes = target.head * HALF
    whole = substitute_bytes(sizes_of(target.config, "half"), bits, DEVICE)
    beside = whole - target.layers * layer_bytes - head_bytes
    sizes = (target.layers, target.block, target.head, layer_bytes, head_bytes, beside)
    return DraftSize(*sizes, shared)
