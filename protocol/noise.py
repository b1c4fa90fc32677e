"""The coupled noise in plain Python: the definition that all processes share.

The noise of token v at absolute position t of a session with a 128-bit key (k0, k1) is g =
-log(-log1p(-u)), a standard Gumbel variate in float64 rounded to float32, with u = ((h >> 12) +
0.5) / 2^52 and the 64-bit counter hash

    h = mix(mix(k1 ^ mix(k0 + (t + 1)·G)) + (v + 1)·G) G = 0x9E3779B97F4A7C15, mix = the finalizer
    of SplitMix64, all modulo 2^64.

The target emits argmax(z + g), an exact sample of softmax(z) (Gumbel-max); the draft ranks its
candidates with the same g, so that the two agree more often. Daliri, Musco, Suresh, "Coupling
without communication and drafter-invariant speculative decoding" (2024).
`workers/speculation/noise.py` computes the same over tensors; a test compares the two.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1
KEY_BYTES = 16
SEED_BITS = 53  # bits of a seed that the server chooses: JavaScript and jq lose precision beyond


def random_seed() -> int:
    """Return a random seed for a request without one."""
    return secrets.randbits(SEED_BITS)


def session_key(seed: int, sample: int, prompt: Sequence[int]) -> bytes:
    """Return the 16-byte key of a session: 128 bits of SHA-256 over seed, sample index and prompt
    token ids (little-endian u64, u32, u32 each)."""
    return hashlib.sha256(struct.pack(f"<QI{len(prompt)}I", seed, sample, *prompt)).digest()[
        :KEY_BYTES
    ]


def key_words(key: bytes) -> tuple[int, int]:
    """Return the two unsigned 64-bit words (k0, k1) of a key, little-endian."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a noise key has {KEY_BYTES} bytes, not {len(key)}")
    k0, k1 = struct.unpack("<QQ", key)
    return k0, k1


def mix(x: int) -> int:
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood, 2014): a bijection of 64-bit
    words."""
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & MASK
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & MASK
    return x ^ (x >> 31)


def position_word(key: bytes, position: int) -> int:
    """Return the 64-bit word from which the noise of every token at one position is derived."""
    k0, k1 = key_words(key)
    return mix(k1 ^ mix((k0 + (position + 1) * GOLDEN) & MASK))


def counter_hash(key: bytes, position: int, token: int) -> int:
    """Return h of the module's formula."""
    return mix((position_word(key, position) + (token + 1) * GOLDEN) & MASK)


def uniform(key: bytes, position: int, token: int) -> float:
    """Return u of the module's formula, within (0, 1)."""
    return ((counter_hash(key, position, token) >> 12) + 0.5) / 2.0**52


def gumbel(key: bytes, position: int, token: int) -> float:
    """Return the noise of one token at one position, a float32 value."""
    noise: float = struct.unpack(
        "<f", struct.pack("<f", -math.log(-math.log1p(-uniform(key, position, token))))
    )[0]
    return noise
