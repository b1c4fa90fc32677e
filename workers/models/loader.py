"""A checkpoint becomes a transformers model on the CPU, whole and quiet.

transformers fills a missing tensor with random numbers and asks on a terminal whether to run remote code; both end here in an error. Knows which
architectures can be decoded with trees and with several sessions in a pass, not how.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models import attention
from dovetail.workers.models.checkpoint import Checkpoint, read_json, reason

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
ATTENTION_TYPES = {"full_attention", "sliding_attention"}
UNSUPPORTED_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sequence of the pass; rows of different sessions would change each other."""

log = logging.getLogger(__name__)


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The transformers model of a checkpoint on the CPU with our attention; refuses what is missing, reports what is superfluous."""
    attention.register()
    folder = str(checkpoint.folder)
    refuse_empty(checkpoint)
    with _refusing(checkpoint):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        refuse_unsupported(config, checkpoint)
    with _refusing(checkpoint), _quiet(), torch.inference_mode(False):
        refuse_misshapen(config, checkpoint)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{checkpoint.source} lacks {len(missing)} tensors that its config.json calls for, such as {missing[0]}")
    if unexpected := sorted(info["unexpected_keys"]):
        log.warning("%s has %d tensors that the model does not use, such as %s", checkpoint.source, len(unexpected), unexpected[0])
    model.requires_grad_(False)
    return model.eval()


@contextlib.contextmanager
def _refusing(checkpoint: Checkpoint) -> Iterator[None]:
    """What transformers raises at a configuration is whatever its lines happen to stumble over: any of it is a `CheckpointError` of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{checkpoint.folder} cannot be loaded by transformers ({type(error).__name__}: {reason(error)})") from error


def refuse_empty(checkpoint: Checkpoint) -> None:
    """`CheckpointError` naming a size in config.json that is not positive; transformers divides by some before it says what is wrong."""
    content = read_json(checkpoint.folder / "config.json")
    for name in (*SIZES, "num_key_value_heads", "intermediate_size", "head_dim"):
        number = content.get(name)
        if isinstance(number, int | float) and number < 1:
            raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {name} is {number}; it must be at least 1")


def refuse_unsupported(config: Any, checkpoint: Checkpoint) -> None:
    """`CheckpointError` naming what in a configuration cannot be decoded with trees and several sessions in a pass."""
    kind, file = config.model_type, checkpoint.folder / "config.json"
    for name in SIZES:
        if not isinstance(getattr(config, name, None), int):
            raise CheckpointError(f"{file}: a {kind} model has no {name}; only dense decoder models can be decoded here")
    if strange := sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_TYPES):
        raise CheckpointError(f"{file}: layers of type {strange[0]} ({kind}) are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(entry.get("rope_type")) for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if refused := kinds.intersection(UNSUPPORTED_ROPE):
        raise CheckpointError(f"{file}: rotary embeddings of type {min(refused)} ({kind}) are not supported: they depend on the longest sequence of a pass")


def refuse_misshapen(config: Any, checkpoint: Checkpoint) -> None:
    """`CheckpointError` naming a tensor that has another shape than `config` calls for, before memory is taken for any.

    The model is built without numbers for it. Names that stand on one side only are left to transformers, which renames some as it loads.
    """
    layers, found = config.num_hidden_layers, checkpoint.shapes
    if layers > len(found):  # and as many empty layers are not built first
        raise CheckpointError(f"{checkpoint.folder} has {len(found)} tensors in all, where its config.json calls for {layers} layers")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION, trust_remote_code=False)
    for name, tensor in model.state_dict().items():
        if found.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has the shape {list(found[name])}, where config.json calls for {list(tensor.shape)}; fetch the model again"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and report; what they say is checked by the caller."""
    bar, verbosity = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bar:
            transformers.logging.enable_progress_bar()
