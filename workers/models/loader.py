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
from dovetail.workers.models.checkpoint import Checkpoint, first_line

ATTENTION_TYPES = {"full_attention", "sliding_attention"}
UNSUPPORTED_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest sequence of the pass; rows of different sessions would change each other."""

log = logging.getLogger(__name__)


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The transformers model of a checkpoint on the CPU with our attention; refuses what is missing, reports what is superfluous."""
    attention.register()
    folder = str(checkpoint.folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        refuse_unsupported(config, checkpoint.source)
        with _quiet(), torch.inference_mode(False):
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.source} cannot be loaded by transformers ({type(error).__name__}: {first_line(error)})") from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{checkpoint.source} lacks {len(missing)} tensors that its config.json calls for, such as {missing[0]}")
    if unexpected := sorted(info["unexpected_keys"]):
        log.warning("%s has %d tensors that the model does not use, such as %s", checkpoint.source, len(unexpected), unexpected[0])
    model.requires_grad_(False)
    return model.eval()


def refuse_unsupported(config: Any, source: str) -> None:
    """`CheckpointError` naming what in a configuration cannot be decoded with trees and several sessions in a pass."""
    kind = config.model_type
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings"):
        if not isinstance(getattr(config, name, None), int):
            raise CheckpointError(f"{source}: a {kind} model has no {name}; only dense decoder models can be decoded here")
    if strange := sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_TYPES):
        raise CheckpointError(f"{source}: layers of type {strange[0]} ({kind}) are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(entry.get("rope_type")) for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if refused := kinds.intersection(UNSUPPORTED_ROPE):
        raise CheckpointError(f"{source}: rotary embeddings of type {min(refused)} ({kind}) are not supported: they depend on the longest sequence of a pass")


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
