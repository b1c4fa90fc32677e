"""The Python interface of the C++ kernels: whether they are available, their instruction set and
number of threads, and packed matrices.

A row of x gives the same bytes of y whatever the other rows, the thread count and the instruction
set. Knows shapes and addresses, not models, and needs no torch; arrays are torch tensors on the CPU
or numpy arrays. The library is loaded on first use, not at import."""

import mmap
import platform
import sys
import sysconfig
from collections.abc import Sequence
from copy import copy
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    addressof,
    byref,
    c_char,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
    memmove,
)
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Self

from dovetail.protocol.errors import UserError

Array = Any  # a torch tensor on the CPU or a numpy array

LIBRARIES = ("_native.abi3.so", f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
"""Names of the extension: for any interpreter, since it does not call Python, and of checkouts that
were built earlier."""
_PLACES = [Path(__file__).with_name(name) for name in LIBRARIES]
LIBRARY = next((place for place in _PLACES if place.is_file()), _PLACES[0])
"""Where pip and `build` put the extension."""
BUILD = f"{sys.executable} -m dovetail.workers.kernels.build"
"""The command that builds them for this interpreter."""
ALIGNMENT = 64  # bytes of a cache line and of the widest register
HUGE_PAGE = 1 << 21  # bytes of a huge page of x86, and of Arm with pages of 4 KB
LEAST_RUN = 4 * HUGE_PAGE
"""The fewest consecutive bytes of each shard for which memory is in huge pages. At a border up to
half a huge page, an eighth of that, is on the neighbour's node."""


class Kind(IntEnum):
    """The type of the weights of a packed matrix."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3
    BLOCKS = 8
    """Blocks of a GGUF file, with rows of x rounded to 8 bits; `Coded` has the numbers in
    between."""
    EXACT_BLOCKS = 9  # blocks whose weights are converted to fp32 on use, with rows of x in fp32


class Isa(IntEnum):
    """The instruction sets with kernels."""

    PLAIN = 0
    SSE41 = 1
    AVX = 2
    AVX2 = 3
    AVX512 = 4
    VNNI = 5
    NEON = 6


NAMES = ("plain C++", "SSE4.1", "AVX", "AVX2", "AVX-512", "AVX-512 VNNI", "NEON")
TITLES = dict(zip(Isa, NAMES, strict=True))  # instruction set -> its name in words
WHY_PLAIN = {
    "x86_64": "this processor has no SSE4.1, and they are many times slower",
    **dict.fromkeys(("i686", "armv7l"), "this is a 32-bit system, and they are many times slower"),
}
"""Machine -> why it has only plain kernels, although others of its kind have faster ones."""
STORED = {"float32": Kind.FP32, "float16": Kind.FP16, "bfloat16": Kind.BF16}
"""The kinds of numbers that matrices are packed from."""
WIDENED = (Kind.FP32, Kind.INT8)
"""Kinds that are packed from any of these; the others are packed from their own numbers, or from
uint16, their raw bits."""


class MatrixStruct(Structure):
    """`Matrix` of native/kernels.h."""

    _fields_ = (
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("reserved", c_int32),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "dt_isas": (c_int, ()),
    "dt_isa": (c_int, ()),
    "dt_use_isa": (c_int, (c_int,)),
    "dt_set_threads": (None, (c_int,)),
    "dt_threads": (c_int, ()),
    "dt_set_shards": (c_int, (c_void_p, c_int)),
    "dt_shards": (c_int, ()),
    "dt_settle": (c_int, ()),
    "dt_spread": (None, (c_void_p, c_int64)),
    "dt_spread_matrices": (None, (POINTER(MatrixStruct), c_int64, c_int64, c_int64)),
    "dt_placed": (None, (c_void_p,)),
    "dt_layer_bytes": (c_int64, ()),
    "dt_packed_bytes": (c_int64, (c_int, c_int64, c_int64)),
    **dict.fromkeys(
        ("dt_pack", "dt_pack_alone"),
        (None, (c_int, c_int, c_void_p, *[c_int64] * 4, c_void_p, c_void_p)),
    ),
    "dt_unpack_row": (None, (POINTER(MatrixStruct), c_int64, c_void_p)),
    "dt_pack_codes": (
        None,
        (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
    "dt_part_bytes": (c_int64, (c_int, c_int64, c_int64)),
    "dt_pack_blocks": (None, (c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "dt_wrong_row": (c_int64, (c_int, c_void_p, c_int64, c_int64)),
    "dt_unpack_blocks": (None, (c_int, c_void_p, c_int64, c_int64, c_void_p)),
    "dt_search": (c_int, (c_int, c_void_p, c_int64, c_void_p)),
    "dt_linear": (None, (POINTER(MatrixStruct), c_void_p, c_int64, c_void_p, c_int64, c_int64)),
    "dt_rank": (None, (c_void_p,)),
}


def declare(library: CDLL, functions: dict[str, tuple[Any, Sequence[Any]]]) -> None:
    """Set the result and argument types of a library's functions. Raises AttributeError naming one
    that it lacks."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@cache
def load() -> CDLL | str:
    """Return the library, or why it is unavailable."""
    if not LIBRARY.exists():
        return f"the C++ kernels are not built; with a C++ compiler: {BUILD}"
    try:
        library = CDLL(str(LIBRARY))
        declare(library, FUNCTIONS)
    except (OSError, AttributeError) as error:
        return f"the C++ kernels cannot be loaded ({error}); rebuild them: {BUILD}"
    return library


def why_not() -> str | None:
    """Return why the kernels are unavailable, in one line with the remedy; None if they are
    available."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


def available() -> bool:
    """Return whether the kernels can be used; `why_not` has the reason."""
    return why_not() is None


def library() -> CDLL:
    """Return the loaded library; raise UserError with the reason if it is unavailable."""
    loaded = load()
    if isinstance(loaded, str):
        raise UserError(loaded)
    return loaded


def isas() -> tuple[Isa, ...]:
    """Return the instruction sets that this build and this machine have, slowest first."""
    bits = library().dt_isas()
    return tuple(isa for isa in Isa if bits >> isa & 1)


def isa() -> Isa:
    """Return the instruction set in use: the best one unless `use_isa` chose another."""
    return Isa(library().dt_isa())


def in_words() -> str:
    """Return the name of the instruction set in use, with the reason if the kernels are missing, or
    are plain on an architecture with faster ones."""
    if missing := why_not():
        return f"none: {missing}"
    why = WHY_PLAIN.get(platform.machine()) if isas() == (Isa.PLAIN,) else None
    return f"{TITLES[isa()]}: {why}" if why else TITLES[isa()]


def isa_of(setting: str) -> Isa:
    """Return the instruction set of a setting, which the machine may lack."""
    return isas()[-1] if setting == "auto" else Isa[setting.upper()]


def check_isa(name: str, setting: str) -> None:
    """Raise UserError if the setting of this name has an instruction set without kernels here."""
    if setting != "auto" and isa_of(setting) not in isas():
        raise UserError(
            f"{name} = {setting!r}: this CPU or this build has no kernels for it, only for "
            f"{', '.join(isa.name.lower() for isa in isas())}"
        )


def use_isa(wanted: Isa, name: str = "instruction set") -> None:
    """Use this instruction set, of the setting `name`. Raises UserError if the machine lacks it."""
    check_isa(name, wanted.name.lower())
    library().dt_use_isa(wanted)


def computing(setting: str | None = None) -> str:
    """Return the name of the code that computes, for measurements: the kernels of the instruction
    set in use or of a setting, or torch without kernels."""
    if not available():
        return "torch"
    return f"kernels {TITLES[isa() if setting is None else isa_of(setting)]}"


def set_threads(count: int) -> None:
    """Share each call among this many threads, including the caller's."""
    library().dt_set_threads(count)


def threads() -> int:
    """Return how many threads share each call; 1 until `set_threads`."""
    return int(library().dt_threads())


class PackedMatrix:
    """A matrix [n out, k in] in the kernels' layout, packed once by rows, with its bias."""

    def __init__(
        self,
        kind: IntEnum,
        n: int,
        k: int,
        *,
        bias: Array | None = None,
        size: int | None = None,
        head: bytes = b"",
    ) -> None:
        """`kind`: a `Kind`, or a `Coded` of coded.py, which is packed differently. `size`: the
        bytes of the weights, if kind and shape do not determine them. `head`: bytes before the
        packed rows that describe their layout."""
        self.kind, self.n, self.k, self.head = kind, n, k, head
        self._linear = library().dt_linear
        size = library().dt_packed_bytes(kind, n, k) if size is None else size
        packed_bytes = -(-size // ALIGNMENT) * ALIGNMENT
        scales_bytes = n * 4 if kind is Kind.INT8 else 0
        self.nbytes = packed_bytes + scales_bytes + (0 if bias is None else n * 4)
        self.memory, packed = fresh_memory(self.nbytes)
        scales = packed + packed_bytes
        self.struct = MatrixStruct(
            kind, n, k, 0, packed, scales if kind is Kind.INT8 else None, None
        )
        if bias is not None:
            self.struct.bias = scales + scales_bytes
            memmove(self.struct.bias, address_of(bias, (n,), ("float32",)), n * 4)
        memmove(packed, head, len(head))
        self._reference = byref(self.struct)
        self.spread()

    def spread(self, count: int = 1, stride: int = 0) -> None:
        """If there are shards, place the memory of the outputs that each shard computes on its
        node; likewise for `count` matrices like this one, `stride` bytes apart. The memory must not
        have been written to."""
        page = page_of(max(self.nbytes, count * stride), count)
        library().dt_spread_matrices(self._reference, count, stride, page)

    def pack(self, rows: Array, first: int = 0) -> None:
        """Pack rows [count, k] as the outputs first .. first + count: fp32, fp16 or bf16 for FP32
        and INT8 (which scales each row), unchanged 16 bits for the others."""
        count = rows.shape[0]
        if not 0 <= first <= first + count <= self.n:
            raise ValueError(f"rows {first}..{first + count} of a matrix of {self.n}")
        library().dt_pack(*self._packing(rows, first, count))

    def pack_alone(self, rows: Array) -> None:
        """Pack all rows [n, k], as `pack` does, on the calling thread alone, so that several
        threads can each pack a matrix."""
        library().dt_pack_alone(*self._packing(rows, 0, self.n))

    def _packing(self, rows: Array, first: int, count: int) -> tuple[Any, ...]:
        """Return the kernels' arguments for packing rows."""
        stored, address = stored_rows(Kind(self.kind), rows, (count, self.k))
        shape = (first, count, self.n, self.k)
        return self.kind, stored, address, *shape, self.struct.packed, self.struct.scales

    def row(self, index: int) -> Array:
        """Return a row [k] in float32 as products use it, a numpy array."""
        found = _numpy_empty(1, self.k)
        self.unpack([index], found)
        return found[0]

    def unpack(self, indices: Sequence[int], out: Array) -> None:
        """Unpack rows, as products use them, into float32 out [count, k]. Raises IndexError for a
        row outside the matrix."""
        start = address_of(out, (len(indices), self.k), ("float32",))
        if indices and not 0 <= min(indices) <= max(indices) < self.n:
            raise IndexError(f"rows {min(indices)} to {max(indices)} of a matrix of {self.n}")
        unpack = library().dt_unpack_row
        for place, index in enumerate(indices):
            unpack(self._reference, index, start + 4 * self.k * place)

    def at(self, memory: Any, address: int) -> Self:
        """Return the matrix with its `nbytes` at another address, which `memory` keeps alive; the
        caller copies them there before use."""
        moved = copy(self)
        moved.memory, moved.struct = memory, MatrixStruct.from_buffer_copy(self.struct)
        for name in ("packed", "scales", "bias"):
            if (here := getattr(self.struct, name)) is not None:
                setattr(moved.struct, name, here + address - self.struct.packed)
        moved._reference = byref(moved.struct)
        return moved

    def linear(self, x: Array) -> Array:
        """x [m, k] float32 -> x W^T + bias [m, n] float32, of the same library as x."""
        m = x.shape[0]
        address = address_of(x, (m, self.k), ("float32",))
        y = x.new_empty((m, self.n)) if hasattr(x, "new_empty") else _numpy_empty(m, self.n)
        self._linear(self._reference, address, self.k, _start(y), self.n, m)
        return y


def _numpy_empty(m: int, n: int) -> Array:
    import numpy

    return numpy.empty((m, n), numpy.float32)


def _start(array: Array) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)


def address_of(array: Array, shape: tuple[int, ...], elements: Sequence[str]) -> int:
    """Return where a contiguous array of this shape and one of these element types starts; raise
    ValueError for any other."""
    contiguous = (
        array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
    )
    element = str(array.dtype).removeprefix("torch.")
    if tuple(array.shape) != shape or element not in elements or not contiguous:
        raise ValueError(
            f"expected a contiguous {' or '.join(elements)} array {shape}, got {element} "
            f"{tuple(array.shape)}"
        )
    return _start(array)


def stored_rows(kind: Kind, rows: Array, shape: tuple[int, int]) -> tuple[Kind, int]:
    """Return the kind and the address of rows to pack into a matrix of a kind. Raises ValueError
    for an array of another shape or type."""
    own = tuple(name for name, stored in STORED.items() if kind in (stored, *WIDENED))
    raw = () if kind in WIDENED else ("uint16",)
    address = address_of(rows, shape, (*own, *raw))
    return STORED.get(str(rows.dtype).removeprefix("torch."), kind), address


def page_of(count: int, items: int = 1) -> int:
    """Return the size of the pages for `count` bytes: huge, unless a shard's part of an item is too
    small for that. `items`: the number of pieces, each divided among the shards."""
    shards = library().dt_shards() if available() else 1
    return HUGE_PAGE if shards == 1 or count // (items * shards) >= LEAST_RUN else mmap.PAGESIZE


def fresh_memory(count: int, items: int = 1, *, huge: bool = True) -> tuple[Any, int]:
    """Return fresh zeroed memory and its address. `huge`: in huge pages if possible, since a pass
    reads all weights and every 4 KB page costs a TLB miss; anything larger than a huge page is
    aligned to one. Otherwise, and if `page_of` says so for its `items`, in small pages, which are
    backed when they are written."""
    huge = huge and page_of(count, items) == HUGE_PAGE
    room = HUGE_PAGE if huge and count >= HUGE_PAGE else 0
    try:
        memory = mmap.mmap(-1, max(count, 1) + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{count} bytes cannot be allocated: {error}") from error
    advice = "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        memory.madvise(getattr(mmap, advice))
    begin = -addressof(c_char.from_buffer(memory)) % HUGE_PAGE if room else 0
    held = (c_char * count).from_buffer(memory, begin)
    return held, addressof(held)


def check_matrix(name: str, matrix: PackedMatrix, n: int, k: int) -> None:
    """Raise ValueError for a matrix that is not [n, k]."""
    if (matrix.n, matrix.k) != (n, k):
        raise ValueError(f"{name} is a matrix {(matrix.n, matrix.k)}, but the layer needs {(n, k)}")
