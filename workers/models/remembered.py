"""Loads a model by its cached proof and our descriptions, without transformers. The key of a proof
has all that it depends on: checkpoint, weights, our sources, kernels, versions of torch,
transformers and Python; not the instruction set. The logits of a few rows from all over the context
must be the proved ones, bit for bit; else the proof is made again."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dovetail.protocol.files import cache_folder, keep_sealed, read_sealed
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.assembly import StumbledError, assemble
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import KnownTables, LayerParts, plan_of
from dovetail.workers.models.backends.packing import KernelNorm
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.configured import base_model, decoder_layers
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.files import read_bytes
from dovetail.workers.models.checkpoints.loader import Skeleton, pieced_skeleton, stored_skeleton
from dovetail.workers.models.checkpoints.quantised.searched import in_blocks
from dovetail.workers.models.checkpoints.tables import WidenedEmbedding
from dovetail.workers.models.families.description import Experts
from dovetail.workers.models.families.registry import FAMILIES
from dovetail.workers.models.language_model import BackEnd, LanguageModel
from dovetail.workers.models.parity.following import UnprovableError, UnsupportedError
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.wanted import KINDS, Wanted

log = logging.getLogger(__name__)

FOLDER = "proofs"
MOST_KEPT = 64  # most proofs that are kept; the oldest are removed
ROOM = Path(__file__).parent.parent
SOURCES = ("models", "kernels", "devices")  # folders that decide what a model computes


@dataclass(frozen=True)
class Proof:
    """transformers' facts that loading needs, and the digest of the model's logits."""

    config: Mapping[str, Any]  # the configuration with transformers' defaults
    modules: Sequence[Sequence[Any]]  # path, kind and measures of each module, parents first
    base: str  # the path of the part without the head
    embedding: str
    head: str
    stored: Mapping[str, str] | None  # parameter -> tensor of the checkpoint; None: of pieces
    tied: Mapping[str, str]  # tensor -> one that may stand for it, of models in pieces
    transposed: Sequence[str]
    angles: Mapping[str, tuple[Sequence[float], float]]  # table -> its frequencies and factor
    attention: Sequence[Mapping[str, Any]]
    """The arguments with which each layer calls its attention, in the form of `attention.Noted`."""
    logits: str  # the digest of logits, see `sample`
    made: str  # the day of the proof


LIBRARIES = ("torch", "transformers", "safetensors")
"""Distributions whose whole METADATA counts: finding the version in it takes longer."""


@cache
def basis() -> str:
    """Return the digest of everything but the model that a proof depends on."""
    state = kernels.LIBRARY.stat()
    whole = hashlib.sha256()
    facts = (
        *(importlib.metadata.distribution(name).read_text("METADATA") for name in LIBRARIES),
        platform.python_version(),
        platform.machine(),
        (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns),
    )
    whole.update(repr(facts).encode())
    for folder in SOURCES:
        for file in sorted((ROOM / folder).rglob("*.py")):
            whole.update(f"\0{file.relative_to(ROOM)}\0".encode() + file.read_bytes())
    return whole.hexdigest()


class Proofs:
    """The proofs of one configuration, in the user's cache."""

    def __init__(self, configuration: bytes) -> None:
        """`configuration`: the content of config.json."""
        self.folder, self._configuration = cache_folder() / FOLDER, configuration

    @cached_property
    def group(self) -> str:
        """Return the key of the configuration's proofs; requires the kernels."""
        return hashlib.sha256(f"{basis()}\0".encode() + self._configuration).hexdigest()[:32]

    @property
    def known(self) -> bool:
        """Return whether this configuration has proofs; needs the kernels."""
        return kernels.available() and any(self.folder.glob(f"{self.group}-*.json"))

    def find(self, key: str) -> Proof | None:
        """Return the proof stored under a key; None if it is missing or damaged."""
        try:
            return Proof(**json.loads(read_sealed(self._file(key), key)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning(
                "the proof %s cannot be read (%s): it is made again", self._file(key), error
            )
            return None

    def keep(self, key: str, proof: Proof) -> None:
        """Save a proof; log a failure."""
        text = json.dumps(dataclasses.asdict(proof))
        try:
            keep_sealed(self._file(key), key, text, MOST_KEPT)
        except OSError as error:
            why = error.strerror or error
            log.warning("proofs cannot be saved in %s (%s)", self.folder, why)

    def drop(self, key: str) -> None:
        """Forget a proof."""
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{self.group}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def tell_proof(day: str, name: str) -> None:
    """Report on stderr if a worker's model was loaded by a proof, with its date."""
    if day:
        print(
            f"{name}: loaded by its proof of {day}, in {cache_folder() / FOLDER}", file=sys.stderr
        )


def digest_of_logits(logits: torch.Tensor) -> str:
    """Return the SHA-256 of logits [R, V], bit for bit."""
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()


FOLLOWING = ("num_hidden_layers", "layers_block_type", "layer_types", "mlp_layer_types")
"""Fields that the configurations of some families have from others."""
TRAITS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")
"""The attributes of transformers' experts that describe their layout."""
GATE = "_apply_gate"  # the function that reads them
SAMPLED = 4  # rows whose logits are compared


class ProofMemory:
    """Access to remembered proofs while loading one model."""

    def __init__(self, checkpoint: Checkpoint, wanted: Wanted) -> None:
        file = checkpoint.folder / "config.json"
        self._mode = "off" if wanted.stage is not None else wanted.proof
        self._checkpoint, self._wanted = checkpoint, wanted
        if self._mode != "off":
            self._proofs = Proofs(read_bytes(file))

    @property
    def _key(self) -> str:
        wanted, context = self._wanted, self._checkpoint.context
        digest = self._checkpoint.digest
        return f"{digest} {KINDS[wanted.weights].name} {wanted.cache_type} {context}"

    def proof(self) -> Proof | None:
        """Return a proof that suffices to load the model; None if there is none."""
        if self._mode != "auto" or not self._proofs.known:
            return None
        return self._proofs.find(self._key)

    def outline(self, skeleton: Skeleton) -> Proof | None:
        """Return the beginning of a proof to be stored; None if none is."""
        return None if self._mode == "off" else outline_of(skeleton)

    def keep(self, outline: Proof | None, model: LanguageModel) -> None:
        """Store the proof of a model, if it can be loaded by one."""
        if outline is not None and (proof := completed(outline, model)) is not None:
            self._proofs.keep(self._key, proof)

    def drop(self, why: str) -> None:
        """Drop the proof, and report it."""
        source = self._checkpoint.source
        log.warning("%s: its remembered proof is dropped and made again: %s", source, why)
        self._proofs.drop(self._key)


def recall(memory: ProofMemory, checkpoint: Checkpoint, wanted: Wanted) -> LanguageModel | None:
    """Return the model loaded with its remembered proof; None if there is none that holds."""
    if (proof := memory.proof()) is None:
        return None

    def open_back_end(model: Any) -> BackEnd:
        return Recalled(
            model,
            KINDS[wanted.weights],
            context=context_of(model.config),
            cache=wanted.cache_type,
            noted=[Noted(**noted) for noted in proof.attention],
            angles=proof.angles,
        )

    try:
        model = assemble(
            skeleton_by(proof, checkpoint, wanted),
            checkpoint,
            weights=wanted.weights,
            choice=f"the C++ kernels compute it, as proved on {proof.made}",
            open_back_end=open_back_end,
        )
    except (UnsupportedError, UnprovableError, StumbledError) as error:
        memory.drop(str(error))
        return None
    if (found := sample(model)) != proof.logits:
        memory.drop(f"logits with the digest {found[:12]} where {proof.logits[:12]} were proved")
        return None
    model.proved = proof.made
    return model


class OutlinePart(nn.Module):
    """A module with parameters or children only: a norm, a convolution, experts."""

    def __init__(
        self,
        shapes: Mapping[str, list[int]],
        buffers: Mapping[str, list[int]],
        normalized: list[int] | None,
        traits: Mapping[str, bool],
    ) -> None:
        """`traits`: the layout of experts."""
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, _meta(shape))
        for name, shape in buffers.items():
            self.register_buffer(name, torch.empty(shape, device="meta"))
        if normalized is not None:
            self.normalized_shape = tuple(normalized)
        for name, value in traits.items():
            setattr(self, name, value)


class Outline(nn.Module):
    """A model without numbers that has transformers' modules by name, but no code."""

    def __init__(self, proof: Proof) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(**proof.config)
        self._base, self._embedding, self._head = proof.base, proof.embedding, proof.head
        for path, kind, measures in proof.modules:
            self.add_at(path, _module(kind, measures))
        self.requires_grad_(False)

    def add_at(self, path: str, module: nn.Module) -> None:
        """Add a module below an existing one."""
        parent, _, name = path.rpartition(".")
        self.get_submodule(parent).add_module(name, module)

    @property
    def base_model(self) -> nn.Module:
        """Return the part without the head."""
        return self.get_submodule(self._base)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        return self.get_submodule(self._embedding)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.get_submodule(self._head)

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the existing head by another."""
        self.set_submodule(self._head, head)


def outline_of(skeleton: Skeleton) -> Proof | None:
    """Return the beginning of a proof, before layers are taken over; None if transformers' code is
    needed."""
    model, stored = skeleton.model, skeleton.stored
    config = _plain(_fields(model.config))
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    read = stored is not None or skeleton.tied is not None
    if not read or config is None or embedding not in paths or head not in paths:
        return None
    if not _described(model.config, config):
        return None
    sparse = _sparse(model)
    modules = [
        _measured(path, module, matrices=path.startswith(sparse))
        for path, module in model.named_modules()
        if path
    ]
    if None in modules:
        return None
    return Proof(
        config=config,
        modules=modules,  # type: ignore[arg-type]  # none of them is None
        base=paths[base_model(model)],
        embedding=paths[embedding],
        head=paths[head],
        stored=None if stored is None or skeleton.tied is not None else dict(stored),
        tied=dict(skeleton.tied or {}),
        transposed=sorted(skeleton.transposed),
        angles={},
        attention=(),
        logits="",
        made=time.strftime("%Y-%m-%d"),
    )


def completed(outline: Proof, model: LanguageModel) -> Proof | None:
    """Return a proved model's proof; None if its logits need more than an outline has."""
    back_end = model.back_end
    if type(back_end) is not Kernels or not back_end.direct:
        return None
    return dataclasses.replace(
        outline,
        angles=back_end.angles,
        attention=[dataclasses.asdict(noted) for noted in back_end.noted],
        logits=sample(model),
    )


def skeleton_by(proof: Proof, checkpoint: Checkpoint, wanted: Wanted) -> Skeleton:
    """Return the skeleton of a checkpoint by its proof."""
    model = Outline(proof)
    if proof.stored is None:
        plain = pieced_skeleton(model, checkpoint, proof.tied, checked=True)
    else:
        plain = stored_skeleton(model, checkpoint, proof.stored, frozenset(proof.transposed))
    return in_blocks(plain, checkpoint, wanted.weights)


def sample(model: LanguageModel) -> str:
    """Return the digest of the logits of a few tokens at positions from all over the context."""
    count = min(SAMPLED, model.context)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(model.vocabulary_size, (count,), generator=generator)
    positions = torch.linspace(0, model.context - 1, count, dtype=torch.float64).long()
    cache = model.new_cache(count)
    return digest_of_logits(model.forward(tokens, positions, [Segment(cache, 0, count)]))


def _sparse(model: Any) -> tuple[str, ...]:
    name, layers = decoder_layers(model)
    family = FAMILIES[model.config.model_type]
    specs = (family.layer(model.config, index) for index in range(len(layers)))
    return tuple(f"{name}.{i}." for i, spec in enumerate(specs) if isinstance(spec.mlp, Experts))


def _measured(path: str, module: nn.Module, *, matrices: bool) -> tuple[str, str, Any] | None:
    """Return path, kind and measures of a module; None if it is more. `matrices`: experts and
    routers."""
    shapes = {name: list(part.shape) for name, part in module.named_parameters(recurse=False)}
    if isinstance(module, nn.ModuleList):
        return path, "list", []
    if type(module) is nn.Linear:
        return (path, "linear", [module.in_features, module.out_features, module.bias is not None])
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "embed_scale", None)
        if type(module) is not nn.Embedding and scale is None:
            return None
        return path, "embedding", [*shapes["weight"], None if scale is None else float(scale)]
    several = any(len(shape) > 1 for shape in shapes.values())
    if several and not matrices and type(module) is not nn.Conv1d:
        return None
    normalized = getattr(module, "normalized_shape", None)
    kept = module.state_dict()  # no buffers that follow from the configuration
    buffers = {name: list(kept[name].shape) for name in module._buffers if name in kept}
    traits = {name: value for name in TRAITS if type(value := getattr(module, name, None)) is bool}
    if hasattr(module, GATE):
        traits[GATE] = True
    measures = [shapes, buffers, None if normalized is None else list(normalized), traits]
    return path, "part", measures


def _module(kind: str, measures: Any) -> nn.Module:
    if kind == "list":
        return nn.ModuleList()
    if kind == "linear":
        inputs, outputs, biased = measures
        return nn.Linear(inputs, outputs, bias=biased, device="meta")
    if kind == "embedding":
        rows, width, scale = measures
        if scale is not None:
            return WidenedEmbedding(_meta([rows, width]), scale)
        return nn.Embedding(rows, width, _weight=_meta([rows, width]))
    return OutlinePart(*measures)


def _meta(shape: list[int]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration, those that follow from others, and other names."""
    names = (*FOLLOWING, *(getattr(config, "attribute_map", None) or {}))
    follow = {name: value for name in names if (value := getattr(config, name, None))}
    return {**config.to_dict(), **follow}


def _plain(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a configuration after a round trip through JSON; None if it is not JSON."""
    try:
        told: dict[str, Any] = json.loads(json.dumps(config))
    except (TypeError, ValueError):
        return None
    return told


def _described(config: Any, plain: Mapping[str, Any]) -> bool:
    """Return whether the plain configuration gives the same descriptions of all layers."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return False
    told = SimpleNamespace(**plain)
    try:
        pairs = [
            (family.layer(config, index), family.layer(told, index))
            for index in range(config.num_hidden_layers)
        ]
    except (AttributeError, LookupError, TypeError):
        return False
    return all(own == other for own, other in pairs)


class Recalled(Kernels):
    """Takes over layers that were proved before."""

    def __init__(
        self,
        model: Any,
        kind: Kind,
        *,
        context: int,
        cache: torch.dtype,
        noted: Sequence[Noted],
        angles: Mapping[str, tuple[Sequence[float], float]],
    ) -> None:
        """`noted`: attention of each layer; `angles`: frequencies and factor of each table."""
        kernels.set_threads(torch.get_num_threads())
        self._begin(model, kind, KnownTables(angles, context), cache)
        self._family = FAMILIES[model.config.model_type]
        self._known, self._inputs, self._streams = noted, None, None

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Pack a layer."""
        assert self._family is not None
        parts = LayerParts(layer, self._family.layer(self._model.config, index))
        self._arrange(parts)
        matrices = {
            name: self._pack_layer(self._kind, linears) for name, linears in parts.linears.items()
        }
        experts, noted = self._pack_experts(parts, matrices), self._known[index]
        plan = plan_of(parts, index, noted, matrices, self._tables, self._kind)
        self._take(replace(plan, experts=experts))
        self.noted.append(noted)
        self._taken += 1
        return nn.Identity()

    def _loop(self, layers: nn.Module) -> nn.Module:
        """Return the layers as they are: transformers' own forward is not run."""
        return layers

    def _prove_end(self, norm: KernelNorm, head: nn.Linear, matrix: PackedMatrix) -> None:
        """Prove nothing: the remembered proof covers it."""

    def _prove_cache(self) -> None:
        """Do nothing: nothing needs a proof."""

    def _nothing_else(self) -> bool:
        """Return True: only such models are remembered."""
        return True
