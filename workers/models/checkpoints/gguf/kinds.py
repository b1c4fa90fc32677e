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
        if prod(shape[-1:]) % self.numbers:
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


F32, F16, BF16, MXFP4, I64 = 0, 1, 30, 39, 27
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
    16: NumberKind("IQ2_XXS", 256, 66, 70),
    17: NumberKind("IQ2_XS", 256, 74, 78),
    18: NumberKind("IQ3_XXS", 256, 98, 102),
    20: NumberKind("IQ4_NL", 32, 18),
    21: NumberKind("IQ3_S", 256, 110),
    22: NumberKind("IQ2_S", 256, 82),
    23: NumberKind("IQ4_XS", 256, 136, 138),
    I64: NumberKind("I64", 1, 8),
    BF16: NumberKind("BF16", 1, 2),
    34: NumberKind("TQ1_0", 256, 54, 80),
    35: NumberKind("TQ2_0", 256, 66, 80),
    MXFP4: NumberKind("MXFP4", 32, 17),
}
IK_LLAMA = {
    36: "I2_S",
    97: "Q8_0_X4 Q8_1_X4 Q8_2_X4",
    133: "Q6_0 IQ1_BN IQ2_BN Q8_K64 IQ2_K IQ3_K IQ4_K IQ5_K IQ6_K IQ2_TN IQ1_TN IQ4_KS IQ2_KS "
    "IQ4_KSS Q8_K16 Q8_K32 Q8_KR8 Q8_K128 Q8_KV IQ5_KS IQ2_KT IQ3_KT IQ4_KT IQ3_KS IQ2_KL IQ1_KT",
    202: "Q4_0_R8",
    206: "Q5_0_R4",
    208: "Q8_0_R8",
    210: "Q2_K_R4 Q3_K_R4 Q4_K_R4 Q5_K_R4 Q6_K_R4",
    216: "IQ2_XXS_R4 IQ2_XS_R4 IQ3_XXS_R4 IQ1_S_R4 IQ4_NL_R4 IQ3_S_R4 IQ2_S_R4 IQ4_XS_R8",
    229: "IQ1_M_R4 BF16_R16",
    233: "Q6_0_R4",
    335: "IQ2_BN_R4",
    337: "IQ2_K_R4 IQ3_K_R4 IQ4_K_R4 IQ5_K_R4",
    344: "IQ4_KS_R4",
    352: "IQ5_KS_R4",
    397: "Q8_K_R16 Q8_KV_R8 Q8_K_R8",
}
"""The first number of a run of ik_llama.cpp's own types -> their names."""
UNREAD = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    19: "IQ1_S",
    24: "I8",
    25: "I16",
    26: "I32",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
    **{
        number: f"{name} (ik_llama.cpp's)"
        for first, names in IK_LLAMA.items()
        for number, name in enumerate(names.split(), first)
    },
}
"""Types of ggml and ik_llama.cpp that are not read here."""
STORED = {F16: "F16", BF16: "BF16", MXFP4: "BF16", I64: "I64"}
"""safetensors' name of the smallest type that has every number of a kind; of others F32."""


def int4_kind(width: int, *, end: bool) -> int | None:
    """Return the block type of rows with weights `int4`; None if none fits. `end`: for tables and
    head."""
    if width % 256 == 0:
        return Q6_K if end else Q4_K
    if width % 32 == 0:
        return Q8_0 if end else Q5_0
    return None
