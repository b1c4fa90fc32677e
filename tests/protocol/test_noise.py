"""The definition of the noise: fixed vectors (computed once with wrapping uint64 arithmetic of
numpy), and its distribution."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dovetail.protocol import noise

# key, position, token, h, g as a float32 in hexadecimal
VECTORS = [
    ("00000000000000000000000000000000", 0, 0, 0x568A9B0B1A2C05EC, "0x1.c54cd80000000p-1"),
    ("00000000000000000000000000000000", 1, 2, 0xD89CF8DD1B9BD4B0, "-0x1.40f5540000000p-1"),
    ("00000000000000000000000000000000", 7, 151935, 0xF93106EAE8188AC4, "-0x1.49d51a0000000p+0"),
    (
        "00000000000000000000000000000000",
        131071,
        32000,
        0xC4A1A30242EEDD49,
        "-0x1.8482380000000p-2",
    ),
    (
        "00000000000000000000000000000000",
        2147483647,
        2147483647,
        0xC9C48DB5E947CF72,
        "-0x1.c207720000000p-2",
    ),
    ("000102030405060708090a0b0c0d0e0f", 0, 0, 0x885B655567AAC36D, "0x1.18209c0000000p-2"),
    ("000102030405060708090a0b0c0d0e0f", 1, 2, 0xBAF8874CCAFD9228, "-0x1.1503a40000000p-2"),
    ("000102030405060708090a0b0c0d0e0f", 7, 151935, 0x01074A572AEB5E35, "0x1.60f7280000000p+2"),
    ("000102030405060708090a0b0c0d0e0f", 131071, 32000, 0x76F95B0481ADE251, "0x1.e145a80000000p-2"),
    (
        "000102030405060708090a0b0c0d0e0f",
        2147483647,
        2147483647,
        0x8D09E3A20B7B3E4A,
        "0x1.c782ac0000000p-3",
    ),
    ("ffffffffffffffffffffffffffffffff", 0, 0, 0xBB01391F6277D93C, "-0x1.15660e0000000p-2"),
    ("ffffffffffffffffffffffffffffffff", 1, 2, 0xF2FA85610BCFBB8E, "-0x1.17691e0000000p+0"),
    ("ffffffffffffffffffffffffffffffff", 7, 151935, 0xE324566FF8F4042D, "-0x1.8fab340000000p-1"),
    ("ffffffffffffffffffffffffffffffff", 131071, 32000, 0x3EDFEBEAE6FB82E5, "0x1.44343e0000000p+0"),
    (
        "ffffffffffffffffffffffffffffffff",
        2147483647,
        2147483647,
        0xA00F07EFD643A02B,
        "0x1.32ed420000000p-6",
    ),
    ("2925aaa8ddd0d17c359ec599fc656960", 0, 0, 0x45FFBF63D2F711C8, "0x1.2427bc0000000p+0"),
    ("2925aaa8ddd0d17c359ec599fc656960", 1, 2, 0xF50AFE81F96916AE, "-0x1.25d5000000000p+0"),
    ("2925aaa8ddd0d17c359ec599fc656960", 7, 151935, 0xA1359D91D0B2E82D, "0x1.aae0020000000p-8"),
    (
        "2925aaa8ddd0d17c359ec599fc656960",
        131071,
        32000,
        0xEC9FC25739B67A80,
        "-0x1.e57ed40000000p-1",
    ),
    (
        "2925aaa8ddd0d17c359ec599fc656960",
        2147483647,
        2147483647,
        0xF551E93C9F6EA9B1,
        "-0x1.27e76a0000000p+0",
    ),
]

# seed, sample, prompt, key
KEYS = [
    (0, 0, [], "15ec7bf0b50732b49f8228e07d243653"),
    (0, 0, [1], "741939ccb979df0dbf391a6548f88fd9"),
    (1, 0, [1, 2, 3], "973eff301cae4b40e71aa0eb4b8a9ef1"),
    (1, 1, [1, 2, 3], "2e6e7d60cd57fc3646b95a7ff450729b"),
    (9223372036854775807, 7, [0, 151935, 2147483647], "4b315543732c5dcb1e04005379786b73"),
]

# Outputs 1 to 3 of SplitMix64 seeded with 1234567, as published with its reference implementation.
SPLITMIX = [6457827717110365317, 3203168211198807973, 9817491932198370423]
KEY = bytes(range(16))


@pytest.mark.parametrize(("key", "position", "token", "expected_hash", "expected_noise"), VECTORS)
def test_hash_and_noise_are_those_of_the_vectors(
    key: str, position: int, token: int, expected_hash: int, expected_noise: str
) -> None:
    assert noise.counter_hash(bytes.fromhex(key), position, token) == expected_hash
    assert noise.gumbel(bytes.fromhex(key), position, token) == float.fromhex(expected_noise)


@pytest.mark.parametrize(("seed", "sample", "prompt", "expected"), KEYS)
def test_session_keys_are_those_of_the_vectors(
    seed: int, sample: int, prompt: list[int], expected: str
) -> None:
    assert noise.session_key(seed, sample, prompt).hex() == expected


def test_the_mixer_is_splitmix64() -> None:
    assert [noise.mix((1234567 + i * noise.GOLDEN) & noise.MASK) for i in (1, 2, 3)] == SPLITMIX


def test_seed_sample_and_prompt_each_change_the_key() -> None:
    keys = {
        noise.session_key(seed, sample, prompt)
        for seed in (0, 1)
        for sample in (0, 1)
        for prompt in ([], [0], [0, 0], [1])
    }
    assert len(keys) == 16


def test_a_key_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 15"):
        noise.gumbel(bytes(15), 0, 0)


def unmix(x: int) -> int:
    """The inverse of the mixer."""
    x = x ^ (x >> 31) ^ (x >> 62)
    x = (x * pow(noise.MULTIPLIERS[1], -1, 1 << 64)) & noise.MASK
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * pow(noise.MULTIPLIERS[0], -1, 1 << 64)) & noise.MASK
    return x ^ (x >> 30) ^ (x >> 60)


@pytest.mark.parametrize("word", [0, noise.MASK])
def test_noise_is_finite_at_both_ends_of_the_uniform(word: int) -> None:
    k1 = unmix((unmix(word) - noise.GOLDEN) & noise.MASK) ^ noise.mix(noise.GOLDEN)
    key = bytes(8) + k1.to_bytes(8, "little")
    assert noise.counter_hash(key, 0, 0) == word
    assert math.isfinite(noise.gumbel(key, 0, 0))


@given(st.binary(min_size=16, max_size=16), st.integers(0, 1 << 31), st.integers(0, 1 << 31))
def test_noise_is_a_float32(key: bytes, position: int, token: int) -> None:
    value = noise.gumbel(key, position, token)
    assert value == float(np.float32(value))


def test_mean_and_variance_are_those_of_the_standard_gumbel() -> None:
    sample = np.array(
        [noise.gumbel(KEY, position, token) for position in range(200) for token in range(250)]
    )
    assert sample.mean() == pytest.approx(0.5772, abs=0.02)
    assert sample.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 0.001


def test_the_argmax_of_logits_and_noise_is_a_sample_of_their_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.0, 0.0, -1.0, -2.0])
    expected = np.exp(logits) / np.exp(logits).sum()
    draws = 12000
    table = np.array(
        [
            [noise.gumbel(KEY, position, token) for token in range(logits.size)]
            for position in range(draws)
        ]
    )
    observed = np.bincount((logits + table).argmax(axis=1), minlength=logits.size)
    assert stats.chisquare(observed, expected * draws).pvalue > 0.001


def test_neighbouring_positions_and_tokens_are_uncorrelated() -> None:
    table = np.array(
        [[noise.gumbel(KEY, position, token) for token in range(100)] for position in range(200)]
    )
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(one.size)
