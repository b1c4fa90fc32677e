"""The engine of MTP layers. It settles which of its results a DeepSeek layer's later levels read:
after its last norm, as vLLM 0.33, SGLang and llama.cpp do, or before it, as older engines did."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.arrays import Array
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.head_session import HeadSession
from dovetail.workers.heads.mtp.layers import MtpHead
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.sessions.wire import to_tensor

LEAST, MOST = 64, 256  # rows of the prompt that settles it
SURE = 2.0  # standard errors by which the variant that is not the default must win


class MtpDrafter(HeadDrafter):
    """The engine of an MTP layer, which settles its variant by the first prompt that is long
    enough."""

    def __init__(self, head: MtpHead, *others: Any, found: Callable[[bool], None], **more: Any):
        """`found`: called once with whether later levels read results before the norm."""
        super().__init__(head, *others, **more)
        self.layer, self._found = head, found
        self._text: tuple[Tensor, Tensor] | None = None

    def feed(self, session: HeadSession, start: int, features: Array) -> None:
        super().feed(session, start, features)
        rows = to_tensor(features)[: min(MOST, len(session.log) - 3)]
        if start == 0 and len(rows) >= LEAST and not self.layer.probed:
            self._text = torch.tensor(session.log[: len(rows) + 3]), rows.clone()

    def learn(self) -> bool:
        if self._text is None or self.layer.probed:
            return super().learn()
        gain, error = gain_of_raw(self.layer, *self._text)
        self.layer.raw, self.layer.probed, self._text = gain > SURE * error, True, None
        self._found(self.layer.raw)
        if self.layer.raw:
            said = f"later levels read results before its norm: {gain:+.1%} of tokens foreseen"
            print(f"{self.layer.source}: {said}", file=sys.stderr)
        return True


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
