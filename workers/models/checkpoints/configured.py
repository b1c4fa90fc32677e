"""A checkpoint's configuration, the model that transformers builds from it, and why it cannot."""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.memory import uncollected
from dovetail.workers.kernels.exact import ExactPowers
from dovetail.workers.models import attention, transformers
from dovetail.workers.models.checkpoints.architecture import (
    REMEDY,
    SIZES,
    bidirectional,
    refuse_config,
    refuse_content,
    refuse_unknown,
    why_not,
)
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.composite import is_composite, text_part
from dovetail.workers.models.checkpoints.context import limit_context
from dovetail.workers.models.checkpoints.files import damaged, read_json, reason, shown

CORRECT = "correct it, or use the config.json that belongs to the weights"
BESIDE_TEXT = {"phi4_multimodal": "model.embed_tokens_extend"}
"""The module of a language model that puts images and sound among its embeddings, by model type."""
WIDELY_TAKEN = torch.bfloat16  # type of products on the meta device: grouped experts have no other


def configured(checkpoint: Checkpoint) -> Any:
    """Return the model of a checkpoint without numbers; refuses what cannot be decoded before
    allocating."""
    attention.register()
    file = checkpoint.folder / "config.json"
    config = limit_context(read_config(file), checkpoint.context, checkpoint.source)
    if is_composite(read_json(file)):  # whose fields of several parts contradict each other
        config.tie_word_embeddings = "lm_head.weight" not in checkpoint.tensors
    layers = config.num_hidden_layers
    if layers > len(checkpoint.tensors):  # and as many empty layers are not built first
        found = len(checkpoint.tensors)
        raise damaged(f"{checkpoint.folder} has {found} tensors for {layers} layers in config.json")
    model = built(config, file)
    refuse_misshapen(model, checkpoint)
    return with_buffers(model)


def read_config(file: Path) -> Any:
    """Return transformers' configuration; `CheckpointError` if it is unreadable or unsupported."""
    whole = read_json(file)
    content = text_part(whole)
    refuse_content(content, file)
    refuse_unknown(
        content,
        file,
        known=content["model_type"] in transformers.CONFIG_MAPPING,
        version=transformers.__version__,
    )
    try:
        with quiet():
            config = (
                transformers.AutoConfig.from_pretrained(
                    str(file), trust_remote_code=False, local_files_only=True
                )
                if content is whole
                else transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
            )
    except Exception as error:  # any error of transformers' code
        why = said_by(error) or _culprit(
            content, transformers.CONFIG_MAPPING[content["model_type"]].from_dict
        )
        raise CheckpointError(
            f"{file} is not what transformers reads for model type {content['model_type']}: "
            f"{why}; {CORRECT}"
        ) from error
    with uncollected():
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    refuse_config(config, causal, file)
    return config


def full_config(file: Path) -> dict[str, Any]:
    """Return config.json's fields with transformers' defaults; errors as of `read_config`."""
    fields = fields_of(read_config(file))
    kind = fields.get("dtype")
    return {**fields, "dtype": kind and str(kind).removeprefix("torch.")}


def fields_of(config: Any) -> dict[str, Any]:
    """Return a configuration's fields, with its sizes also under their usual names, except for
    GPT-2's."""
    fields: dict[str, Any] = config.to_dict()
    named = () if "n_embd" in fields else SIZES
    return {name: getattr(config, name) for name in named if hasattr(config, name)} | fields


def built(config: Any, file: Path) -> Any:
    """Return the model on the meta device; `CheckpointError` if our attention does not fit it."""
    try:
        model = for_text(empty(config, attention.IMPLEMENTATION))
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
        raise bidirectional(config, "is_decoder", file)
    return model


class Unchanged(nn.Module):
    """Embeddings of text only, replacing a model's function that would add images to them."""

    def forward(self, _ids: Tensor, embeddings: Tensor, **_others: Any) -> Tensor:
        """Return the embeddings [B, T, hidden] that it is given."""
        return embeddings


def for_text(model: Any) -> Any:
    """Return a model without its parts for images or sound."""
    if (name := BESIDE_TEXT.get(model.config.model_type)) is not None:
        model.set_submodule(name, Unchanged())
    return model


def with_buffers(model: Any) -> Any:
    """The model with the buffers that no checkpoint holds, such as rotary frequencies."""
    with _Uninitialised(), ExactPowers():
        for module in model.modules():
            if buffers := dict(module.named_buffers(recurse=False)):
                _fill_buffers(model, module, buffers)
        with contextlib.suppress(Exception):  # some buffers are computed for all layers together
            model._init_weights(model.base_model)
    model.requires_grad_(False)
    return model.eval()


class _Uninitialised(TorchFunctionMode):
    """Skips initialisation on the meta device, which would make torch import its compiler."""

    def __torch_function__(
        self, function: Any, _types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if getattr(function, "__module__", None) == nn.init.__name__:
            tensor = given[0] if given else named["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*given, **(named or {}))


def empty(config: Any, implementation: str) -> Any:
    """Return the model on the meta device."""
    without = _Uninitialised()
    with quiet(), torch.inference_mode(False), torch.device("meta"), without:
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
        )


def _fill_buffers(model: Any, module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Compute buffers that no checkpoint has; those left out by transformers are None or NaN."""
    for name, buffer in buffers.items():
        module._buffers[name] = (
            torch.full_like(buffer, float("nan"), device="cpu")
            if buffer.is_floating_point()
            else None
        )
    try:
        getattr(module, "_init_weights", model._init_weights)(module)
    except Exception:  # it fills existing buffers, and these do not exist
        module._buffers.update(dict.fromkeys(buffers))


def _why_not_built(config: Any, error: Exception) -> str:
    """Return why a class cannot be built: our attention, or its configuration."""
    try:
        model = empty(config, "eager")
    except Exception:
        why = said_by(error) or _culprit(
            config.to_dict(), lambda fields: empty(type(config).from_dict(fields), "eager")
        )
        return f"built by transformers from this config.json: {why}; {CORRECT}"
    return f"decoded here: {why_not(config, type(model))}; {REMEDY}"


def why_refused(config: Any, model_class: Any) -> str:
    """Return why a model that raised an error is refused: its configuration is to blame if
    transformers' own forward fails in every way that works by default."""
    ways = set[str]()
    with contextlib.suppress(Exception):  # some defaults describe no valid model
        ways = {way for way, why in _stumbles({}, type(config)).items() if not why}

    def attempt(fields: dict[str, Any]) -> None:
        found = _stumbles(fields, type(config))
        if ways and all(found[way] and not _OF_THE_TRIAL.search(found[way]) for way in ways):
            raise ValueError(found)

    try:
        attempt(config.to_dict())
    except ValueError:
        name, why = model_class.__name__, _culprit(config.to_dict(), attempt)
        return f"transformers' own {name} fails with this config.json: {why}; {CORRECT}"
    return f"{why_not(config, model_class)}; {REMEDY}"


_OF_THE_TRIAL = re.compile(r"\bmeta\b|register_meta")
"""Fragments of errors about meta tensors, which say nothing about the model."""


def _stumbles(fields: Mapping[str, Any], config_class: Any) -> Mapping[str, str]:
    """Return what transformers' own forward of two tokens raises, by the way of calling it. Errors
    of building are raised."""
    with quiet():
        model = empty(config_class.from_dict(dict(fields)), "eager").to(WIDELY_TAKEN).eval()
    ids = torch.zeros((1, 2), dtype=torch.long, device="meta")
    ways: Mapping[str, dict[str, Tensor]] = {
        "plain": {},
        "tokens masked": {"attention_mask": torch.ones_like(ids)},
        "pairs masked": {
            "attention_mask": torch.zeros((1, 1, 2, 2), dtype=WIDELY_TAKEN, device="meta"),
            "position_ids": ids,
        },
    }
    found = dict[str, str]()
    for way, given in ways.items():
        try:
            with quiet(), torch.inference_mode():
                model(ids, use_cache=False, **given)
        except Exception as error:
            found[way] = reason(error)
        else:
            found[way] = ""
    return found


def said_by(error: BaseException) -> str:
    """Return the text of a deliberately raised error; empty for any other."""
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
    """Return the first field whose removal makes a failing attempt succeed, and its value;
    vocab_size is tried last, as the default is large enough for any id."""

    def works(fields: dict[str, Any]) -> bool:
        with contextlib.suppress(Exception), quiet():
            attempt(deepcopy(fields))  # transformers writes into fields within fields
            return True
        return False

    if not works(dict(content)):
        for name, value in sorted(content.items(), key=lambda item: item[0] == "vocab_size"):
            if name != "model_type" and works(
                {key: other for key, other in content.items() if key != name}
            ):
                return f"{name} is {shown(value)}"
    return "its fields do not fit together"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bar and report, which the caller checks."""
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


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return name and list of a model's decoder layers; `CheckpointError` without any."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == model.config.num_hidden_layers
            and "." in name
        ):
            return name, module
    text = f"model type {model.config.model_type} has no list of num_hidden_layers decoder layers"
    raise CheckpointError(f"{text}; {REMEDY}")


def base_model(model: Any) -> Any:
    """Return the part of a model before its head. The `base_model` of some classes is the model
    itself, and OPT's contains that part."""
    if model.base_model is not model and model.config.model_type != "opt":
        return model.base_model
    return model.get_submodule(decoder_layers(model)[0].rpartition(".")[0])


def refuse_misshapen(model: Any, checkpoint: Checkpoint) -> None:
    """`CheckpointError` naming a tensor of another shape, or whose numbers are no fractions.
    Missing and extra names are left to transformers."""
    for name, tensor in model.state_dict().items():
        stored = checkpoint.tensors.get(name)
        if stored is not None:
            stored.refuse_shape(name, tensor.shape, checkpoint.folder)
            if tensor.is_floating_point():
                stored.refuse_kind(name)
