"""The output rows of a session's own tokens, in addition to a reduced output head."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

MOST = 512  # the most rows of a session


class RecentRows:
    """The rows of the last distinct tokens of a text that a reduced output head lacks, at most
    `MOST`, and those of end tokens, which stay."""

    def __init__(self, output: Tensor, lacking: Tensor, text: Sequence[int], end: Sequence[int]):
        """`output`: all rows [V, H]; `lacking`: bool [V], the tokens without a row elsewhere."""
        self._output, self._lacking = output, lacking
        self._places: OrderedDict[int, int] = OrderedDict()  # token -> row, the oldest first
        self._ids = torch.zeros(MOST, dtype=torch.int64)
        self._rows = torch.empty(MOST, output.shape[1])
        self._end = frozenset(end)
        self.add([*text, *end])

    def add(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the text, in place of the oldest ones."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        lacking = ids[self._lacking[ids]].flip(0).tolist()  # the last ones first
        for token in reversed([*dict.fromkeys(lacking)][:MOST]):
            place = self._places.pop(token, None)
            if place is None:
                place = len(self._places) if len(self._places) < MOST else self._drop()
                self._ids[place], self._rows[place] = token, self._output[token].float()
            self._places[token] = place

    def _drop(self) -> int:
        """Drop the oldest token; return its row."""
        return self._places.pop(next(token for token in self._places if token not in self._end))

    @property
    def count(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> Tensor:
        """The tokens, int64 [N]."""
        return self._ids[: self.count]

    def product(self, states: Tensor) -> Tensor:
        """Return the products [R, N] of states [R, H] with the rows of the tokens."""
        return linear(states, self._rows[: self.count])
