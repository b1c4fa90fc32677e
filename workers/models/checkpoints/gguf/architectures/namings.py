"""Architecture of llama.cpp -> the names of its tensors."""

from collections.abc import Mapping

from dovetail.workers.models.checkpoints.gguf.architectures.dense_namings import DENSE_NAMINGS
from dovetail.workers.models.checkpoints.gguf.architectures.mixture_namings import MIXTURE_NAMINGS
from dovetail.workers.models.checkpoints.gguf.architectures.naming import Naming
from dovetail.workers.models.checkpoints.gguf.architectures.state_namings import STATE_NAMINGS

NAMINGS: Mapping[str, Naming] = {**DENSE_NAMINGS, **MIXTURE_NAMINGS, **STATE_NAMINGS}
