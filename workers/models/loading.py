"""Loads a causal language model: chooses its back end, and takes over and proves its layers."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers import kernels
from dovetail.workers.devices.base import Device
from dovetail.workers.models.assembly import (
    StumbledError,
    against_kernels,
    assembled,
    for_library,
    model_type,
    oracle_of,
    provable,
    try_library,
)
from dovetail.workers.models.backends.library import Library, prove_whole
from dovetail.workers.models.backends.packing import CoarseError
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.cache import CACHE_NAMES
from dovetail.workers.models.checkpoints.architecture import refuse_without_kernels
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from dovetail.workers.models.checkpoints.configured import decoder_layers, read_config
from dovetail.workers.models.checkpoints.digests import known_digest
from dovetail.workers.models.checkpoints.files import read_bytes
from dovetail.workers.models.checkpoints.footprint import read_tensors, weights_bytes
from dovetail.workers.models.checkpoints.gguf.view import blaming_the_file, spelled
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.loader import (
    Skeleton,
    load_transformers,
    open_skeleton,
    random_skeleton,
)
from dovetail.workers.models.checkpoints.quantised.searched import in_blocks
from dovetail.workers.models.language_model import (
    ROUNDED_TOLERANCE,
    WHOLE_TOLERANCE,
    LanguageModel,
    check_attention,
)
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.remembered import ProofMemory, Proofs, recall
from dovetail.workers.models.wanted import (
    FILE_KINDS,
    GPU_TYPES,
    LINEAR_TYPES,
    Stager,
    Wanted,
    _configured_type,
    check_names,
    type_of,
)

log = logging.getLogger(__name__)

RESIDENT_TYPES = {**GPU_TYPES, "int8": torch.int8}
"""A draft's type of weights on a GPU -> that of its numbers."""


def load_language_model(
    source: str,
    *,
    weights: str,
    device: str,
    backend: str = "auto",
    profile: Path | None = None,
    stage: Stager | None = None,
    cache: str | None = None,
    proof: str = "off",
    activations: str = "int8",
    context: int | None = None,
    draft: Device | None = None,
) -> LanguageModel:
    """The model in `source` (folder, hub id, id@revision), with the linears' weights as given.

    `backend`: kernels, library, or auto, the kernels where they can compute it. `profile`: the file
    that remembers what was measured of the library. `stage`: how it is spread over devices, instead
    of `device`; requires a model that the kernels can compute. `cache`: the type of keys and
    values, one of `protocol.settings.CACHES`; None: fp32 on the CPU, that of the weights on a
    device. `activations`: int8 or fp32, with weights `int4` and `file`. `proof`: auto, a remembered
    proof is enough; anew, it is made again and remembered; off, it is made and not remembered.
    `context`: the longest sequence; None: what the model has. `draft`: the `device` of a model that
    drafts, whose products may round to the type of its weights.
    """
    check_names(weights, backend)
    folder = find_folder(source)
    with blaming_the_file(folder):
        file = folder / "config.json"
        known = proof == "auto" and Proofs(read_bytes(file)).known
        if not known:
            read_config(file)  # what cannot be decoded is refused before all weights are read
        checkpoint = replace(open_checkpoint(source, wait=known), context=context)
        on_cpu = stage is not None or torch.device(device).type == "cpu"
        cache = cache or ("fp32" if on_cpu else "auto")
        own = type_of(weights, checkpoint, activations)
        wanted = Wanted(weights, own, backend, profile, stage, cache, proof)
        if on_cpu and (why := kernels.why_not()):  # before the weights are read
            wanted.refuse_placement(checkpoint.source, why)
            wanted.refuse_library(checkpoint.source, why)
        try:
            if on_cpu:
                return _on_cpu(lambda: open_skeleton(checkpoint), checkpoint, wanted)
            return _on_gpu(checkpoint, wanted, torch.device(device), draft)
        except Exception:
            checkpoint.digesting.result()  # errors of its files come first
            raise


def random_language_model(
    config_folder: str | Path,
    *,
    weights: str,
    backend: str = "auto",
    layers: int | None = None,
    profile: Path | None = None,
    stage: Stager | None = None,
    cache: str = "fp32",
    context: int | None = None,
) -> LanguageModel:
    """Return a model of random weights from a config.json, to measure before a download. `layers`:
    in place of the configured number."""
    check_names(weights, backend)
    folder = Path(config_folder)
    own = _configured_type(weights, folder)
    wanted = Wanted(weights, own, backend, profile, stage, cache)
    facts = VocabularyFacts(digest="random", size=1, end=(), begin=None, template="")
    stored = LINEAR_TYPES[own]
    source = f"{spelled(str(config_folder))} (random weights)"
    table = TokenTable.of({})
    checkpoint = Checkpoint(folder, known_digest("random"), {}, source, b"", table, facts)
    return _on_cpu(
        lambda: random_skeleton(folder, layers=layers, stored=stored, context=context),
        checkpoint,
        wanted,
    )


def _on_cpu(
    skeleton_of: Callable[[], Skeleton], checkpoint: Checkpoint, wanted: Wanted
) -> LanguageModel:
    """The kernels if possible, else the library."""
    why_not = against_kernels(wanted) or for_library(wanted)
    if not why_not:
        memory = ProofMemory(checkpoint, wanted)
        if (model := recall(memory, checkpoint, wanted)) is not None:
            return model
        skeleton = skeleton_of()
        kind = skeleton.model.config.model_type
        outline = memory.outline(skeleton)
        try:
            model = assembled(
                in_blocks(skeleton, checkpoint if checkpoint.tensors else None, wanted.weights),
                checkpoint,
                wanted,
                kernels=True,
                choice="the C++ kernels compute it",
            )
            memory.keep(outline, model)
            return model
        except CoarseError as error:
            remedy = "use weights fp32, or those of the file (file, half)"
            raise checkpoint.refusal(f"{error}: {remedy}") from error
        except UnsupportedError as error:
            why_not = _why_rounded(wanted, checkpoint) or (
                f"the C++ kernels cannot compute model type {kind}: {error}"
            )
        except StumbledError as error:
            if wanted.stage is not None and isinstance(error.__cause__, NotImplementedError):
                use = "use target.weights half or fp32, or leave target.split and target.device out"
                what = f"torch cannot compute it with {wanted.weights} weights on that device"
                raise checkpoint.refusal(f"{what} ({error.stumble}); {use}") from error
            why_not = f"the C++ kernels cannot compute model type {kind}: {error.stumble}"
    if wanted.stage is None:
        refuse_without_kernels(model_type(checkpoint), checkpoint.source, why_not)
    wanted.refuse_placement(checkpoint.source, why_not)
    if wanted.rounded or wanted.backend == "kernels":
        if wanted.backend != "library":
            try_library(skeleton_of(), checkpoint, wanted)  # a remedy must not lead to a refusal
        wanted.refuse_library(checkpoint.source, why_not)
    model = assembled(skeleton_of(), checkpoint, wanted, kernels=False, choice=why_not)
    if wanted.backend == "auto":
        log.warning("%s: the library computes it, because %s", checkpoint.source, why_not)
    return model


def _why_rounded(wanted: Wanted, checkpoint: Checkpoint) -> str:
    """Return why the kernels refuse weights bf16 of another checkpoint; empty if they do not."""
    rounds = wanted.asked == "bf16" and checkpoint.tensors  # random ones are made in bf16
    if not rounds or type_of("stored", checkpoint) == "bf16":
        return ""
    return "weights bf16 are rounded, and the C++ kernels multiply weights as they are stored"


def _free_bytes(device: torch.device) -> int | None:
    tell = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if tell is None else int(tell(device)[0])


def _on_gpu(
    checkpoint: Checkpoint, wanted: Wanted, device: torch.device, draft: Device | None
) -> LanguageModel:
    """Load a draft as the kernels' layers if it is described, else as transformers' model."""
    why_not = ""
    if draft is not None and wanted.weights in (*RESIDENT_TYPES, *FILE_KINDS):
        _check_fits(checkpoint, wanted.weights, device)
        found = resident(checkpoint, wanted, draft)
        if isinstance(found, LanguageModel):
            return found
        why_not = found
    _refuse_library(checkpoint, wanted, device, why_not)
    _check_fits(checkpoint, wanted.weights, device)
    if why_not:
        log.warning(
            "%s: the library computes it on %s, one operation at a time, because %s",
            *(checkpoint.source, device, why_not),
        )
    return _library_on_gpu(checkpoint, wanted, device)


def _refuse_library(
    checkpoint: Checkpoint, wanted: Wanted, device: torch.device, why_not: str
) -> None:
    """`CheckpointError` for what transformers cannot compute on a GPU. `why_not`: nor the kernels'
    layers."""
    where = f"the settings say device {device}; leave that out"
    refuse_without_kernels(model_type(checkpoint), checkpoint.source, where)
    if wanted.weights not in GPU_TYPES or wanted.backend == "kernels":
        because = f", because {why_not}" if why_not else ""
        what = f"{wanted.weights} weights with back end {wanted.backend}"
        raise checkpoint.refusal(f"no {what} on {device}{because}; use weights fp32")
    own = CACHE_NAMES[GPU_TYPES[wanted.weights]]
    if wanted.cache not in ("auto", own):
        cache = f"target.cache = {wanted.cache!r}: leave it out"
        raise checkpoint.refusal(f"on {device} keys and values are {own}, as the weights; {cache}")


def _library_on_gpu(checkpoint: Checkpoint, wanted: Wanted, device: torch.device) -> LanguageModel:
    model = load_transformers(checkpoint, GPU_TYPES[wanted.weights])
    with provable(checkpoint, model):
        dtype = GPU_TYPES[wanted.weights]
        back_end = Library(None, device=device, dtype=dtype, oracle=oracle_of(model))
        for index, layer in enumerate(decoder_layers(model)[1]):
            back_end.prove(layer, index)
        back_end.finish(model)
        language_model = LanguageModel(
            model, back_end, checkpoint, weights=wanted.weights, choice=f"on {device}"
        )
        check_attention(language_model)
        exact = wanted.weights == "fp32"
        tolerance = WHOLE_TOLERANCE["fp32"] if exact else ROUNDED_TOLERANCE
        prove_whole(model, back_end, language_model.context, tolerance)
    return language_model


def _check_fits(checkpoint: Checkpoint, weights: str, device: torch.device) -> None:
    free = _free_bytes(device)
    if free is not None and (why := against_device(checkpoint, weights, device, free)):
        raise checkpoint.refusal(why)


def resident(checkpoint: Checkpoint, wanted: Wanted, draft: Device) -> LanguageModel | str:
    """Return a draft whose described layers all lie on its device; or why that is impossible."""
    if why_not := against_kernels(wanted):
        return why_not

    def stage(config: Mapping[str, Any], *_: Any) -> Staging:
        places = [Place.RESIDENT] * config["num_hidden_layers"]
        return Staging(places, draft.transfer(), draft=draft)

    skeleton = open_skeleton(checkpoint)
    kind = skeleton.model.config.model_type
    try:
        model = assembled(
            skeleton,
            checkpoint,
            replace(wanted, stage=stage, cache="fp32" if wanted.weights == "fp32" else "half"),
            kernels=True,
            choice=f"torch computes the kernels' layers on {draft.name}",
        )
    except UnsupportedError as error:
        return f"model type {kind} is not described as the kernels' are: {error}"
    except StumbledError as error:
        return f"the kernels' layers cannot be computed on {draft.name}: {error.stumble}"
    model.device = draft.torch_device
    return model


def against_device(checkpoint: Checkpoint, weights: str, device: torch.device, free: int) -> str:
    """Return why a checkpoint in this type exceeds the `free` bytes of a device; empty if it
    fits."""
    if weights in FILE_KINDS:
        size = weights_bytes(read_tensors(checkpoint.folder), "file")
    else:
        numbers = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values())
        size = numbers * RESIDENT_TYPES[weights].itemsize
    if size <= free:
        return ""
    kinds = {stored.kind for stored in checkpoint.tensors.values() if len(stored.shape) == 2}
    halved = weights == "fp32" and len(kinds) == 1 and kinds <= {"F16", "BF16"} and size <= 2 * free
    remedy = "use weights half" if halved else "take a smaller model, or leave it on the CPU"
    return (
        f"its weights take {size / 1e9:.3g} GB of {device} as {weights}, of which "
        f"{free / 1e9:.3g} GB are free: {remedy}"
    )
