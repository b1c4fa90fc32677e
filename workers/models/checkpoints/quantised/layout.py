"""Which tensors hold the codes and scales of a matrix, by name, type and shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

from dovetail.workers.models.checkpoints.quantised.schemes import PACKABLE_BITS, Scheme

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
        f"tensor {name} does not go with the other parts of its matrix, or with the "
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
            f"config.json says that weights are quantised ({scheme.method}), and no tensor is; "
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
            "and nothing says which they are; take a checkpoint with one kind of weights",
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
            raise UnfitError(
                f"tensor {full} has numbers of type {tensor.kind}, not {allowed}; fetch the model "
                "again",
                name,
            )
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
