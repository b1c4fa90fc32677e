"""Refuses models that cannot be proved against transformers' own, and those whose code fails."""

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.models.backends.library import Library
from dovetail.workers.models.checkpoints.architecture import REMEDY
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.configured import decoder_layers, said_by, why_refused
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.parity.following import UnprovableError, UnsupportedError

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle

LAYERS_TRIED = 8  # layers on which a remedy is tried: kinds alternate in cycles to six


class TriedError(UnsupportedError):
    """Raised after as many layers as a trial computes."""


class Trial(Library):
    """The library for only the first layers, which takes little memory."""

    def take_layer(self, layer: Any, index: int) -> Any:
        if index >= LAYERS_TRIED:
            raise TriedError
        return super().take_layer(layer, index)


KIND_OF_ERROR = re.compile(r"\b\w+Error: ")


class StumbledError(CheckpointError):
    """A model whose classes raise an unexpected error."""

    @property
    def stumble(self) -> str:
        """Return the exception raised by a call, in one line."""
        cause = self.__cause__
        return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


@contextlib.contextmanager
def provable(checkpoint: Checkpoint, model: Any) -> Iterator[None]:
    """Refuse unprovable models, and those that raise unexpected errors, by configuration and
    class."""
    what = f"{checkpoint.source}: model type {model.config.model_type} cannot be decoded here"
    try:
        yield
    except (UserError, UnsupportedError):
        raise
    except UnprovableError as error:
        stumbled = error.__cause__ is not None and not said_by(error.__cause__)
        why = (
            why_refused(model.config, type(model))
            if stumbled
            else f"{KIND_OF_ERROR.sub('', str(error))}; {REMEDY}"
        )
        raise CheckpointError(f"{what}: {why}") from error
    except Exception as error:  # foreign code may fail in any way
        if is_out_of_memory(error):
            raise
        said = said_by(error)
        why = f"{said}; {REMEDY}" if said else why_refused(model.config, type(model))
        raise StumbledError(f"{what}: {why}") from error


def oracle_of(model: Any) -> "Oracle":
    """Return transformers' own forward of a model."""
    from dovetail.workers.models.parity.oracle import Oracle  # imports transformers

    return Oracle(model, decoder_layers(model)[1], context_of(model.config))
