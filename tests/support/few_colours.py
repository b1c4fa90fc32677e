"""Pictures of pages in few colours, so that they are small enough for the documentation: PNG with a
palette. Knows pixels, not where they are from."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 60_000
"""The largest size of a picture of the documentation."""
PALETTES = (128, 96, 64, 48, 32, 24, 16)
"""Numbers of colours that are tried, until a picture is small enough."""
BUCKET = 16
"""Colours whose channels agree but for less than this count as one when the most frequent are
chosen, ..."""
LARGE = 0.002
"""... but for those of surfaces: so large a share of the picture."""


def small_png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of these pixels (rows, columns, 3), with as many colours as MOST_BYTES allows;
    `ValueError` if it takes more even with the fewest."""
    for colours in PALETTES:
        palette, indices = in_few_colours(pixels, colours)
        found = palette_png(palette, indices)
        if len(found) < MOST_BYTES:
            return found
    raise ValueError(
        f"a picture of {pixels.shape[1]} x {pixels.shape[0]} pixels takes {len(found)} bytes "
        f"in {PALETTES[-1]} colours: take a smaller one"
    )


def in_few_colours(
    pixels: NDArray[np.uint8], colours: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The most frequent colours (at most so many, 3), and for each pixel the number of the nearest
    (rows, columns)."""
    every, which, counts = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    order = np.argsort(-counts, kind="stable")
    large = counts[order] >= LARGE * counts.sum()
    _, first = np.unique(
        every[order] // BUCKET, axis=0, return_index=True
    )  # of each bucket the most frequent colour
    palette = every[order][np.union1d(large.nonzero()[0], first)[:colours]]
    apart = ((every[:, None, :].astype(np.int32) - palette[None].astype(np.int32)) ** 2).sum(axis=2)
    nearest = apart.argmin(axis=1).astype(np.uint8)
    return palette, nearest[which.reshape(-1)].reshape(pixels.shape[:2])


def palette_png(palette: NDArray[np.uint8], indices: NDArray[np.uint8]) -> bytes:
    """A PNG of numbers of colours, a byte each and no filter (PNG specification, 11.2)."""
    rows, columns = indices.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), indices], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
