"""Levels of a head's tree, computed for one session."""

import numpy as np
import torch
from torch import Tensor

from dovetail.workers.devices.base import Capture
from dovetail.workers.drafters.head_levels import Level, compute_level, open_levels
from dovetail.workers.heads.head import Head
from dovetail.workers.models.segment import Paths, Segment

TOKENS = torch.tensor([3, 17, 9, 30, 8, 22, 41, 5, 9, 11])


@torch.inference_mode()
def levels_of(head: Head, making: Capture | None) -> Tensor:
    """Return the logits of true rows, and of two levels of a tree behind them."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(5, head.spec.feature_width, generator=generator).to(head.device)
    cache, levels = open_levels(head, 12, making, of_tree=4)
    found = head.forward(TOKENS[:5], features, torch.arange(5), [Segment(cache, 0, 5)], true=True)
    cache.keep(range(5), 5)
    rows = [found.logits[-1:]]
    levels.states[0] = found.states[-1]
    for start, paths, above in ((5, [[5], [6]], [0, 0]), (7, [[5, 7], [6, 8]], [1, 2])):
        level = Level(
            TOKENS[start : start + 2],
            torch.full((2,), start // 2 + 3),
            Segment(cache, start, 2, Paths.of(5, paths)),
            wanted=2,
            levels=levels,
            above=np.array(above),
            into=start - 4,
        )
        rows.append(compute_level(head, level).logits)
    return torch.cat(rows).cpu()
