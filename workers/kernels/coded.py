"""Matrices of 8, 4, 3 or 2 bits a weight in the layout of the C++ kernels: codes in groups of 64
inputs, each group with a scale and an offset.

A weight is (code - 2^(bits - 1)) scale + offset. Codes are widened in registers on use, and rows of
x are rounded to 8 bits for each group of inputs; a row gives the same bytes of y whatever the other
rows. The quantiser chooses the codes."""

from enum import IntEnum

from dovetail.workers.kernels import Array, PackedMatrix, address_of, library

GROUP = 64  # inputs that share a scale and an offset


class Coded(IntEnum):
    """The type of the codes of a matrix; the numbers continue `Kind`'s."""

    CODES8 = 4
    CODES4 = 5
    CODES3 = 6
    CODES2 = 7

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return {Coded.CODES8: 8, Coded.CODES4: 4, Coded.CODES3: 3, Coded.CODES2: 2}[self]


KINDS = {kind.bits: kind for kind in Coded}  # bits of a code -> kind of matrix


def groups_of(inputs: int) -> int:
    """Return the number of groups of this many inputs."""
    return -(-inputs // GROUP)


class CodedMatrix(PackedMatrix):
    """A matrix [n out, k in] of codes of `bits` bits; the last group is padded."""

    def __init__(self, bits: int, n: int, k: int, *, bias: Array | None = None) -> None:
        super().__init__(KINDS[bits], n, k, bias=bias)
        self.groups = groups_of(k)

    def pack_codes(self, codes: Array, scales: Array, offsets: Array, first: int = 0) -> None:
        """Pack the outputs first .. first + count: codes [count, groups GROUP] uint8, scales and
        offsets [count, groups] float16."""
        count = codes.shape[0]
        if not 0 <= first <= first + count <= self.n:
            raise ValueError(f"rows {first}..{first + count} of a matrix of {self.n}")
        parts = (count, self.groups)
        addresses = (
            address_of(codes, (count, self.groups * GROUP), ("uint8",)),
            address_of(scales, parts, ("float16",)),
            address_of(offsets, parts, ("float16",)),
        )
        library().dt_pack_codes(self.kind, *addresses, first, count, self.k, self.struct.packed)
