"""The codebooks of the 2- and 3-bit types (IQ2, IQ3): an index stands for the magnitudes of 8 or 4
numbers, whose signs and scales are stored separately."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dovetail.workers import kernels

FILE = Path(kernels.__file__).parent / "native" / "codebooks.h"
"""The entries, which the C++ kernels compile in; its head describes the notation."""
SIZES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": range(1, 16, 2),
}
"""A type -> the magnitudes that an entry chooses from."""


@cache
def codebook(name: str) -> Tensor:
    """Return the magnitudes of a type's entries, fp32 [entries, 8 or 4]."""
    _, _, text = FILE.read_text().partition(f"{name}_ENTRIES")
    number, found = 0, []
    for letter in "".join(re.findall(r'"(.*)"', text.partition(";")[0])):
        number += 52 if letter == "+" else ord(letter) - ord("A" if letter < "a" else "G")
        if letter != "+":
            found.append(number)
    sizes = SIZES[name]
    places = torch.tensor(len(sizes)) ** torch.arange(8 if len(sizes) == 3 else 4)
    choices = torch.tensor(found).unsqueeze(1) // places % len(sizes)
    return torch.tensor(sizes, dtype=torch.float32)[choices]


def chosen(name: str, indices: Tensor, signs: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks, fp32 [blocks, 256], from indices [blocks, entries], signs uint8
    [blocks, 32], a bit for each number, and scales fp32 [blocks, 8 or 16]."""
    sizes = codebook(name)[indices.long()].flatten(1)
    minus = signs.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1
    numbers = torch.where(minus.flatten(1).bool(), -sizes, sizes)
    return (numbers.view(*scales.shape, -1) * scales.unsqueeze(2)).flatten(1)


def even(seven: Tensor) -> Tensor:
    """Return the signs of 8 numbers, uint8, given seven: the number of minus signs is even."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return (seven | ((odd ^ odd >> 1) & 1) << 7).to(torch.uint8)
