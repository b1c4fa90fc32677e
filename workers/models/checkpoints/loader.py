"""A checkpoint becomes a transformers model on the CPU, quiet, and a piece at a time where that can
be: a skeleton without numbers first, then the tensors of one part of it after the other, so that
whoever packs them never has two copies of more than one part.

transformers fills a missing tensor with random numbers and asks on a terminal whether to run remote
code; both end here in an error. Knows which architectures can be decoded with trees and with
several sessions in a pass, not how.
"""

import contextlib
import logging
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models import attention
from dovetail.workers.models.checkpoints.architecture import (
    REMEDY,
    bidirectional,
    reason,
    refuse_config,
    refuse_content,
    refuse_unknown,
    shown,
    why_not,
)
from dovetail.workers.models.checkpoints.checkpoint import FLOAT_TYPES, Checkpoint, read_json
from dovetail.workers.models.lean import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Conv1D,
    get_checkpoint_conversion_mapping,
    transformers,
)
from dovetail.workers.models.memory import is_out_of_memory, refuse_beyond
from dovetail.workers.progress import loading

CORRECT = "correct it, or take the config.json that belongs to the weights"

log = logging.getLogger(__name__)


Read = Callable[[str], Tensor]
"""The tensor of a name, in the type it is stored in."""


@dataclass(frozen=True)
class Types:
    """What types a model's numbers get as they are read; None: as they are stored."""

    linear: torch.dtype | None
    table: torch.dtype | None
    """Of embeddings."""
    rest: torch.dtype | None = torch.float32


@dataclass(frozen=True)
class Skeleton:
    """A transformers model whose parameters have shapes and no numbers yet, and where these come
    from."""

    model: Any
    read: Read
    transposed: frozenset[str]
    """Weights that the checkpoint holds as [in, out]."""

    def fill(
        self, module: nn.Module, prefix: str, types: Types, *, but: nn.Module | None = None
    ) -> None:
        """Give all of a module's parameters that have none their numbers, under the names that
        begin with `prefix`; those of `but` are left for later."""
        later = set() if but is None else set(but.modules())
        for path, part in module.named_modules():
            if part in later:
                continue
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.is_meta:
                    full = ".".join(filter(None, (prefix, path, name)))
                    part.register_parameter(
                        name, nn.Parameter(self._tensor(full, part, types), requires_grad=False)
                    )

    def _tensor(self, name: str, part: nn.Module, types: Types) -> Tensor:
        tensor = self.read(name)
        if name in self.transposed:
            tensor = tensor.t()
        wanted = types.rest
        if tensor.ndim == 2:
            wanted = types.linear if isinstance(part, nn.Linear) else types.table
        as_stored = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        return tensor.to(as_stored if wanted is None else wanted).contiguous()


def open_skeleton(checkpoint: Checkpoint) -> Skeleton:
    """The model of a checkpoint, to be filled; refuses what is missing, reports what is
    superfluous.

    Where transformers renames or rearranges tensors as it loads, it loads them: then the skeleton
    has its numbers already, in fp32.
    """
    model = _configured(checkpoint)
    if not _maps_one_to_one(model, checkpoint):
        whole = load_transformers(checkpoint, torch.float32)
        _linearise(whole)
        return Skeleton(whole, checkpoint.read, frozenset())
    tied = _tied(model)
    superfluous = set(checkpoint.tensors) - set(model.state_dict())
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    _report_superfluous(
        checkpoint,
        [name for name in superfluous if not any(re.search(pattern, name) for pattern in ignored)],
    )
    transposed = _linearise(model)
    return Skeleton(
        model,
        lambda name: checkpoint.read(name if name in checkpoint.tensors else tied[name]),
        transposed,
    )


def random_skeleton(folder: Path, *, layers: int | None, stored: torch.dtype) -> Skeleton:
    """The model of a config.json, with random numbers of type `stored` as if from a checkpoint, cut
    or stretched to `layers` layers."""
    attention.register()
    file = folder if folder.is_file() else folder / "config.json"
    config = read_config(file)
    if layers is not None:
        config.num_hidden_layers = layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    model = _with_buffers(_built(config, file))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    transposed = _linearise(model)
    generator = torch.Generator().manual_seed(0)

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return (
                torch.ones(shape, dtype=stored)
                if name.endswith("weight")
                else torch.zeros(shape, dtype=stored)
            )
        return torch.empty(shape, dtype=stored).normal_(
            std=1 / math.sqrt(shape[-1]), generator=generator
        )

    return Skeleton(model, read, transposed)


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """The name and the list of a model's decoder layers; `CheckpointError` where they cannot be
    told."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == model.config.num_hidden_layers
            and "." in name
        ):
            return name, module
    raise CheckpointError(
        f"model type {model.config.model_type} has no list of num_hidden_layers decoder layers "
        f"in transformers; {REMEDY}"
    )


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The whole transformers model of a checkpoint on the CPU with our attention; refuses what is
    missing, reports what is superfluous."""
    config = _configured(checkpoint).config
    held = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values()) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    refuse_beyond(checkpoint.source, held, f"all of it as {name}")
    size = sum(stored.size_bytes for stored in checkpoint.tensors.values())
    with (
        _refusing(checkpoint, config),
        _quiet(),
        torch.inference_mode(False),
        loading("loading", size) as count,
    ):
        model, info = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        count(size)
    checkpoint.refuse_changed()
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} tensors that its config.json calls for, "
            f"such as {missing[0]}; fetch the model again"
        )
    _report_superfluous(checkpoint, info["unexpected_keys"])
    model.requires_grad_(False)
    return model.eval()


@contextlib.contextmanager
def _refusing(checkpoint: Checkpoint, config: Any) -> Iterator[None]:
    """What transformers raises at tensors is whatever its lines happen to stumble over: any of it
    is a `CheckpointError` of one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) or is_out_of_memory(error):
            raise
        why = f": {said}" if (said := said_by(error)) else ""
        text = (
            "transformers cannot load these tensors as a model of type "
            f"{config.model_type}{why}; fetch config.json and weights again, of one revision"
        )
        raise CheckpointError(f"{checkpoint.source}: {text}") from error


def _report_superfluous(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    if unexpected := sorted(names):
        log.warning(
            "%s has %d tensors that the model does not use, such as %s",
            checkpoint.source,
            len(unexpected),
            unexpected[0],
        )


def _configured(checkpoint: Checkpoint) -> Any:
    """The model of a checkpoint's config.json, without numbers; what cannot be decoded or has other
    shapes is refused before memory is taken for any."""
    attention.register()
    file = checkpoint.folder / "config.json"
    config = read_config(file)
    layers = config.num_hidden_layers
    if layers > len(checkpoint.tensors):  # and as many empty layers are not built first
        found = len(checkpoint.tensors)
        raise CheckpointError(
            f"{checkpoint.folder} has {found} tensors in all, where its config.json calls for "
            f"{layers} layers; fetch the model again"
        )
    model = _built(config, file)
    refuse_misshapen(model, checkpoint)
    return _with_buffers(model)


def read_config(file: Path) -> Any:
    """transformers' configuration of a config.json; `CheckpointError` for one that it cannot read
    or of a model that cannot be decoded."""
    content = read_json(file)
    refuse_content(content, file)
    refuse_unknown(
        content,
        file,
        known=content["model_type"] in CONFIG_MAPPING,
        version=transformers.__version__,
    )
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(
                str(file), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # whatever transformers' lines happen to stumble over
        why = said_by(error) or _culprit(content, CONFIG_MAPPING[content["model_type"]].from_dict)
        raise CheckpointError(
            f"{file} is not what transformers reads for model type {content['model_type']}: "
            f"{why}; {CORRECT}"
        ) from error
    refuse_config(config, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), file)
    return config


def _built(config: Any, file: Path) -> Any:
    """The model on no device at all; `CheckpointError` for one that cannot be built with our
    attention."""
    try:
        model = _empty(config, attention.IMPLEMENTATION)
    except Exception as error:
        raise CheckpointError(
            f"{file}: model type {config.model_type} cannot be {_why_not_built(config, error)}"
        ) from error
    try:
        decoder_layers(model)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    if getattr(config, "is_decoder", None) is False and any(
        getattr(module, "is_causal", None) is False for module in model.modules()
    ):
        raise CheckpointError(bidirectional(config, "is_decoder", file))
    return model


def _with_buffers(model: Any) -> Any:
    """The model with the buffers that no checkpoint holds, such as rotary frequencies."""
    for module in model.modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            _fill_buffers(model, module, buffers)
    model.requires_grad_(False)
    return model.eval()


def _empty(config: Any, implementation: str) -> Any:
    """The model on no device."""
    with _quiet(), torch.inference_mode(False), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
        )


def _fill_buffers(model: Any, module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Compute what no checkpoint holds; what transformers does not compute is None, or NaN, for the
    whole model to be loaded by it (`_maps_one_to_one`)."""
    for name, buffer in buffers.items():
        module._buffers[name] = (
            torch.full_like(buffer, float("nan"), device="cpu")
            if buffer.is_floating_point()
            else None
        )
    try:
        model._init_weights(module)
    except Exception:  # it fills buffers that are there, and these are not
        module._buffers.update(dict.fromkeys(buffers))


def _why_not_built(config: Any, error: Exception) -> str:
    """The end of the sentence for a class that cannot be built with our attention: with
    transformers' own it can, or its configuration is to blame."""
    try:
        model = _empty(config, "eager")
    except Exception:
        why = said_by(error) or _culprit(
            config.to_dict(), lambda fields: _empty(type(config).from_dict(fields), "eager")
        )
        return f"built by transformers from this config.json: {why}; {CORRECT}"
    return f"decoded here: {why_not(config, type(model))}; {REMEDY}"


def said_by(error: BaseException) -> str:
    """What an error says that was raised for people to read, empty for one that a line of code
    stumbled into."""
    for raised in (error, error.__cause__):
        if isinstance(raised, ValueError | ImportError | OSError):
            lines = traceback.extract_tb(raised.__traceback__)
            return (
                reason(raised).rstrip(".")
                if lines and (lines[-1].line or "").startswith("raise")
                else ""
            )
    return ""


def _culprit(content: Mapping[str, Any], attempt: Callable[[dict[str, Any]], object]) -> str:
    """The first field of a configuration without which an attempt that fails with it succeeds, and
    its value."""

    def works(fields: dict[str, Any]) -> bool:
        with contextlib.suppress(Exception), _quiet():
            attempt(fields)
            return True
        return False

    if not works(dict(content)):
        for name, value in content.items():
            if name != "model_type" and works(
                {key: other for key, other in content.items() if key != name}
            ):
                return f"{name} is {shown(value)}"
    return "its fields do not fit together"


def _maps_one_to_one(model: Any, checkpoint: Checkpoint) -> bool:
    """Whether every tensor of the model stands in the checkpoint under its own name, or is tied to
    one that does, and nothing else needs computing."""
    tied = _tied(model)
    if any(
        get_checkpoint_conversion_mapping(kind)
        for kind in (model.config.model_type, type(model).__name__)
    ):
        return False
    if any(
        buffer is None or bool(buffer.isnan().any())
        for module in model.modules()
        for buffer in module._buffers.values()
    ):
        return False
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return set(parameters) == set(model.state_dict()) and all(
        name in checkpoint.tensors or tied.get(name) in checkpoint.tensors for name in parameters
    )


def _tied(model: Any) -> dict[str, str]:
    """For each tied tensor the one that it is tied to, both ways: a checkpoint holds either."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {**{source: target for target, source in tied.items()}, **tied}


def _linearise(model: Any) -> frozenset[str]:
    """Put torch's linears in the place of GPT-2's own kind, whose weights are [in, out]; the names
    of those weights."""
    transposed = set()
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            if not module.weight.is_meta:
                linear.weight = nn.Parameter(module.weight.t().contiguous(), requires_grad=False)
                linear.bias = module.bias
            model.set_submodule(name, linear.requires_grad_(False))
            transposed.add(f"{name}.weight")
    return frozenset(transposed)


def refuse_misshapen(model: Any, checkpoint: Checkpoint) -> None:
    """`CheckpointError` naming a tensor that has another shape than the model calls for, or other
    numbers than fractions where these are due.

    Names that stand on one side only are left to transformers, which renames some as it loads.
    """
    for name, tensor in model.state_dict().items():
        stored = checkpoint.tensors.get(name)
        if stored is not None and stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has the shape {list(stored.shape)}, "
                f"where config.json calls for {list(tensor.shape)}; fetch the model again"
            )
        if stored is not None and tensor.is_floating_point() and stored.kind not in FLOAT_TYPES:
            raise CheckpointError(
                f"{stored.file}: tensor {name} has numbers of type {stored.kind}; take weights "
                f"of type {', '.join(FLOAT_TYPES)}"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and report; what they say is checked by the caller."""
    bar, verbosity = (
        transformers.logging.is_progress_bar_enabled(),
        transformers.logging.get_verbosity(),
    )
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bar:
            transformers.logging.enable_progress_bar()
