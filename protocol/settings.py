"""The settings as frozen models: one tree, unknown keys are errors, and a value that is not built yet is refused by name.

Where a setting comes from (flag, environment, file, default) is the business of `launch/configure.py`; sampling and tree settings also travel in
messages. Sizes are in bytes, probabilities within 0..1.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

POLICIES = ("static", "dynamic", "budget", "beam", "heterospec", "goodput")
BUILT_POLICIES = ("dynamic",)
DRAFT_KINDS = ("auto", "small", "eagle", "eagle3", "dovetail", "jakiro", "ngram", "substitute", "none")
BUILT_DRAFT_KINDS = ("auto", "small", "none")
WEIGHTS = ("fp32", "half", "int8", "bf16", "int8-per-tensor")
BUILT_TARGET_WEIGHTS = ("fp32",)
BUILT_DRAFT_WEIGHTS = ("auto", "fp32", "fp16", "bf16")
MAX_GAMMA, MAX_DEPTH, MAX_WIDTH = 1023, 128, 64


class Frozen(BaseModel):
    """A value: immutable, of exactly the declared fields, with types as declared (no coercion of strings to numbers)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def built(value: str, known: tuple[str, ...], available: tuple[str, ...], what: str) -> str:
    """`value` if it is available; else an error that tells a misspelling from what is not built yet."""
    if value in available:
        return value
    state = f"the {what} {value!r} is not built yet" if value in known else f"there is no {what} {value!r}"
    raise ValueError(f"{state}; choose {' or '.join(repr(a) for a in available)}")


class TargetSettings(Frozen):
    """The model whose output is decoded."""

    model: str = Field("", description="id, id@revision or folder; empty: the embedded demonstration target")
    weights: str = Field("fp32", description="type of the weights: fp32")
    device: str = Field("cpu", description="cpu or cuda:N")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field("auto", description="CPU threads; auto leaves a core for a draft on the CPU")
    inflate: str = Field("", description='fp32 size to which the linears are inflated without changing a token, e.g. "512MiB"')

    @field_validator("weights")
    @classmethod
    def _weights(cls, value: str) -> str:
        return built(value, WEIGHTS, BUILT_TARGET_WEIGHTS, "type of target weights")


class DraftSettings(Frozen):
    """The model that proposes."""

    kind: str = Field("auto", description="auto (recognised from the folder), small (a smaller model) or none (the target alone)")
    model: str = Field("", description="id, id@revision or folder; empty: the embedded one of that kind")
    weights: str = Field("auto", description="fp32, fp16 or bf16; auto: fp32 on a CPU, fp16 on a GPU")
    device: str = Field("auto", description="auto (the first GPU if there is one, else the CPU), cpu or cuda:N")

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        return built(value, DRAFT_KINDS, BUILT_DRAFT_KINDS, "draft kind")

    @field_validator("weights")
    @classmethod
    def _weights(cls, value: str) -> str:
        return built(value, ("int8", "int4", "int3", "int2", *BUILT_DRAFT_WEIGHTS), BUILT_DRAFT_WEIGHTS, "type of draft weights")


class TreeSettings(Frozen):
    """The shape of the token tree of a round; gamma 0 decodes with the target alone."""

    policy: str = Field("dynamic", description="how the tree is shaped: dynamic (expand and rerank, EAGLE-2)")
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)] = Field(15, description="drafted nodes verified in a round, root not counted")
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(8, description="levels below the root")
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = Field(10, description="nodes expanded a level, and children considered a node")
    sharpening: Annotated[float, Field(gt=0.0, le=100.0)] | Literal["auto"] = Field(
        "auto", description="scores of children are log_softmax(z / sharpening); 1.0 is EAGLE-2"
    )

    @field_validator("policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        return built(value, POLICIES, BUILT_POLICIES, "tree policy")


class Sampling(Frozen):
    """The processors of a session, applied in this order: temperature, top-k, top-p, min-p. Temperature 0 is greedy."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(0.0, description="0: greedy")
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] = Field(0, description="keep the k likeliest tokens; 0: all")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(1.0, description="keep the likeliest tokens that together reach this probability")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = Field(0.0, description="keep tokens of at least this share of the likeliest one's probability")


class SamplingSettings(Sampling):
    """Defaults of a request."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = Field(512, description="capped by the room left in the context")


class CoordinatorSettings(Frozen):
    """The process that owns the token logs."""

    listen: str = Field("ipc", description="ipc (a socket in a private folder), ipc://PATH or tcp://HOST:PORT (needs keys)")
    keys: str = Field("", description="folder of CURVE keys made by `dovetail keygen`")


class Settings(Frozen):
    """Every setting, with its default."""

    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    tree: TreeSettings = TreeSettings()
    sampling: SamplingSettings = SamplingSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()


def byte_count(text: str) -> int:
    """The number of bytes that "512MiB", "7GB" (10^9) or "7GiB" (2^30) names; `ValueError` if it names none."""
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :] or "B"
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(f"{text!r} is no size: write a number and a unit, such as 512MiB or 7GB")
    return size
