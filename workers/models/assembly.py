"""Turns a skeleton into a model: its layers are read one by one and passed to a back end. Models
that cannot be proved against transformers' own, and those whose code fails, are refused."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.memory import release_memory
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.models.backends import packing
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.library import Library, prove_whole
from dovetail.workers.models.backends.linear import CANDIDATES, reason_against, select
from dovetail.workers.models.backends.sizes import Matrices
from dovetail.workers.models.backends.staged import ResidentDraft, Staged
from dovetail.workers.models.checkpoints.architecture import REMEDY
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.configured import (
    decoder_layers,
    fields_of,
    said_by,
    why_refused,
)
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import Tensor, read_tensors
from dovetail.workers.models.checkpoints.loader import Skeleton, Types, expert_shapes, linear_shapes
from dovetail.workers.models.language_model import (
    ROUNDED_TOLERANCE,
    WHOLE_TOLERANCE,
    BackEnd,
    LanguageModel,
    check_attention,
)
from dovetail.workers.models.parity.following import UnprovableError, UnsupportedError
from dovetail.workers.models.wanted import BLOCK_WEIGHTS, FILE_KINDS, KINDS, Wanted
from dovetail.workers.progress import loading

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle

LAYERS_TRIED = 8  # layers for testing a remedy: kinds alternate in cycles of up to six


class TriedError(UnsupportedError):
    """Raised after as many layers as a trial computes."""


class Trial(Library):
    """The library for only the first layers, which takes little memory."""

    def take_layer(self, layer: Any, index: int) -> Any:
        if index >= LAYERS_TRIED:
            raise TriedError
        return super().take_layer(layer, index)


class StumbledError(CheckpointError):
    """A model whose classes raise an unexpected error."""

    @property
    def stumble(self) -> str:
        """Return the exception raised by a call, in one line."""
        cause = self.__cause__
        return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


@contextlib.contextmanager
def provable(checkpoint: Checkpoint, model: Any) -> Iterator[None]:
    """Refuse unprovable models, and those that raise unexpected errors, naming configuration and
    class. Without transformers' configuration, as after a remembered proof, only the error itself
    is reported."""
    blamed = hasattr(model.config, "to_dict")
    what = f"{checkpoint.source}: model type {model.config.model_type} cannot be decoded here"
    try:
        yield
    except (UserError, UnsupportedError):
        raise
    except UnprovableError as error:
        if not blamed:
            raise
        stumbled = error.__cause__ is not None and not said_by(error.__cause__)
        why = why_refused(model.config, type(model)) if stumbled else f"{error}; {REMEDY}"
        raise CheckpointError(f"{what}: {why}") from error
    except Exception as error:  # foreign code may fail in any way
        if is_out_of_memory(error):
            raise
        said = said_by(error) or ("" if blamed else f"{type(error).__name__}: {error}")
        why = f"{said}; {REMEDY}" if said else why_refused(model.config, type(model))
        raise StumbledError(f"{what}: {why}") from error


def oracle_of(model: Any) -> "Oracle":
    """Return transformers' own forward of a model."""
    from dovetail.workers.models.parity.oracle import Oracle  # imports transformers

    return Oracle(model, decoder_layers(model)[1], context_of(model.config))


def assemble(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    *,
    weights: str,
    choice: str,
    open_back_end: Callable[[Any], BackEnd],
) -> LanguageModel:
    """Read the layers one by one, passing each to the back end before the next, then the rest."""
    model = skeleton.model
    types = Types(None, None, blocks=weights in BLOCK_WEIGHTS)
    name, layers = decoder_layers(model)
    size = sum(stored.size_bytes for stored in checkpoint.tensors.values()) or skeleton.size_bytes
    with loading("loading", size), provable(checkpoint, model):
        skeleton.fill(
            model, "", types, but=layers
        )  # transformers' own forward runs around the layers, and proves them
        back_end = open_back_end(model)
        one_by_one = not isinstance(back_end, Library)
        for index, layer in enumerate(layers):
            skeleton.fill(layer, f"{name}.{index}", types, one_by_one=one_by_one)
            layers[index] = back_end.take_layer(layer, index)
            release_memory()
        del layer
        back_end.finish(model)
    gc.collect()  # references among transformers' modules
    release_memory()
    language_model = LanguageModel(model, back_end, checkpoint, weights=weights, choice=choice)
    with loading("proving", 0), provable(checkpoint, model):
        check_attention(language_model)
        if isinstance(back_end, Library):
            prove_whole(
                model,
                back_end,
                language_model.context,
                WHOLE_TOLERANCE.get(weights, ROUNDED_TOLERANCE),
            )
    return language_model


def model_type(checkpoint: Checkpoint) -> str:
    """The model type of the part of a checkpoint that is decoded."""
    return str(text_part(read_json(checkpoint.folder / "config.json")).get("model_type"))


def against_kernels(wanted: Wanted) -> str:
    """Why the kernels must not be tried; empty if they may be."""
    if wanted.backend == "library":
        return "the settings choose the library"
    if wanted.weights not in KINDS:
        return f"{wanted.weights} is the library's"
    return packing.reason_against(KINDS[wanted.weights])


def for_library(wanted: Wanted) -> str:
    """Return why the library computes a model that the kernels could; empty if it does not."""
    if (
        wanted.asked == "bf16"
        and wanted.backend == "auto"
        and wanted.stage is None
        and not reason_against(CANDIDATES["bf16"][0])
    ):
        return "oneDNN multiplies bf16 with instructions that the kernels do not use"
    return ""


def assembled(
    skeleton: Skeleton, checkpoint: Checkpoint, wanted: Wanted, *, kernels: bool, choice: str
) -> LanguageModel:
    """Return a skeleton's model, computed by the kernels or by torch; `choice`: why."""
    tensors = read_tensors(checkpoint.folder) if wanted.weights in FILE_KINDS else ()
    return assemble(
        skeleton,
        checkpoint,
        weights=wanted.weights,
        choice=choice,
        open_back_end=lambda model: _open_back_end(model, wanted, tensors, kernels=kernels),
    )


def _open_back_end(
    model: Any, wanted: Wanted, tensors: Sequence[Tensor], *, kernels: bool
) -> BackEnd:
    if kernels and wanted.stage is not None:
        matrices = Matrices(linear_shapes(model), expert_shapes(model), tensors)
        staging = wanted.stage(fields_of(model.config), wanted.weights, matrices)
        opened = Staged if staging.draft is None else ResidentDraft
        return opened(
            model,
            KINDS[wanted.weights],
            context=context_of(model.config),
            staging=staging,
            cache=wanted.cache_type,
        )
    if kernels:
        return Kernels(
            model, KINDS[wanted.weights], context=context_of(model.config), cache=wanted.cache_type
        )
    selection = select(linear_shapes(model), weights=wanted.weights, profile=wanted.profile)
    return Library(selection, device=torch.device("cpu"), oracle=oracle_of(model))


def try_library(skeleton: Skeleton, checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Raise `CheckpointError` if torch cannot compute the first layers in fp32 either."""

    def open_back_end(model: Any) -> BackEnd:
        selection = select(linear_shapes(model), weights="fp32", profile=wanted.profile)
        return Trial(selection, device=torch.device("cpu"), oracle=oracle_of(model))

    with contextlib.suppress(TriedError):
        assemble(skeleton, checkpoint, weights="fp32", choice="", open_back_end=open_back_end)
