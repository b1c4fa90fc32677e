"""GGUF's number types, by ggml's numbers, and their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class NumberKind:
    """A type of numbers, whose blocks hold `numbers` neighbours of a row in `size_bytes`."""

    name: str
    numbers: int  # numbers of a block, neighbours in a row
    size_bytes: int
    packed: int = 0  # bytes of a block in the kernels' layout, if different

    def size_of(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor [..., row]; ValueError if its rows are not whole blocks."""
        if shape[-1] % self.numbers:
            raise ValueError(
                f"has rows of {shape[-1]} numbers, not a multiple of the blocks of {self.numbers} "
                f"of {self.name}"
            )
        return prod(shape) // self.numbers * self.size_bytes

    def packed_size_of(self, shape: Sequence[int]) -> int:
        """Return the bytes of the packed matrices of a tensor; 0 for plain numbers."""
        own = self.packed or self.size_bytes
        return 0 if self.numbers == 1 else prod(shape) // self.numbers * own


class Described(NamedTuple):
    """A tensor of a model in GGUF files, in transformers' layout."""

    kind: str  # safetensors' name of the type in which it is read
    shape: tuple[int, ...]
    packed_bytes: int  # bytes that the kernels take for its blocks; 0: it has none
    type: int  # ggml's number of its type in the file


F32, F16, BF16, MXFP4 = 0, 1, 30, 39
Q5_0, Q8_0, Q4_K, Q6_K = 6, 8, 12, 14
KINDS = {
    F32: NumberKind("F32", 1, 4),
    F16: NumberKind("F16", 1, 2),
    2: NumberKind("Q4_0", 32, 18),
    3: NumberKind("Q4_1", 32, 20),
    Q5_0: NumberKind("Q5_0", 32, 22),
    7: NumberKind("Q5_1", 32, 24),
    Q8_0: NumberKind("Q8_0", 32, 34),
    10: NumberKind("Q2_K", 256, 84, 100),
    11: NumberKind("Q3_K", 256, 110, 114),
    Q4_K: NumberKind("Q4_K", 256, 144, 148),
    13: NumberKind("Q5_K", 256, 176, 180),
    Q6_K: NumberKind("Q6_K", 256, 210),
    20: NumberKind("IQ4_NL", 32, 18),
    23: NumberKind("IQ4_XS", 256, 136, 138),
    BF16: NumberKind("BF16", 1, 2),
    MXFP4: NumberKind("MXFP4", 32, 17),
}
UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that ggml has and that are not read here."""
STORED = {F16: "F16", BF16: "BF16", MXFP4: "BF16"}
"""safetensors' name of the smallest type that has every number of a kind; of others F32."""


def int4_kind(width: int, *, end: bool) -> int | None:
    """Return the block type of rows with weights `int4`; None if none fits. `end`: for tables and
    head."""
    if width % 256 == 0:
        return Q6_K if end else Q4_K
    if width % 32 == 0:
        return Q8_0 if end else Q5_0
    return None
