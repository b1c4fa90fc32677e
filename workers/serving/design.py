"""The design of a model, read from its config.json, and the keys under which its measured costs
are stored."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.protocol.calibration import STATELESS, StateTraffic
from dovetail.protocol.experts import DENSE, Mixture, count_experts
from dovetail.protocol.profile import ProfileKey, machine_key, shapes_key
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.kernels import shards
from dovetail.workers.models.backends.layer_parts import without_fixed_shapes
from dovetail.workers.models.backends.linear import profile_key
from dovetail.workers.models.backends.sizes import Matrices, Shapes, traffic_of
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.footprint import linears_bytes, read_tensors
from dovetail.workers.models.checkpoints.gguf.view import mix_of
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.loader import expert_shapes, linear_shapes, random_skeleton
from dovetail.workers.models.families.registry import FAMILIES
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.wanted import FILE_KINDS


@dataclass(frozen=True)
class Design:
    """The design of a model: its config.json, and the layers that the settings add."""

    folder: Path
    shapes: Shapes  # [out, in] of all linears, including the head and every expert's
    layers: int
    context: int
    mixture: Mixture = DENSE
    experts: Shapes = ()  # those of experts alone, which are the last of `shapes`
    mix: str = ""  # a description of the number types of a GGUF file
    blocks_bytes: int = 0  # the bytes of its matrices as blocks; 0 if they are not in blocks
    uncoded: str = ""
    """The parts of its layers that levels of fixed shapes on a GPU do not cover; empty: none."""
    states: StateTraffic = STATELESS  # the traffic of its states in a pass

    @property
    def matrices(self) -> Matrices:
        """The matrices of the model, experts separately."""
        return Matrices(self.shapes[: len(self.shapes) - len(self.experts)], self.experts)

    @property
    def weights(self) -> int:
        """The number of weights of the linears."""
        return sum(n * k for n, k in self.shapes)

    @property
    def active(self) -> int:
        """The number of weights that one row uses."""
        return round(self.weights * self.mixture.active)


def design_key(design: Design, weights: str) -> str:
    """Return the part of a profile's key for the matrices: those of a file also differ in their
    types."""
    return shapes_key(list(design.shapes), *((design.mix,) if weights in FILE_KINDS else ()))


def read_design(settings: TargetSettings, layers: int | None = None) -> Design:
    """Return the design of the settings' model from its config.json alone; `layers`: this many
    instead of the configured number."""
    folder = find_folder(settings.model)
    model = random_skeleton(
        folder, layers=layers, stored=torch.float16, context=settings.longest
    ).model
    linears, experts = linear_shapes(model), expert_shapes(model)
    routed, rest = (sum(n * k for n, k in shapes) for shapes in (experts, linears))
    count, chosen = count_experts(model.config.to_dict())
    mixture = Mixture(count, chosen, routed / (routed + rest)) if routed else DENSE
    layers = len(decoder_layers(model)[1])
    shapes, context = [*linears, *experts], context_of(model.config)
    family, states = FAMILIES.get(model.config.model_type), traffic_of(model.config.to_dict())
    if family is None:
        return Design(folder, shapes, layers, context, mixture, experts)
    blocks_bytes = linears_bytes(read_tensors(folder)) if (mix := mix_of(folder)) else 0
    specs = (family.layer(model.config, index) for index in range(layers))
    uncoded = next(filter(None, map(without_fixed_shapes, specs)), "")
    return Design(
        *(folder, shapes, layers, context, mixture, experts, mix, blocks_bytes),
        *(uncoded, states),
    )


def calibration_key(model: LanguageModel, design: Design) -> ProfileKey:
    """Return the key of a calibration: that of the library's measurements or, with the kernels,
    with their version and instruction set in place of torch's."""
    if model.backend == "library":
        return profile_key(design.shapes, weights=model.weights)
    software = f"{model.kernels}-{kernels.isa().name.lower()}"
    shapes = design_key(design, model.weights)
    return ProfileKey(
        machine=machine_key(),
        software=software,
        weights=model.weights,
        threads=torch.get_num_threads(),
        shapes=shapes,
        cache=model.cache,
        shards=shards.count(),
    )
