"""Logits of a model for a text, for a tree behind it, and behind one of its paths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TREE = [[10], [10, 11], [10, 12], [10, 12, 13]]


def logits_of(model: LanguageModel, ids: Sequence[int], rows: int = 0) -> Tensor:
    """The logits [T, V] of a text in a session of its own; `rows`: see `extend`."""
    return extend(model, model.new_cache(len(ids)), ids, rows)


def extend(model: LanguageModel, cache: Cache, ids: Sequence[int], rows: int = 0) -> Tensor:
    """Read and commit tokens behind those of a cache, so many rows at a time (0: all); their
    logits."""
    found = []
    for part in torch.tensor(ids).split(rows or len(ids)):
        start, count = cache.length, len(part)
        places = torch.arange(start, start + count)
        found.append(model.forward(part, places, [Segment(cache, start, count)]))
        cache.keep(range(start, start + count), count)
    return torch.cat(found)


def decode(model: LanguageModel) -> Tensor:
    """The logits of a prompt, of a tree, and of a token behind one of its paths."""
    cache = model.new_cache(16)
    found = [read(model, cache), level(model, cache)]
    cache.keep([10, 12, 13], 3)
    cache.resize(64)
    last = Segment(cache, 13, 1, Paths.of(13, [[13]]))
    found.append(model.forward(torch.tensor([4]), torch.tensor([13]), [last]))
    return torch.cat([logits.cpu() for logits in found])


def read(model: LanguageModel, cache: Cache) -> Tensor:
    """The logits of the prompt, whose rows the cache keeps."""
    return extend(model, cache, TOKENS)


def level(model: LanguageModel, cache: Cache) -> Tensor:
    """The logits of the tree behind the prompt."""
    tree = Segment(cache, len(TOKENS), len(TREE), Paths.of(len(TOKENS), TREE))
    return model.forward(torch.tensor([30, 7, 8, 22]), torch.tensor([10, 11, 11, 12]), [tree])


def in_a_tree(model: LanguageModel, ids: Sequence[int], prompt: int) -> Tensor:
    """The logits [T, V] of a text: behind the prompt it is a path among strangers in a tree."""
    count = len(ids) - prompt
    cache = model.new_cache(prompt + 2 * count)
    found = extend(model, cache, ids[:prompt])
    drawn, paths, above = [], [], list[int]()
    for slot, token in zip(range(prompt, prompt + 2 * count, 2), ids[prompt:], strict=True):
        drawn += [(token + 7) % 45 + 3, token]
        paths += [[*above, slot], [*above, slot + 1]]
        above.append(slot + 1)
    tree = Segment(cache, prompt, 2 * count, Paths.of(prompt, paths))
    positions = torch.tensor([prompt + node // 2 for node in range(2 * count)])
    return torch.cat([found, model.forward(torch.tensor(drawn), positions, [tree])[1::2]])


def far(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference as a share of that of what is expected."""
    return float((found.cpu() - expected).norm() / expected.norm())
