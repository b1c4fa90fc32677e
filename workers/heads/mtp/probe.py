"""A probe of which of its results an MTP layer's later levels read: after its last norm, the
default, or before it. For DeepSeek's layers, of which engines have run both variants."""

import torch
from torch import Tensor

from dovetail.workers.heads.mtp.layers import MtpHead
from dovetail.workers.models.segment import Paths, Segment


@torch.inference_mode()
def gain_of_raw(head: MtpHead, log: Tensor, features: Tensor) -> tuple[float, float]:
    """Return how much more often the second level foresees the tokens of a log [n + 3] if it reads
    results before the norm, and the standard error. `features` [n, W]: of the first positions."""
    count, right = len(features), list[Tensor]()
    cache = head.new_cache(2 * count)
    paths = Paths.of(0, [[*range(row + 1), count + row] for row in range(count)])
    head.raw = True
    rows, places = [Segment(cache, 0, count)], torch.arange(count)
    found = head.forward(log[1 : count + 1], features.float(), places, rows, true=True)
    cache.keep(range(count), count)
    for states in (head.normed(found.states), found.states):
        behind = [Segment(cache, count, count, paths)]
        guessed = head.forward(log[2 : count + 2], states, places + 1, behind, true=False)
        right.append((guessed.logits.argmax(1).cpu() == log[3 : count + 3]).float())
    head.raw = False
    gains = right[1] - right[0]
    return float(gains.mean()), float(gains.std() / count**0.5)
