"""A causal language model whose linears, cache and attention are ours, around what transformers has
of it.

One pass over the weights computes rows of several sessions, wherever in their trees they lie.
Target and small draft use the same class. A back end takes the layers over as they are read: the
C++ kernels where they can compute the model, else what torch brings. Knows tokens, positions and
slots; nothing of prompts, trees or sampling.
"""

import contextlib
import gc
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.messages import MAX_TOKENS, VocabularyFacts
from dovetail.protocol.settings import BACKENDS
from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends import fused
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.library import Library, prove_whole
from dovetail.workers.models.backends.linear import CANDIDATES, reason_against
from dovetail.workers.models.backends.selection import select
from dovetail.workers.models.backends.staged import Staged, Staging
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.architecture import REMEDY, why_not
from dovetail.workers.models.checkpoints.checkpoint import (
    FLOAT_TYPES,
    Checkpoint,
    open_checkpoint,
    read_json,
)
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.inflate import (
    Plan,
    grow_layer,
    grow_skeleton,
    inflated_digest,
    plan_inflation,
    planned_shapes,
)
from dovetail.workers.models.checkpoints.loader import (
    Skeleton,
    Types,
    decoder_layers,
    load_transformers,
    open_skeleton,
    random_skeleton,
    read_config,
    said_by,
)
from dovetail.workers.models.memory import is_out_of_memory, release_memory
from dovetail.workers.models.parity.following import UnprovableError, UnsupportedError
from dovetail.workers.models.parity.oracle import Oracle
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.models.states import LAST, Kept
from dovetail.workers.progress import loading

WEIGHTS = ("fp32", "half", "int8", "bf16", "fp16", "int8-per-tensor", "stored")
"""`stored` is for a draft: the 16 bits of the checkpoint where it has them and the kernels compute
with them, else fp32."""
GPU_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KINDS = {"fp32": Kind.FP32, "fp16": Kind.FP16, "bf16": Kind.BF16, "int8": Kind.INT8}
"""The kernels' kind of matrix for weights of a type; `half` is one of the two in the middle."""
LINEAR_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float32,
    "int8-per-tensor": torch.float32,
}

WHOLE_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-3, "int8-per-tensor": 0.5}
"""How far logits with attention of our own may lie from transformers' own on a CPU, relative to
their norm, in weights of a type: all else is the same."""
ROUNDED_TOLERANCE = 0.1
"""The same where states are rounded to 16 bits between the layers."""
PER_TENSOR_SLACK = 0.5
"""How far a token's logits may move with its neighbours under torch's own int8; a mask that is
ignored moves them by as much as they are."""

log = logging.getLogger(__name__)


class BackEnd(Protocol):
    """What computes a model's layers: takes them over one by one, each as soon as it has its
    numbers, and then the rest of the model."""

    backend: str
    """kernels or library."""
    prompt_rows: int
    """Of a prompt, so many rows are best computed in a pass."""
    reads_apart: int
    """So many of the first rows of a prompt another device can read, by `read`; 0: there is
    none."""

    @property
    def kernels(self) -> str:
        """What computes, as it stands in a fingerprint."""

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """What is to stand in the layer's place; the layer itself is not needed afterwards."""

    def finish(self, model: Any) -> None:
        """All layers are taken, and what is not a layer has its numbers."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` rows."""

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        rows: Tensor | None,
        kept: Kept,
    ) -> Tensor:
        """Logits [R, V] of a pass, see `LanguageModel.forward`; the states that are wanted are
        kept, and change no byte of the logits."""


class LanguageModel:
    """A causal model on one device. Logits are float32, T rows of a pass, R rows asked for, V
    vocabulary."""

    def __init__(
        self,
        model: Any,
        back_end: BackEnd,
        checkpoint: Checkpoint,
        *,
        digest: str,
        weights: str,
        choice: str,
        real: Sequence[int],
    ) -> None:
        """`real`: where the checkpoint's own layers stand among those that are computed."""
        self._back_end, self._real = back_end, real
        self.checkpoint, self.checkpoint_digest = checkpoint, digest
        self.weights = weights
        """fp32, fp16, bf16, int8 or int8-per-tensor; `half` is what the checkpoint has."""
        self.backend, self.kernels = back_end.backend, back_end.kernels
        self.prompt_rows, self.reads_apart = back_end.prompt_rows, back_end.reads_apart
        self.choice = choice
        """Why this back end."""
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.vocabulary_size: int = embedding.shape[0]
        self.hidden_size: int = model.config.hidden_size
        self.layers = len(real)
        """Decoder layers of the checkpoint."""
        self.end: tuple[int, ...] = checkpoint.vocabulary.end
        self.context = context_of(model.config)

    @property
    def back_end(self) -> BackEnd:
        """What computes it."""
        return self._back_end

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for one session of at least `capacity` rows, those of trees included."""
        return self._back_end.new_cache(capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """tokens, positions [T] (int64; the rows of all segments, one after the other) -> logits
        [R, V]; their keys and values go into the caches."""
        return self._back_end.compute(tokens, positions, segments, rows, Kept()).float()

    @torch.inference_mode()
    def forward_with_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        wanted: Collection[int],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """The same logits, and hidden states [T, hidden_size] of all rows in the type that the
        model computes in.

        `wanted`: decoder layers of the checkpoint, of which it is the residual stream that enters
        them, and LAST, the states behind the final norm.
        """
        kept = self._keeping(wanted)
        logits = self._back_end.compute(tokens, positions, segments, rows, kept).float()
        return logits, self._states(kept, wanted)

    @torch.inference_mode()
    def read_apart(
        self, tokens: Tensor, segment: Segment, *, wanted: Collection[int], rows: Tensor
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """`forward_with_states` of the first rows of a session, read by the device that there is
        for it beside those that compute the model."""
        if not isinstance(self._back_end, Staged):
            raise TypeError(f"a back end {self.backend} reads nothing apart")
        kept = self._keeping(wanted)
        logits = self._back_end.read(
            tokens, torch.arange(segment.count), segment, rows, kept
        ).float()
        return logits, self._states(kept, wanted)

    def _keeping(self, wanted: Collection[int]) -> Kept:
        return Kept({place if place == LAST else self._real[place] for place in wanted})

    def _states(self, kept: Kept, wanted: Collection[int]) -> Mapping[int, Tensor]:
        return {
            place: kept.states[place if place == LAST else self._real[place]] for place in wanted
        }


Stager = Callable[[Mapping[str, Any], str], Staging]
"""How a model of a configuration (config.json's) with weights of a type (fp32, fp16, bf16 or int8)
is to be spread over devices."""


@dataclass(frozen=True)
class _Wanted:
    """What is asked for."""

    asked: str
    """The type of weights in the words of the settings."""
    weights: str
    """The same, `half` being one of the two 16-bit types."""
    backend: str
    inflate_bytes: int = 0
    profile: Path | None = None
    stage: Stager | None = None


def load_language_model(
    source: str,
    *,
    weights: str,
    device: str,
    backend: str = "auto",
    inflate_bytes: int = 0,
    profile: Path | None = None,
    stage: Stager | None = None,
) -> LanguageModel:
    """The model in `source` (folder, hub id, id@revision), with the linears' weights as told,
    inflated to a size in bytes if that is not 0.

    `backend`: kernels, library, or auto, the kernels where they can compute it. `profile`: the file
    that remembers what was measured of the library. `stage`: how it is spread over devices, in
    place of `device`; only a model that the kernels can compute is.
    """
    _check_names(weights, backend)
    read_config(
        find_folder(source) / "config.json"
    )  # what cannot be decoded is refused before all weights are read
    checkpoint = open_checkpoint(source)
    wanted = _Wanted(weights, type_of(weights, checkpoint), backend, inflate_bytes, profile, stage)
    digest = (
        inflated_digest(checkpoint.digest, inflate_bytes) if inflate_bytes else checkpoint.digest
    )
    if stage is not None or torch.device(device).type == "cpu":
        return _on_cpu(lambda: open_skeleton(checkpoint), checkpoint, digest, wanted)
    return _on_gpu(checkpoint, digest, wanted, torch.device(device))


def random_language_model(
    config_folder: str | Path,
    *,
    weights: str,
    backend: str = "auto",
    layers: int | None = None,
    profile: Path | None = None,
    stage: Stager | None = None,
) -> LanguageModel:
    """A model of random weights from a config.json alone, for measurements before a download;
    `layers`: so many in place of the configured number."""
    _check_names(weights, backend)
    folder = Path(config_folder)
    wanted = _Wanted(weights, _configured_type(weights, folder), backend, 0, profile, stage)
    facts = VocabularyFacts(digest="random", size=1, end=(), begin=None, template="")
    checkpoint = Checkpoint(f"{folder} (random weights)", folder, "random", b"", facts, {})
    return _on_cpu(
        lambda: random_skeleton(folder, layers=layers, stored=LINEAR_TYPES[wanted.weights]),
        checkpoint,
        "random",
        wanted,
    )


def _check_names(weights: str, backend: str) -> None:
    if weights not in WEIGHTS:
        raise CheckpointError(
            f"there are no weights of type {weights!r} here; choose {' or '.join(WEIGHTS)}"
        )
    if backend not in BACKENDS:
        raise CheckpointError(f"there is no back end {backend!r}; choose {' or '.join(BACKENDS)}")


def type_of(weights: str, checkpoint: Checkpoint) -> str:
    """`weights` with `half` and `stored` put into the words of what the checkpoint's matrices are;
    half weights of others would be another function."""
    if weights not in ("half", "stored"):
        return weights
    kinds = {
        stored.kind
        for stored in checkpoint.tensors.values()
        if len(stored.shape) == 2 and stored.kind in FLOAT_TYPES
    }
    name = {"F16": "fp16", "BF16": "bf16"}.get("".join(kinds))
    if weights == "stored":
        return "fp32" if name is None or fused.reason_against(KINDS[name]) else name
    if name is not None:
        return name
    found = " and ".join(sorted(kinds)) or "none"
    raise CheckpointError(
        f"{checkpoint.source}: half weights need a checkpoint of 16-bit weights, this one has "
        f"{found}: use weights fp32, or convert it to F16"
    )


def _configured_type(weights: str, folder: Path) -> str:
    """The same for a config.json alone, by the type that it names for the checkpoint's matrices; 16
    bits where it names none."""
    if weights not in ("half", "stored"):
        return weights
    file = folder if folder.is_file() else folder / "config.json"
    content = read_json(file)
    name = {"bfloat16": "bf16", "float16": "fp16", "None": "fp16"}.get(
        str(content.get("dtype") or content.get("torch_dtype"))
    )
    if name is not None:
        return name
    if weights == "stored":
        return "fp32"
    raise CheckpointError(
        f"{file}: half weights need a checkpoint of 16-bit weights, and this one's are not "
        "(dtype); use weights fp32"
    )


LAYERS_TRIED = 8
"""Layers of a model on which the remedy of a refusal is tried: kinds of layers alternate in cycles
of two to six."""


def _on_cpu(
    skeleton_of: Callable[[], Skeleton], checkpoint: Checkpoint, digest: str, wanted: _Wanted
) -> LanguageModel:
    """Kernels where that is wanted and can be; else the library."""
    why_not = _against_kernels(wanted)
    if not why_not:
        skeleton = skeleton_of()
        kind = skeleton.model.config.model_type
        try:
            return _assemble(
                skeleton,
                checkpoint,
                digest,
                wanted,
                kernels=True,
                choice="the C++ kernels compute it",
            )
        except UnsupportedError as error:
            why_not = f"the C++ kernels cannot compute model type {kind}: {error}"
        except StumbledError:
            why_not = (
                f"the C++ kernels cannot compute model type {kind}, which is built in a "
                "way that they do not know"
            )
    if wanted.stage is not None:
        raise CheckpointError(
            f"{checkpoint.source}: only what the C++ kernels can compute is split or streamed, "
            f"and {why_not}; "
            "leave target.split, target.resident, target.prefill and memory.vram out"
        )
    rounded = wanted.weights == "int8" or (wanted.weights == "bf16" and wanted.asked == "half")
    if (
        rounded or wanted.backend == "kernels"
    ):  # the remedies below are not to lead into another refusal
        _try_library(skeleton_of(), checkpoint, digest, wanted)
    if wanted.backend == "kernels":
        other = "backend library and weights fp32" if rounded else "backend library"
        raise CheckpointError(f"{checkpoint.source}: {why_not}; or use {other}")
    if wanted.backend == "library" and wanted.weights == "int8":
        raise CheckpointError(
            f"{checkpoint.source}: target.backend = 'library' has no int8 weights: leave it "
            "out, or use weights fp32"
        )
    if wanted.weights == "int8":
        raise CheckpointError(
            f"{checkpoint.source}: int8 weights need the C++ kernels, and {why_not}; or use "
            "weights fp32"
        )
    if wanted.weights == "bf16" and wanted.asked == "half":
        raise CheckpointError(
            f"{checkpoint.source}: half weights of a BF16 checkpoint need the C++ kernels, and "
            f"{why_not}; or use weights fp32 or bf16"
        )
    model = _assemble(skeleton_of(), checkpoint, digest, wanted, kernels=False, choice=why_not)
    if wanted.backend == "auto":
        log.warning("%s: the library computes it, since %s", checkpoint.source, why_not)
    return model


def _try_library(skeleton: Skeleton, checkpoint: Checkpoint, digest: str, wanted: _Wanted) -> None:
    """Raise `CheckpointError` where torch's own operations cannot compute the first layers in fp32
    either."""

    def open_back_end(model: Any, plan: Plan | None) -> BackEnd:
        selection = select(planned_shapes(model, plan), weights="fp32", profile=wanted.profile)
        return _Trial(selection, device=torch.device("cpu"), oracle=_oracle_of(model))

    with contextlib.suppress(_TriedError):
        assemble(
            skeleton,
            checkpoint,
            digest,
            weights="fp32",
            choice="",
            inflate_bytes=0,
            open_back_end=open_back_end,
        )


class _TriedError(UnsupportedError):
    """As many layers were computed as a trial takes."""


class _Trial(Library):
    """The library's back end for some layers alone, so that a trial of a large model takes little
    memory."""

    def take_layer(self, layer: Any, index: int) -> Any:
        if index >= LAYERS_TRIED:
            raise _TriedError
        return super().take_layer(layer, index)


def _against_kernels(wanted: _Wanted) -> str:
    """Why the kernels are not to be tried, empty if they are."""
    if wanted.backend == "library":
        return "the settings say so"
    if wanted.weights not in KINDS:
        return f"{wanted.weights} is the library's"
    if (
        wanted.asked == "bf16"
        and wanted.backend == "auto"
        and not reason_against(CANDIDATES["bf16"][0])
    ):
        return "oneDNN multiplies bf16 with instructions that the kernels do not use"
    return fused.reason_against(KINDS[wanted.weights])


def _assemble(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    digest: str,
    wanted: _Wanted,
    *,
    kernels: bool,
    choice: str,
) -> LanguageModel:
    def open_back_end(model: Any, plan: Plan | None) -> BackEnd:
        return _open_back_end(model, plan, wanted, kernels=kernels)

    return assemble(
        skeleton,
        checkpoint,
        digest,
        weights=wanted.weights,
        choice=choice,
        inflate_bytes=wanted.inflate_bytes,
        open_back_end=open_back_end,
    )


def assemble(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    digest: str,
    *,
    weights: str,
    choice: str,
    inflate_bytes: int,
    open_back_end: Callable[[Any, Plan | None], BackEnd],
) -> LanguageModel:
    """Read the layers one by one, each taken over by its back end before the next is read, then the
    rest."""
    model = skeleton.model
    plan = plan_inflation(model, inflate_bytes) if inflate_bytes else None
    if plan is not None:
        grow_skeleton(model, plan)
    types = Types(
        None if plan is None else LINEAR_TYPES.get(weights, torch.float32), None
    )  # dead units get numbers of the type that is wanted
    name, layers = decoder_layers(model)
    prefixes = [
        f"{name}.{index if plan is None else plan.sources[index]}" for index in range(len(layers))
    ]
    with loading("loading", _stored_bytes(checkpoint, prefixes)), _provable(checkpoint, model):
        skeleton.fill(
            model, "", types, but=layers
        )  # transformers' own forward runs around the layers, and proves them
        back_end = open_back_end(model, plan)
        for index, layer in enumerate(layers):
            skeleton.fill(layer, prefixes[index], types)
            if plan is not None:
                grow_layer(layer, index, plan)
            layers[index] = back_end.take_layer(layer, index)
            release_memory()
        del layer
        back_end.finish(model)
    gc.collect()  # what transformers' modules hold of each other
    release_memory()
    real = range(len(layers)) if plan is None else plan.real
    language_model = LanguageModel(
        model, back_end, checkpoint, digest=digest, weights=weights, choice=choice, real=real
    )
    with _provable(checkpoint, model):
        check_attention(language_model)
        if isinstance(back_end, Library):
            prove_whole(
                model,
                back_end,
                language_model.context,
                WHOLE_TOLERANCE.get(weights, ROUNDED_TOLERANCE),
            )
    return language_model


def _stored_bytes(checkpoint: Checkpoint, layers: Sequence[str]) -> int:
    """Return how much is read of a checkpoint for layers of these prefixes, as often as they occur,
    and for the rest of the model."""
    sizes = {name: stored.size_bytes for name, stored in checkpoint.tensors.items()}
    of_layer = {
        prefix: sum(size for name, size in sizes.items() if name.startswith(f"{prefix}."))
        for prefix in {*layers}
    }
    return sum(sizes.values()) - sum(of_layer.values()) + sum(of_layer[prefix] for prefix in layers)


KIND_OF_ERROR = re.compile(r"\b\w+Error: ")


class StumbledError(CheckpointError):
    """A model in whose classes a line stumbles: nobody foresaw how it is built."""


@contextlib.contextmanager
def _provable(checkpoint: Checkpoint, model: Any) -> Iterator[None]:
    """What no back end can be proved to compute is refused, and what stumbles too, by what its
    configuration and class tell."""
    what = f"{checkpoint.source}: model type {model.config.model_type} cannot be decoded here"
    try:
        yield
    except (UserError, UnsupportedError):
        raise
    except UnprovableError as error:
        stumbled = error.__cause__ is not None and not said_by(error.__cause__)
        why = why_not(model.config, type(model)) if stumbled else KIND_OF_ERROR.sub("", str(error))
        raise CheckpointError(f"{what}: {why}; {REMEDY}") from error
    except Exception as error:  # a model that is not ours may stumble in any way
        if is_out_of_memory(error):
            raise
        raise StumbledError(
            f"{what}: {said_by(error) or why_not(model.config, type(model))}; {REMEDY}"
        ) from error


def _open_back_end(model: Any, plan: Plan | None, wanted: _Wanted, *, kernels: bool) -> BackEnd:
    if kernels and wanted.stage is not None:
        staging = wanted.stage(model.config.to_dict(), wanted.weights)
        return Staged(
            model, KINDS[wanted.weights], context=context_of(model.config), staging=staging
        )
    if kernels:
        return Kernels(model, KINDS[wanted.weights], context=context_of(model.config))
    selection = select(planned_shapes(model, plan), weights=wanted.weights, profile=wanted.profile)
    return Library(selection, device=torch.device("cpu"), oracle=_oracle_of(model))


def _oracle_of(model: Any) -> Oracle:
    return Oracle(model, decoder_layers(model)[1], context_of(model.config))


def _free_bytes(device: torch.device) -> int | None:
    """Return how much memory is free on a device; None where torch cannot tell."""
    tell = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if tell is None else int(tell(device)[0])


def _on_gpu(
    checkpoint: Checkpoint, digest: str, wanted: _Wanted, device: torch.device
) -> LanguageModel:
    """As transformers has it, in one type."""
    if wanted.weights not in GPU_TYPES or wanted.backend == "kernels":
        raise CheckpointError(
            f"{checkpoint.source}: on {device} there are no {wanted.weights} weights with back "
            f"end {wanted.backend}; use weights fp32"
        )
    if (free := _free_bytes(device)) is not None and (
        why := against_device(checkpoint, wanted.weights, device, free)
    ):
        raise CheckpointError(f"{checkpoint.source}: {why}")
    model = load_transformers(checkpoint, GPU_TYPES[wanted.weights])
    real: Sequence[int] = range(len(decoder_layers(model)[1]))
    if wanted.inflate_bytes:
        plan = plan_inflation(model, wanted.inflate_bytes)
        real = plan.real
        grow_skeleton(model, plan)
        for index, layer in enumerate(decoder_layers(model)[1]):
            grow_layer(layer, index, plan)
    with _provable(checkpoint, model):
        back_end = Library(
            None, device=device, dtype=GPU_TYPES[wanted.weights], oracle=_oracle_of(model)
        )
        for index, layer in enumerate(decoder_layers(model)[1]):
            back_end.prove(layer, index)
        back_end.finish(model)
        language_model = LanguageModel(
            model,
            back_end,
            checkpoint,
            digest=digest,
            weights=wanted.weights,
            choice=f"on {device}",
            real=real,
        )
        check_attention(language_model)
        prove_whole(
            model,
            back_end,
            language_model.context,
            WHOLE_TOLERANCE["fp32"] if wanted.weights == "fp32" else ROUNDED_TOLERANCE,
        )
    return language_model


def against_device(checkpoint: Checkpoint, weights: str, device: torch.device, free: int) -> str:
    """Return why all of a checkpoint in a type of GPU_TYPES does not fit into the `free` bytes of a
    device, and what would; empty if it does."""
    numbers = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values())
    size = numbers * GPU_TYPES[weights].itemsize
    if size <= free:
        return ""
    kinds = {stored.kind for stored in checkpoint.tensors.values() if len(stored.shape) == 2}
    halved = weights == "fp32" and len(kinds) == 1 and kinds <= {"F16", "BF16"} and size <= 2 * free
    remedy = "use weights half" if halved else "take a smaller model, or leave it on the CPU"
    return (
        f"its weights take {size / 1e9:.3g} GB of {device} as {weights}, of which "
        f"{free / 1e9:.3g} GB are free: {remedy}"
    )


def context_of(config: Any) -> int:
    """The longest sequence that the model has positions for."""
    return min(int(config.max_position_embeddings), MAX_TOKENS)


def check_attention(model: LanguageModel) -> None:
    """Prove on three tokens that the model leaves attention, slots and positions to us;
    `UnprovableError` if it does not.

    Two tokens in a row must give the same logits as the same two with a sibling in the slot between
    them.
    """
    plain, tree = model.new_cache(2), model.new_cache(3)
    for cache in (plain, tree):
        if isinstance(cache, KVCache):
            cache.rows.fill_(float("nan"))
    paths = Paths.of(0, [[0], [0, 1], [0, 2]])
    expected = model.forward(torch.tensor([0, 1]), torch.tensor([0, 1]), [Segment(plain, 0, 2)])[1]
    found = model.forward(
        torch.tensor([0, 2, 1]), torch.tensor([0, 1, 1]), [Segment(tree, 0, 3, paths)]
    )[2]
    if not bool(torch.isfinite(expected).all()):
        remedy = (
            "fetch the model again"
            if model.weights == "fp32"
            else "use weights fp32, or fetch the model again"
        )
        raise CheckpointError(
            f"{model.checkpoint.source}: the model computes no finite logits with "
            f"{model.weights} weights; {remedy}"
        )
    unwritten = isinstance(plain, KVCache) and not bool(torch.isfinite(plain.rows).all())
    tolerance = PER_TENSOR_SLACK if model.weights == "int8-per-tensor" else 0.05
    if unwritten or float((expected - found).norm()) > tolerance * float(expected.norm()):
        raise UnprovableError("it does not leave masks and positions to its attention function")
