"""The ways of quantising that are decoded, by what config.json says of them; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.protocol.errors import CheckpointError

PACKABLE_BITS = (2, 4, 8)
"""Bits of a code, of which words of 32 bits hold a whole number."""
AWQ_LAYOUTS = ("gemm", "exllama", "ipex")
"""Values of AWQ's `version` whose tensors are laid out alike."""
GPTQ_FORMATS = ("gptq", "gptq_v2")
COMPRESSED_FORMATS = (
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
)
READ = "AWQ (gemm), GPTQ, FP8 and compressed-tensors of whole or 8-bit floating-point codes"


@dataclass(frozen=True)
class Scheme:
    """The facts of config.json that codes cannot be decoded without."""

    method: str
    """awq, gptq, fp8 or compressed-tensors."""
    forms: tuple[tuple[int, int], ...] = ()
    """(bits of a code, inputs that share a scale; 0: all of them), each that occurs."""
    block: tuple[int, int] = (0, 0)
    """Outputs and inputs that share a scale of FP8, 0 for all of them."""
    symmetric: bool = False
    """True if the zero point of GPTQ is the middle of the codes throughout."""
    below: bool = False
    """True if GPTQ's zero points are stored less one."""


def scheme_of(content: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a config.json, None where the weights are not quantised or are experts
    of gpt-oss in MXFP4; ValueError says in a few words which scheme is not read."""
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
    if bits not in PACKABLE_BITS:
        raise ValueError(f"gptq, {bits} bits")
    return Scheme(
        "gptq",
        forms=((bits, max(0, int(said.get("group_size", 128)))),),
        symmetric=bool(said.get("sym", True)),
        below=form == "gptq",
    )


def _fp8(said: Mapping[str, Any]) -> Scheme:
    if (form := said.get("fmt") or "e4m3") != "e4m3":
        raise ValueError(f"fp8, numbers of type {form}")
    block = said.get("weight_block_size") or (0, 0)
    rows, columns = (int(size) for size in block)
    return Scheme("fp8", block=(rows, columns))


def _compressed(said: Mapping[str, Any]) -> Scheme:
    groups = said["config_groups"].values()
    for form in (said.get("format", "dense"), *(group.get("format") for group in groups)):
        if form is not None and form not in COMPRESSED_FORMATS:
            raise ValueError(f"compressed-tensors, format {form}")
    if (sparse := (said.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise ValueError(f"compressed-tensors, sparse weights ({sparse})")
    if (said.get("transform_config") or {}).get("config_groups"):
        raise ValueError("compressed-tensors, weights behind a transform")
    weights = [group["weights"] for group in groups if group.get("weights")]
    blocks = {tuple(one["block_structure"]) for one in weights if one.get("block_structure")}
    if len(blocks) > 1:
        raise ValueError("compressed-tensors, blocks of several sizes")
    forms = {(int(one["num_bits"]), max(0, int(one.get("group_size") or 0))) for one in weights}
    return Scheme(
        "compressed-tensors",
        forms=tuple(sorted(forms)),
        block=next(((int(rows), int(columns)) for rows, columns in blocks), (0, 0)),
    )


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
}
