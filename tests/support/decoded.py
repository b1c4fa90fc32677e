"""Logits of a model for a prompt, for a tree behind it, and behind one of its paths."""

import torch
from torch import Tensor

from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TREE = [[10], [10, 11], [10, 12], [10, 12, 13]]


def decode(model: LanguageModel) -> Tensor:
    """Return the logits of a prompt, of a tree, and of a token behind one of its paths."""
    cache = model.new_cache(40)
    found = [read(model, cache), level(model, cache)]
    cache.keep([10, 12, 13], 3)
    last = Segment(cache, 13, 1, Paths.of(13, [[13]]))
    found.append(model.forward(torch.tensor([4]), torch.tensor([13]), [last]))
    return torch.cat([logits.cpu() for logits in found])


def read(model: LanguageModel, cache: Cache) -> Tensor:
    """Return the logits of the prompt, whose rows the cache keeps."""
    count = len(TOKENS)
    found = model.forward(torch.tensor(TOKENS), torch.arange(count), [Segment(cache, 0, count)])
    cache.keep(range(count), count)
    return found


def level(model: LanguageModel, cache: Cache) -> Tensor:
    """Return the logits of the tree behind the prompt."""
    tree = Segment(cache, len(TOKENS), len(TREE), Paths.of(len(TOKENS), TREE))
    return model.forward(torch.tensor([30, 7, 8, 22]), torch.tensor([10, 11, 11, 12]), [tree])


def far(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference as a share of that of what is expected."""
    return float((found.cpu() - expected).norm() / expected.norm())
