"""The quantisation schemes that are decoded, as config.json describes them; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from dovetail.protocol.errors import CheckpointError

PACKABLE_BITS = (2, 4, 8)  # bits of a code, of which words of 32 bits hold a whole number
AWQ_LAYOUTS = ("gemm", "exllama", "ipex")  # AWQ's `version`s with the same layout
GPTQ_FORMATS = ("gptq", "gptq_v2")
PACKED = "pack-quantized"  # compressed-tensors' format of several codes in a word
COMPRESSED_FORMATS = (
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    PACKED,
)
READ = "AWQ (gemm), GPTQ, FP8 and compressed-tensors of whole or 8-bit floating-point codes"


@dataclass(frozen=True)
class Scheme:
    """The fields of config.json that are needed to decode codes."""

    method: str  # awq, gptq, fp8 or compressed-tensors
    forms: tuple[tuple[int, int], ...] = ()
    """(bits of a code, inputs of a scale; 0: all) that occur."""
    block: tuple[int, int] = (0, 0)  # outputs and inputs that share a scale of FP8
    symmetric: bool = False  # True if the zero point of GPTQ is the middle of the codes throughout
    below: bool = False  # True if GPTQ's zero points are stored less one


class FieldError(ValueError):
    """An invalid value in quantization_config."""

    def __init__(self, key: str, value: object, due: str) -> None:
        super().__init__(f"{key} of quantization_config is {str(value)[:100]}, not {due}")


def scheme_of(content: Mapping[str, Any]) -> Scheme | None:
    """Return a config.json's scheme; None: unquantised, or gpt-oss in MXFP4. ValueError for an
    unread scheme, `FieldError` for a wrong field."""
    said = content.get("quantization_config") or content.get("compression_config")
    if not said:
        return None
    if not isinstance(said, dict):
        raise ValueError("unknown")
    method = str(said.get("quant_method", "unknown"))
    if method == "auto-round":
        method = str(said.get("packing_format", "")).rpartition("auto_")[2] or method
    if method == "mxfp4" and content.get("model_type") == "gpt_oss":
        return None
    if (read := _READERS.get(method)) is None:
        raise ValueError(method)
    try:
        return read(said)
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{method}, of unknown fields") from None


def refuse_scheme(content: Mapping[str, Any], folder: object) -> None:
    """`CheckpointError` for a config.json whose weights are quantised in a way that is not read."""
    try:
        scheme_of(content)
    except FieldError as error:
        raise CheckpointError(f"{folder}/config.json: {error}; fetch the model again") from None
    except ValueError as error:
        raise CheckpointError(
            f"{folder} is quantised ({str(error)[:100]}) in a way that is not read; take the "
            f"original weights of that model, or {READ}"
        ) from None


def _awq(said: Mapping[str, Any]) -> Scheme:
    layout = str(said.get("version", "gemm")).lower()
    bits = said.get("bits", said.get("w_bit", 4))
    if layout not in AWQ_LAYOUTS:
        raise ValueError(f"awq, version {layout}")
    if bits != 4:
        raise ValueError(f"awq, {bits} bits")
    return Scheme("awq")


def _gptq(said: Mapping[str, Any]) -> Scheme:
    form, bits = str(said.get("checkpoint_format") or "gptq"), said["bits"]
    if form not in GPTQ_FORMATS or said.get("is_marlin_format"):
        raise ValueError(f"gptq, format {'marlin' if said.get('is_marlin_format') else form}")
    if type(bits) is not int or bits not in PACKABLE_BITS:
        raise ValueError(f"gptq, {bits} bits")
    return Scheme(
        "gptq",
        forms=((bits, _group_size(said, 128)),),
        symmetric=bool(said.get("sym", True)),
        below=form == "gptq",
    )


def _fp8(said: Mapping[str, Any]) -> Scheme:
    if (form := said.get("fmt") or "e4m3") != "e4m3":
        raise ValueError(f"fp8, numbers of type {form}")
    return Scheme("fp8", block=_block(said, "weight_block_size") or (0, 0))


def _compressed(said: Mapping[str, Any]) -> Scheme:
    groups, whole = said["config_groups"].values(), said.get("format", "dense")
    for form in (whole, *(group.get("format") for group in groups)):
        if form is not None and form not in COMPRESSED_FORMATS:
            raise ValueError(f"compressed-tensors, format {form}")
    if (sparse := (said.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise ValueError(f"compressed-tensors, sparse weights ({sparse})")
    if (said.get("transform_config") or {}).get("config_groups"):
        raise ValueError("compressed-tensors, weights behind a transform")
    coded = [group for group in groups if group.get("weights")]
    forms = {_form(group["weights"], group.get("format") or whole) for group in coded}
    found = {_block(group["weights"], "block_structure") for group in coded}
    blocks = [block for block in found if block is not None]
    if len(blocks) > 1:
        raise ValueError("compressed-tensors, blocks of several sizes")
    return Scheme(
        "compressed-tensors", forms=tuple(sorted(forms)), block=blocks[0] if blocks else (0, 0)
    )


def _form(weights: Mapping[str, Any], form: str) -> tuple[int, int]:
    """The bits of a code of compressed-tensors in a format, and the inputs that share a scale."""
    bits, kind = weights.get("num_bits"), weights.get("type") or "int"
    if not _is_count(bits):
        raise FieldError("num_bits", bits, "a whole number from 1 on")
    if form == PACKED and bits not in PACKABLE_BITS:
        raise ValueError(f"compressed-tensors, {bits} bits in {form}")
    if kind != "int" and (kind != "float" or form == PACKED or bits != 8):
        raise ValueError(f"compressed-tensors, {bits} bits of type {kind} in {form}")
    return bits, _group_size(weights, None)


def _group_size(said: Mapping[str, Any], default: int | None) -> int:
    """The inputs that share a scale; 0 for all of them, which is -1 or null in the file."""
    size = said.get("group_size", default)
    if size is None or (type(size) is int and size in (-1, 0)):
        return 0
    if not _is_count(size):
        raise FieldError("group_size", size, "a whole number from 1 on, or -1")
    return size


def _block(said: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """The outputs and inputs that share a scale; None if the key is missing or null."""
    if (block := said.get(key)) is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_count, block)):
        raise FieldError(key, block, "two whole numbers from 1 on")
    return block[0], block[1]


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


_READERS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
