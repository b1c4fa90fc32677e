"""`AheadTrial` finds out from past rounds whether the draft should continue while the target
verifies, if both share a device or the draft continues its own guesses. Pure: no clock, no
messages."""

from collections.abc import Sequence

from dovetail.runtime.control.on_off import SETTLING

BLOCK = 12  # rounds of a block of a trial
TURNS: Sequence[bool] = (False, True, True, False, False, True, True, False)
WORTH = 1.02  # how much faster growth ahead must be
FIRST_PAUSE, MOST_PAUSE = 512, 8192


class AheadTrial:
    """Tries growing ahead in blocks of rounds, keeps the better choice, and tests again later."""

    def __init__(self) -> None:
        self.ahead = TURNS[0]
        self._round = self._block = 0
        self._pause = 0
        self._next_pause = FIRST_PAUSE
        self._sums = {False: [0.0, 0.0], True: [0.0, 0.0]}
        self._told: bool | None = None

    def drafted(self, tokens: float, seconds: float) -> str | None:
        """Count a round with drafting. Return a new decision in words, or None."""
        if self._pause:
            self._pause -= 1
            if not self._pause:
                self.ahead = TURNS[0]
            return None
        self._round += 1
        if self._round > SETTLING:
            sums = self._sums[self.ahead]
            sums[0], sums[1] = sums[0] + tokens, sums[1] + seconds
        if self._round < BLOCK:
            return None
        self._round, self._block = 0, self._block + 1
        if self._block < len(TURNS):
            self.ahead = TURNS[self._block]
            return None
        return self._judge()

    def _judge(self) -> str | None:
        without, with_ = (
            sums[0] / max(1e-9, sums[1]) for sums in (self._sums[False], self._sums[True])
        )
        self.ahead = with_ > WORTH * without
        self._block, self._pause = 0, self._next_pause
        self._next_pause = (
            min(2 * self._next_pause, MOST_PAUSE)
            if self.ahead == self._told or self._told is None
            else FIRST_PAUSE
        )
        self._sums = {False: [0.0, 0.0], True: [0.0, 0.0]}
        changed, self._told = self.ahead != self._told, self.ahead
        if self.ahead:
            verdict = "is on because it is faster"
        elif with_ <= without:
            verdict = "is off because it was not faster"
        else:
            verdict = f"is off because it was not {100 * (WORTH - 1):.0f} % faster"
        rates = f"{with_:.1f} tokens/s with it, {without:.1f} without"
        return f"drafting ahead {verdict}: {rates}" if changed else None
