"""Architecture of llama.cpp -> function that makes the configuration of its files."""

from collections.abc import Callable, Mapping

from dovetail.workers.models.checkpoints.gguf.architectures.common import Configuration
from dovetail.workers.models.checkpoints.gguf.architectures.dense import DENSE
from dovetail.workers.models.checkpoints.gguf.architectures.gemma import GEMMAS
from dovetail.workers.models.checkpoints.gguf.architectures.layer_normed import LAYER_NORMED
from dovetail.workers.models.checkpoints.gguf.architectures.mixtures import MIXTURES
from dovetail.workers.models.checkpoints.gguf.architectures.states import STATES
from dovetail.workers.models.checkpoints.gguf.facts import Facts

CONFIGURATIONS: Mapping[str, Callable[[Facts], Configuration]] = {
    **DENSE,
    **GEMMAS,
    **LAYER_NORMED,
    **MIXTURES,
    **STATES,
}
