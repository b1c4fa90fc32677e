"""The quantisation schemes that are decoded, as config.json describes them, and which tensors hold
the codes and scales of a matrix, by name, type and shape; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.files import damaged

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
TERNARY = "; so are all its forms: use another model, such as a TriLM in GGUF (TQ1_0, TQ2_0)"


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
    if method == "bitnet":
        raise ValueError("bitnet, whose linear layers also round their inputs to 8 bits")
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
        raise damaged(f"{folder}/config.json: {error}") from None
    except ValueError as error:
        why = str(error)[:100]
        ending = TERNARY if why.startswith("bitnet") else f"; use the original weights, or {READ}"
        text = f"{folder} is quantised in an unsupported way ({why}){ending}"
        raise CheckpointError(text) from None


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


WORD = 32  # bits of a word that codes are packed into
AWQ_BITS = 4
WHOLE, FLOATING = "I8", "F8_E4M3"  # types of codes that are not packed
KINDS = {
    "groups": ("I32", "I64"),
    "scales": ("F64", "F32", "F16", "BF16", FLOATING, "F8_E8M0"),
    "shape": ("I32", "I64"),
}
"""A part of a matrix -> the types that it may be stored in."""
SCALES = ("_scale_inv", "_scale")  # ends of the names of a matrix's scales, behind its own
BESIDE = (
    *("input_global_scale", "input_scale", "input_zero_point", "k_scale", "output_scale"),
    *("output_zero_point", "q_scale", "v_scale"),
)
"""Suffixes of parameters of activations and caches, which are not quantised here."""


class PartPlace(Protocol):
    """A tensor of a checkpoint."""

    @property
    def kind(self) -> str:
        """Return safetensors' name of its type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""


P = TypeVar("P", bound=PartPlace)
Parts = Mapping[str, tuple[str, P]]  # a part of a matrix (codes, scales, zeros) -> name and place


@dataclass(frozen=True)
class Matrix(Generic[P]):
    """A matrix [out, in], or matrices [experts, out, in], held as codes and scales."""

    shape: tuple[int, ...]
    parts: Parts[P]

    @property
    def main(self) -> str:
        """Return the part that holds the codes."""
        return "codes" if "codes" in self.parts else "words"


class UnfitError(ValueError):
    """Tensors that are not matrices; `name` is one of them, or empty."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


def unlike(name: str) -> str:
    """Return what is wrong with a part that does not match the others."""
    return (
        f"tensor {name} does not fit the other parts of its matrix, or the "
        "quantization_config of config.json; fetch the model again"
    )


def matrices(scheme: Scheme, tensors: Mapping[str, P]) -> tuple[dict[str, Matrix[P]], dict[str, P]]:
    """Return quantised matrices by name, and the other tensors; `UnfitError` for a part that is
    missing or misshapen."""
    found, used = dict[str, Matrix[P]](), set[str]()
    for name, tensor in tensors.items():
        if (named := _names(name, tensor, tensors)) is None:
            continue
        whole, names = named
        parts = {part: (full, tensors[full]) for part, full in names.items() if full in tensors}
        found[whole] = _matrix(scheme, parts)
        used |= {full for full, _ in parts.values()}
    if not found:
        raise UnfitError(
            f"config.json states that weights are quantised ({scheme.method}), but no tensor is; "
            "remove quantization_config if the weights are plain"
        )
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in used and name.rpartition(".")[2] not in BESIDE
    }
    for name in sorted(plain.keys() & found.keys()):
        raise UnfitError(f"tensor {name} is there plain and quantised; fetch the model again", name)
    return found, plain


def bits_of(parts: Parts[P], scheme: Scheme) -> int:
    """Return the bits of a matrix's codes, by the one form that fits its parts' shapes; 0 if none,
    `UnfitError` if several do."""
    words, scales = parts["words"][1].shape, parts["scales"][1].shape
    length, count = (words[0], scales[0]) if scheme.method == "gptq" else (words[1], scales[1])
    if scheme.method == "gptq" and "groups" in parts:  # some modules have their own bits
        inputs = prod(parts["groups"][1].shape)
        return next((bits for bits in PACKABLE_BITS if length * WORD == bits * inputs), 0)
    found = set[int]()
    for bits, size in scheme.forms:
        inputs = length * WORD // bits
        if bits in PACKABLE_BITS and inputs == count * (size or inputs):
            found.add(bits)
    if len(found) > 1:
        name = parts["words"][0]
        raise UnfitError(
            f"codes of {' or '.join(map(str, sorted(found)))} bits fit the shape of tensor {name}, "
            "and nothing shows which they are; use a checkpoint with one kind of weights",
            name,
        )
    return found.pop() if found else 0


def block_of(
    shape: tuple[int, ...], scales: tuple[int, ...], scheme: Scheme
) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale; None: the shapes do not fit."""
    *experts, outputs, inputs = shape
    if prod(scales) == 1 or scales == (*experts, 1, 1):
        return outputs, inputs
    if scales in ((*experts, outputs, 1), (*experts, outputs)):
        return 1, inputs
    groups = sorted({size for _, size in scheme.forms if size})
    for rows, columns in (scheme.block, *((1, size) for size in groups)):
        if rows and columns and scales == (*experts, -(-outputs // rows), -(-inputs // columns)):
            return rows, columns
    return None


def _names(name: str, tensor: P, tensors: Mapping[str, P]) -> tuple[str, dict[str, str]] | None:
    """Return the matrix that a tensor holds the codes of, and its parts' names; None: no codes."""
    base, _, end = name.rpartition(".")
    if end == "qweight":
        whole = f"{base}.weight"
        names = {"words": name, "scales": f"{base}.scales", "zeros": f"{base}.qzeros"}
        needed, more = names.values(), {"groups": f"{base}.g_idx"}
    elif end.endswith("_packed"):
        whole = name.removesuffix("_packed")
        names = {"words": name, "scales": f"{whole}_scale"}
        ends = {"zeros": "_zero_point", "groups": "_g_idx", "shape": "_shape"}
        needed, more = names.values(), {part: f"{whole}{its}" for part, its in ends.items()}
    elif tensor.kind in (WHOLE, FLOATING) and not end.endswith(("_zero_point", "_scale")):
        whole, scales = name, [f"{name}{suffix}" for suffix in SCALES]
        names = {
            "codes": name,
            "scales": next((one for one in scales if one in tensors), scales[0]),
        }
        needed, more = names.values(), {"zeros": f"{name}_zero_point"}
    else:
        return None
    for part in needed:
        if part not in tensors:
            raise UnfitError(f"tensor {name} is quantised, {part} is missing; fetch it again", name)
    return whole, {**names, **more}


def _matrix(scheme: Scheme, parts: Parts[P]) -> Matrix[P]:
    name, main = parts.get("codes") or parts["words"]
    whole_numbers = main.kind == WHOLE and scheme.method != "compressed-tensors"
    if whole_numbers or (shape := _shape(scheme, parts)) is None:
        raise UnfitError(unlike(name), name)
    kinds = KINDS if "codes" in parts else {**KINDS, "zeros": ("I32",)}
    for part, (full, tensor) in parts.items():
        if part in kinds and tensor.kind not in kinds[part]:
            allowed = " or ".join(kinds[part])
            text = f"tensor {full} has numbers of type {tensor.kind}, not {allowed}"
            raise UnfitError(f"{text}; fetch the model again", name)
    for part, due in _due(scheme, shape, parts).items():
        if part in parts and parts[part][1].shape != due:
            raise UnfitError(unlike(parts[part][0]), name)
    return Matrix(shape, parts)


def _shape(scheme: Scheme, parts: Parts[P]) -> tuple[int, ...] | None:
    scales = parts["scales"][1].shape
    if "codes" in parts:
        shape = parts["codes"][1].shape
        return shape if len(shape) > 1 and block_of(shape, scales, scheme) else None
    words = parts["words"][1].shape
    if len(words) != 2 or len(scales) != 2 or parts["words"][1].kind != "I32" or not prod(scales):
        return None
    if scheme.method == "awq":
        return None if words[0] % scales[0] else (scales[1], words[0])
    if not (bits := bits_of(parts, scheme)):
        return None
    each = WORD // bits
    return (words[1], words[0] * each) if scheme.method == "gptq" else (words[0], words[1] * each)


def _due(scheme: Scheme, shape: tuple[int, ...], parts: Parts[P]) -> Mapping[str, tuple[int, ...]]:
    scales = parts["scales"][1].shape
    if "codes" in parts:
        return {"zeros": scales}
    outputs, inputs = shape
    each = WORD // (AWQ_BITS if scheme.method == "awq" else bits_of(parts, scheme))
    zeros = -(-outputs // each)
    if scheme.method == "awq":
        return {"words": (inputs, zeros), "zeros": (scales[0], zeros)}
    if scheme.method == "gptq":
        due = {"scales": (scales[0], outputs), "zeros": (scales[0], zeros)}
        return {**due, "groups": (inputs,)}
    due = {"scales": (outputs, scales[1]), "zeros": (zeros, scales[1])}
    return {**due, "groups": (inputs,), "shape": (2,)}
