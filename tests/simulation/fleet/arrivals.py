"""The requests of a load: when they come, and how long prompts and replies are. Random by a seed,
and as arrays, since there are millions."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dovetail.protocol.errors import UserError

Process = Literal["poisson", "diurnal", "bursts"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DAY_S = 86400.0
SWING = 0.6
"""The rate of the `diurnal` process is its mean times 1 +- this: at its height four times that of
the night."""
BURST_TIMES, BURST_SHARE, BURST_S = 5.0, 0.1, 20.0
"""In a burst five times as many requests come as between two; a tenth of the time is one, and each
lasts so long on average."""
LETTERS = 4.0  # letters of a token, for prompts that no tokenizer has seen


@dataclass(frozen=True)
class Requests:
    """Requests in the order in which they come; arrays of one length."""

    at_s: Floats
    prompts: Ints  # tokens of each prompt; `replies` likewise, the first token among them
    replies: Ints
    keys: Ints  # the API key of each

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True)
class Mix:
    """The lengths of prompts and replies, in tokens: log-normal, or those of a file."""

    prompt: float  # mean; `reply` likewise
    reply: float
    sigma: float  # deviation of the logarithm of a length; 0: all have the mean
    prompts: tuple[int, ...] = ()
    """Lengths of the prompts of a file, each as likely as the others; empty: log-normal."""

    @property
    def means(self) -> tuple[float, float]:
        """Return the mean tokens of a prompt and of a reply."""
        prompt = sum(self.prompts) / len(self.prompts) if self.prompts else self.prompt
        return prompt, self.reply

    def draw(self, random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        if self.prompts:
            prompts = random.choice(np.array(self.prompts, np.int64), count)
        else:
            prompts = self._lengths(random, self.prompt, count)
        return prompts, self._lengths(random, self.reply, count)

    def _lengths(self, random: np.random.Generator, mean: float, count: int) -> Ints:
        location = math.log(mean) - self.sigma**2 / 2
        drawn = np.exp(random.normal(location, self.sigma, count))
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


def draw_requests(
    process: Process, rate: float, seconds: float, mix: Mix, keys: int, seed: int
) -> Requests:
    """Return the requests of so many seconds at a mean rate a second."""
    random = np.random.default_rng(seed)
    if process == "poisson":
        at_s = _poisson(random, rate, seconds)
    elif process == "diurnal":
        drawn = _poisson(random, rate * (1 + SWING), seconds)
        share = 1 + SWING * np.sin(2 * np.pi * drawn / min(DAY_S, seconds))
        at_s = drawn[random.random(len(drawn)) * (1 + SWING) < share]
    else:
        at_s = _bursts(random, rate, seconds)
    prompts, replies = mix.draw(random, len(at_s))
    return Requests(at_s, prompts, replies, random.integers(0, keys, len(at_s)))


def read_trace(path: Path) -> Requests:
    """Return the requests of a file: a JSON object a line with `at_s`, `prompt_tokens`,
    `reply_tokens` and, if there are several, `key`. `UserError` for one that has other lines."""
    rows: list[tuple[float, int, int, int]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found = (
                float(row["at_s"]),
                int(row["prompt_tokens"]),
                int(row["reply_tokens"]),
                int(row.get("key", 0)),
            )
            if not (math.isfinite(found[0]) and min(found) >= 0 and min(found[1:3]) >= 1):
                raise ValueError
            rows.append(found)
    except OSError as error:
        raise UserError(f"the trace {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(
            f"the trace {path}, line {len(rows) + 1}: write a JSON object with the numbers at_s, "
            "prompt_tokens and reply_tokens, and key if there are several"
        ) from None
    if not rows:
        raise UserError(f"the trace {path} holds no request")
    at_s, prompts, replies, keys = zip(*sorted(rows), strict=True)
    return Requests(np.array(at_s), np.array(prompts), np.array(replies), np.array(keys))


def token_lengths(texts: list[str]) -> tuple[int, ...]:
    """Return about how many tokens texts have."""
    return tuple(max(1, round(len(text) / LETTERS)) for text in texts)


def _poisson(random: np.random.Generator, rate: float, seconds: float) -> Floats:
    count = random.poisson(rate * seconds)
    return np.sort(random.random(count) * seconds)


def _bursts(random: np.random.Generator, rate: float, seconds: float) -> Floats:
    """Return arrivals of a process that is at times in a burst (a Markov-modulated Poisson process
    of two states)."""
    calm = rate / (1 + BURST_SHARE * (BURST_TIMES - 1))
    times: list[Floats] = []
    at_s, burst = 0.0, False
    while at_s < seconds:
        mean_s = BURST_S if burst else BURST_S * (1 - BURST_SHARE) / BURST_SHARE
        lasts_s = min(random.exponential(mean_s), seconds - at_s)
        times.append(at_s + _poisson(random, calm * (BURST_TIMES if burst else 1), lasts_s))
        at_s, burst = at_s + lasts_s, not burst
    return np.concatenate(times)
