"""Settings of sampling: how a token is chosen from its logits."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, field_serializer

from dovetail.protocol.settings.values import Frozen

MAX_BIASES = 1024
"""The most tokens that one request may bias."""


def _pairs(value: Any) -> Any:
    """Convert a table of TOML or JSON (token id -> bias), or the text "5=-2.5,17=3", to pairs;
    anything else is returned unchanged and left to validation."""
    if isinstance(value, Mapping):
        halves = [*value.items()]
    elif isinstance(value, str):
        halves = [
            (token, bias)
            for token, _, bias in (
                part.partition("=") for part in value.split(",") if value.strip()
            )
        ]
    else:
        return value
    try:
        return tuple(
            (int(token), bias if isinstance(bias, bool) else float(bias)) for token, bias in halves
        )  # the field types check true and false
    except (TypeError, ValueError):
        raise ValueError(
            "write token ids and biases, such as 17=-100,5=2.5 on a command line or { 17 = "
            "-100, 5 = 2.5 } in a file"
        ) from None


def _in_order(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Sort by token id, so that equal biases are equal values."""
    ordered = tuple(sorted(pairs))
    for (token, _), (following, _) in pairwise(ordered):
        if token == following:
            raise ValueError(f"token {token} has two biases: leave one out")
    return ordered


LogitBias = Annotated[
    tuple[
        tuple[
            Annotated[int, Field(ge=0, le=(1 << 31) - 1)],
            Annotated[float, Field(ge=-100.0, le=100.0)],
        ],
        ...,
    ],
    FailFast(),
    MaxLen(MAX_BIASES),
    BeforeValidator(_pairs),
    AfterValidator(_in_order),
]
"""Pairs of a token id and the value added to its logit, in order of the ids."""


class Sampling(Frozen):
    """The processors of a session, applied in this order: logit bias, repetition penalty (over
    prompt and reply), presence and frequency penalty (over the reply), minimum number of tokens,
    temperature, top-k, top-p, min-p. Temperature 0 is greedy: the largest logit before temperature.

    The names and ranges are OpenAI's where it has them, else transformers'.
    """

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(0.0, description="0: greedy")
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        0, description="keep the k likeliest tokens; 0: all"
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="keep the likeliest tokens that together reach this probability"
    )
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="keep tokens of at least this share of the likeliest one's probability"
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = Field(
        1.0,
        description="logits of tokens of prompt and reply are divided by it, negative ones "
        "multiplied; 1: off",
    )
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        0.0, description="subtracted from the logit of every token in the reply"
    )
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        0.0, description="subtracted from a token's logit once for each occurrence in the reply"
    )
    logit_bias: LogitBias = Field(
        (),
        description="added to the logits of tokens: TOKEN=BIAS,..., with biases from -100 to 100",
    )
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        0, description="tokens that end the reply are excluded before this many tokens"
    )
    acceptance: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="above temperature 0: coupled (draft and target share their noise) or "
        "rejection (the papers' speculative sampling, of trees of a static "
        "shape; exact in distribution, but the tokens depend on the draft)",
    )

    @property
    def rejects(self) -> bool:
        """Return whether drafts are sampled and accepted with probability p/q; at temperature 0
        both rules are greedy."""
        return self.acceptance == "rejection" and self.temperature > 0.0

    @property
    def truncates(self) -> bool:
        """Return whether top-k, top-p or min-p excludes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def looks_back(self) -> bool:
        """Return whether anything besides temperature, top-k, top-p and min-p is set; a token's
        logit then depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens
        )

    @field_serializer("logit_bias", when_used="json")
    def _table(self, pairs: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """Serialise as a map from token id to bias, as OpenAI does."""
        return {str(token): bias for token, bias in pairs}


def plain(one: Sampling) -> Sampling:
    """Return the settings without the fields that a derived class adds."""
    return Sampling(**{name: getattr(one, name) for name in Sampling.model_fields})


class SamplingSettings(Sampling):
    """Defaults of a request."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        512, description="capped by the room left in the context"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: chat, generate and serve take sampling defaults from the target's "
        "generation_config.json; none: they do not",
    )
