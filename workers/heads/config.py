"""The config.json of a draft head: every key that all kinds share, with its type and range.

A null or empty value counts as missing, since transformers writes those; unknown keys are ignored.
Independent of tensors and target."""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from dovetail.protocol.messages import MAX_LAYERS, MAX_TAPS, MAX_WIDTH, Label
from dovetail.protocol.settings import Frozen

LONGEST_TARGET = 100  # longer names of targets are truncated to this many characters
REMEDY = "take the config.json that belongs to its weights"

Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Positions = Annotated[int, Field(ge=1, lt=1 << 31)]
Factor = Annotated[float, Field(ge=1e-3, le=1e6)]
"""Factors of frequencies and angles, in a range that keeps them finite."""
Factors = Annotated[tuple[Factor, ...], Field(max_length=MAX_WIDTH, strict=False)]
Base = Annotated[float, Field(ge=1.0, le=1e12)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]

Layers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...], Field(max_length=MAX_TAPS, strict=False)
]
"""Layers of a target whose inputs are read; the number of layers: the input of the final norm."""
Outputs = Annotated[
    tuple[Annotated[int, Field(ge=-1, lt=MAX_LAYERS)], ...],
    Field(max_length=MAX_TAPS, strict=False),
]
"""Layers of a target, counted by their outputs; -1: its embedding."""


class MisfitError(Exception):
    """An error of a head: a sentence without its subject, the checkpoint, which the caller
    prepends."""


class Read(Frozen):
    """An object in config.json, some of whose keys are read, without coercion."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value not in (None, {}, [])}
            if isinstance(values, dict)
            else values
        )


class RotaryConfig(Read):
    """`rope_parameters` of transformers 5, or `rope_scaling` of earlier versions."""

    rope_type: str | None = None
    type: str | None = None  # the older name of `rope_type`
    rope_theta: Base | None = None
    partial_rotary_factor: Share | None = None
    factor: Factor | None = None
    attention_factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    original_max_position_embeddings: Positions | None = None
    truncate: bool | None = None
    short_factor: Factors = ()
    long_factor: Factors = ()


class OwnConfig(Read):
    """The keys that this project adds for the heads that it trains."""

    trained_for: Label = ""  # digest of the target


class VerifierConfig(Read):
    """The target in `speculators_config`."""

    name_or_path: str = ""


class SpeculatorsConfig(Read):
    """The object `speculators_config` of the speculators library."""

    verifier: VerifierConfig = VerifierConfig()


class HeadConfig(Read):
    """The keys of config.json that every kind of head has; kinds add their own in a subclass. Keys
    without a default are required; None means that the value is derived from others."""

    hidden_size: Width
    num_attention_heads: Width
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = 1
    target_hidden_size: Width | None = None
    intermediate_size: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Positions = 2048
    hidden_act: str = "silu"
    rms_norm_eps: Share = 1e-6
    rope_theta: Base | None = None
    rope_parameters: RotaryConfig | None = None
    rope_scaling: RotaryConfig | None = None
    partial_rotary_factor: Share | None = None
    bias: bool = False
    qkv_bias: bool = False
    dovetail: OwnConfig = OwnConfig()
    speculators_config: SpeculatorsConfig = SpeculatorsConfig()

    @property
    def made_for(self) -> str:
        """Return the name of the target that the head was made for, in brackets; else empty."""
        name = self.speculators_config.verifier.name_or_path
        return f" ({name[:LONGEST_TARGET]})" if name else ""


ConfigT = TypeVar("ConfigT", bound=HeadConfig)


def read_config(values: Mapping[str, Any], model: type[ConfigT]) -> ConfigT:
    """Return the checked content of a config.json. Raises `MisfitError` naming the first wrong key,
    its value, and what it should be. The decoder layer may be described in
    `transformer_layer_config` (the speculators library)."""
    inner = values.get("transformer_layer_config")
    if isinstance(inner, Mapping):
        values = {**inner, **values}
    elif inner is not None:
        raise MisfitError(
            f"has transformer_layer_config {reprlib.repr(inner)} in config.json: it should be "
            f"an object; {REMEDY}"
        )
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise MisfitError(_complaint(error)) from None


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"has no {key} in config.json; {REMEDY}"
    should = (
        "it should be an object"
        if first["type"] == "model_type"
        else first["msg"].replace("Input", "it")
    )
    return f"has {key} {reprlib.repr(first['input'])} in config.json: {should}; {REMEDY}"
