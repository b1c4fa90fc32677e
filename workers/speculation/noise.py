"""The coupled noise as tensors: the definition in `protocol/noise.py`, V tokens at a time.

Noise depends on key, position and token alone. The C++ kernels need only a position's word, and
compute the noise of the few tokens for which it can matter; without them, a row is computed once
per position, in advance, while the worker waits. torch has no unsigned 64-bit arithmetic: int64
wraps modulo 2^64 as needed, and a logical right shift is an arithmetic one with the sign bits
masked."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dovetail.protocol.noise import GOLDEN, MULTIPLIERS, position_word
from dovetail.workers.devices.opening import has_fp64

SIGN = 1 << 63


def _signed(word: int) -> int:
    """Return the signed word with the bits of an unsigned 64-bit one."""
    return (word ^ SIGN) - SIGN


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits), with a logical shift."""
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    x = _xor_shift(x, 30) * _signed(MULTIPLIERS[0])
    x = _xor_shift(x, 27) * _signed(MULTIPLIERS[1])
    return _xor_shift(x, 31)


def gumbel_noise(
    key: bytes, position: int, size: int, device: torch.device | None = None
) -> Tensor:
    """Return the noise [V] (float32) of the tokens 0..size-1 at an absolute position, on a device.
    The host computes it for a device without fp64."""
    where = device if device is None or has_fp64(device) else None
    counters = torch.arange(1, size + 1, dtype=torch.int64, device=where)
    noise = _gumbel(counters, _signed(position_word(key, position))).to(torch.float32)
    return noise if device is None else noise.to(device)


def gumbel_noise_of(key: bytes, positions: Sequence[int], tokens: Tensor) -> Tensor:
    """Return the noise [N, K] (float64) of single tokens [N, K], each row at its own position."""
    words = torch.tensor(
        [_signed(position_word(key, position)) for position in positions], dtype=torch.int64
    ).unsqueeze(1)
    return _gumbel(tokens.to(torch.int64) + 1, words)


def _gumbel(counters: Tensor, words: Tensor | int) -> Tensor:
    """Return float64 noise of the counters (token + 1) at positions given by their words."""
    hashed = _mix(counters * _signed(GOLDEN) + words)
    uniform = (((hashed >> 12) & ((1 << 52) - 1)).to(torch.float64) + 0.5) / 2.0**52
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Noise:
    """The noise of the tokens 0..size-1 at an absolute position."""

    def __init__(
        self, key: bytes, position: int, size: int, device: torch.device | None = None
    ) -> None:
        self.word = position_word(key, position)  # the kernels derive the noise from it
        self._of = key, position, size, device

    @cached_property
    def row(self) -> Tensor:
        """The whole row, [V] float32."""
        return gumbel_noise(*self._of)


class NoiseCache:
    """The noise of one session by position. Rows are computed on demand or in advance, and dropped
    when the log has passed them."""

    def __init__(self, key: bytes, size: int, device: torch.device | None = None) -> None:
        self._key, self._size, self._device = key, size, device
        self._known: dict[int, Noise] = {}

    def __len__(self) -> int:
        return len(self._known)

    def at(self, position: int) -> Noise:
        """Return the noise at a position."""
        if position not in self._known:
            self._known[position] = Noise(self._key, position, self._size, self._device)
        return self._known[position]

    def prepare(self, first: int, count: int) -> bool:
        """Compute one missing row of the positions first..first+count-1; return False if none was
        missing."""
        missing = next((p for p in range(first, first + count) if p not in self._known), None)
        if missing is not None:
            _ = self.at(missing).row
        return missing is not None

    def drop_before(self, position: int) -> None:
        """Drop the noise of earlier positions."""
        for old in [p for p in self._known if p < position]:
            del self._known[old]
