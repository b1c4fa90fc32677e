"""Opens the files of a draft head, a folder's or a GGUF file, and finds its kind.

A head is distinguished from an ordinary language model by tensor names and shapes alone, without
importing code of heads. Pickled weights are opened only if the user allows it, and their content is
never executed."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.heads.registry import kind_of_tensors
from dovetail.workers.heads.spec import Shape, listed
from dovetail.workers.models.checkpoints.checkpoint import open_weights, stored_tensors
from dovetail.workers.models.checkpoints.files import read_json, unreadable
from dovetail.workers.models.checkpoints.gguf.rows import UNPACK
from dovetail.workers.models.checkpoints.gguf.tensors import Blocks
from dovetail.workers.models.checkpoints.hub import HUB_FILES, PICKLED_FILES, find_folder
from dovetail.workers.models.checkpoints.quantised.tensors import CodedTensor
from dovetail.workers.models.checkpoints.stored import COUNT_TYPES, FLOAT_TYPES

PICKLED = "pytorch_model.bin"
PICKLED_REMEDY = "set draft.pickled = true if you trust it, or convert it to safetensors"


@dataclass(frozen=True)
class HeadFiles:
    """The tensors in a head's folder, under their names there."""

    folder: Path
    config: Mapping[str, Any]
    digest: str  # SHA-256 of config.json and the weights, in hexadecimal
    shapes: Mapping[str, Shape]
    types: Mapping[str, torch.dtype | None]  # name -> type; None: a type that heads do not support
    read: Callable[[str], Tensor]
    coded: bool = False  # True if matrices are stored as 8-bit codes, or blocks of a GGUF file


def classify(source: str, *, allow_bin: bool = False) -> str | None:
    """Return the kind of head in `source` (folder, hub id, id@revision); None: an ordinary language
    model. Reads config.json and the weights' headers only."""
    folder = _find(source, allow_bin)
    if _is_pickled(folder):
        shapes = _open_pickled(folder, read_json(folder / "config.json"), allow_bin).shapes
    else:
        shapes = {name: stored.shape for name, stored in stored_tensors(folder).items()}
    kind = kind_of_tensors(shapes)
    return None if kind is None else kind.name


def open_files(source: str, *, allow_bin: bool) -> HeadFiles:
    """Open the folder or hub id `source`. Raises `CheckpointError` if its weights are pickled, and
    not allowed or not readable."""
    folder = _find(source, allow_bin)
    config = read_json(folder / "config.json")
    if _is_pickled(folder):
        return _open_pickled(folder, config, allow_bin)
    return _open_safetensors(folder, config)


def _find(source: str, allow_bin: bool) -> Path:
    return find_folder(source, files=(*HUB_FILES, *PICKLED_FILES) if allow_bin else HUB_FILES)


def _is_pickled(folder: Path) -> bool:
    """Return whether there are only pickled weights under the one supported name; `weight_files`
    refuses others."""
    return (folder / PICKLED).is_file() and not any(folder.glob("*.safetensors"))


def _open_safetensors(folder: Path, config: Mapping[str, Any]) -> HeadFiles:
    weights = open_weights(folder)
    types = {
        name: {**FLOAT_TYPES, **COUNT_TYPES}.get(stored.kind)
        for name, stored in weights.tensors.items()
    }
    shapes = {name: stored.shape for name, stored in weights.tensors.items()}
    coded = any(
        stored.placed.place.kind in UNPACK
        if isinstance(stored, Blocks)
        else isinstance(stored, CodedTensor) and stored.in_8_bits
        for stored in weights.tensors.values()
    )
    return HeadFiles(
        *(folder, config, weights.digest, shapes, types),
        lambda name: weights.tensors[name].read(name),
        coded,
    )


def _open_pickled(folder: Path, config: Mapping[str, Any], allow_bin: bool) -> HeadFiles:
    file = folder / PICKLED
    if not allow_bin:
        raise CheckpointError(
            f"{folder} has only pickled weights ({PICKLED}), which can run code when read; "
            f"{PICKLED_REMEDY}"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise unreadable(file, error) from None
    except (
        Exception
    ) as error:  # any error of the unpickler; its message may advise to execute the content
        raise CheckpointError(
            f"{file} cannot be read as plain tensors ({type(error).__name__}); use a head that is "
            "saved as safetensors"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise CheckpointError(
            f"{file} holds something other than named tensors; save the head's state_dict"
        )
    if strange := [name for name, tensor in content.items() if not _is_plain(tensor)]:
        raise CheckpointError(
            f"{file} holds tensors that are sparse, quantised, nested or without numbers "
            f"({listed(strange)}); save them dense, as floats"
        )
    configuration = (folder / "config.json").read_bytes()
    digest = hashlib.sha256(f"config.json\0{len(configuration)}\0".encode() + configuration)
    with file.open("rb") as weights:
        digest.update(hashlib.file_digest(weights, "sha256").digest())
    shapes = {name: tuple(tensor.shape) for name, tensor in content.items()}
    types = {name: tensor.dtype for name, tensor in content.items()}

    def read(name: str) -> Tensor:
        tensor: Tensor = content[name].detach()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{file}: tensor {name} holds NaN or infinite values")
        return tensor

    return HeadFiles(folder, config, digest.hexdigest(), shapes, types, read)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, on the CPU, and not quantised or nested."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested)
    )
