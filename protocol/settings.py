"""The settings as frozen models: one tree, unknown keys are errors.

Where a setting comes from (flag, environment, file, default) is the business of
`launch/settings/configure.py`; sampling and tree settings also travel in messages. Sizes are in
bytes, probabilities within 0..1.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    field_serializer,
    field_validator,
)

from dovetail.protocol.policies import POLICIES, PolicyTraits

HEAD_KINDS = ("eagle", "eagle3", "dovetail", "jakiro")
"""The draft kinds that are heads: they read features of one target and are trained for it."""
DRAFT_KINDS = ("auto", "small", *HEAD_KINDS, "ngram", "substitute", "none")
WEIGHTS = ("fp32", "half", "int8", "bf16", "int8-per-tensor")
BACKENDS = ("auto", "kernels", "library")
Proving = Literal["auto", "anew", "off"]
"""The ways to prove a model against transformers as it is loaded."""
PROVING = (
    "auto (a proof of the same files, code and libraries that is remembered is enough), anew (it "
    "is made again) or off (it is made again, and none is remembered)"
)
DRAFT_WEIGHTS = ("auto", "fp32", "fp16", "bf16", "int8", "int4", "int3", "int2")
SUBSTITUTE_WEIGHTS = ("auto", "int8", "int4", "int3", "int2")
"""Types of the weights of a target's substitute; auto is int4."""
NODES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
HOST_DEVICES = ("cpu", "pretended")
"""Devices that compute in the host's memory; every other one has a memory of its own."""
MODELLESS_KINDS = ("ngram", "substitute", "none")
"""The draft kinds that name no model of their own: none at all, or the target."""
MAX_GAMMA, MAX_DEPTH, MAX_WIDTH = 1023, 128, 64
MAX_BINS = 8
"""Bins of entropy that heterospec may tell apart."""
MAX_BIASES = 1024
"""Tokens that one request may bias."""


class Frozen(BaseModel):
    """A value: immutable, of exactly the declared fields, with types as declared (no coercion of
    strings to numbers)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def one_of(value: str, available: tuple[str, ...], what: str) -> str:
    """`value` if it is available."""
    if value not in available:
        raise ValueError(
            f"there is no {what} {value!r}; choose {' or '.join(map(repr, available))}"
        )
    return value


DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?|pretended")


class SplitSettings(Frozen):
    """A target whose last layers another device computes."""

    device: str = Field(
        "",
        description="device of the last layers and the head, such as cuda:0; cpu stands for a "
        "GPU in tests; empty: no split",
    )
    layers: Annotated[int, Field(ge=1, le=1 << 16)] | Literal["auto"] = Field(
        "auto",
        description="number of the last layers, beside the head; auto: as many as memory.vram, or "
        "the device's free memory, holds",
    )

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if value and DEVICE.fullmatch(value) is None:
            raise ValueError("write cuda:N, or cpu, or leave it empty")
        return value


class TargetSettings(Frozen):
    """The model whose output is decoded."""

    model: str = Field(
        "", description="id, id@revision or folder; empty: the embedded demonstration target"
    )
    weights: str = Field(
        "fp32",
        description="fp32, half (the checkpoint's 16 bits) or int8; bf16 and int8-per-tensor "
        "change the function, the last one is not lossless",
    )
    backend: str = Field(
        "auto",
        description="what computes on a CPU: kernels (ours, in C++), library (torch's) or auto "
        "(kernels where they can)",
    )
    device: str = Field(
        "cpu", description="cpu, cuda:N, or pretended: the CPU behind the rules of a GPU, for tests"
    )
    numa: str | Annotated[int, Field(ge=0, le=1023)] = Field(
        "auto",
        description="memory nodes of the target: auto (the best one), off, a node, or a list "
        "such as 0,1",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="CPU threads; auto: one a physical core, leaving one to the draft"
    )
    inflate: str = Field(
        "",
        description="fp32 size to which the linears are inflated without changing a token, "
        'e.g. "512MiB"',
    )
    resident: Annotated[int, Field(ge=0, le=1 << 16)] | Literal["auto"] = Field(
        "auto",
        description="number of the layers computed by a device that keep their weights there; "
        "those of the others stream through it; auto: as many as memory.vram, or the device's free "
        "memory, holds",
    )
    prefill: str = Field(
        "auto",
        description="who reads prompts for layers on the CPU: local (the CPU), a device "
        "through which their weights stream (cuda:N; cpu stands for one in "
        "tests), or auto (the device that the profile file says is faster for prompts of that "
        "length)",
    )
    proof: Proving = Field("auto", description=f"proof against transformers: {PROVING}")
    split: SplitSettings = Field(
        SplitSettings(), description="whether another device computes the last layers"
    )

    @field_validator("prefill")
    @classmethod
    def _prefill(cls, value: str) -> str:
        if value not in ("auto", "local") and DEVICE.fullmatch(value) is None:
            raise ValueError("write auto, local, cuda:N or cpu")
        return value

    @field_validator("numa")
    @classmethod
    def _numa(cls, value: str | int) -> str | int:
        if (
            isinstance(value, str)
            and value not in ("auto", "off")
            and NODES.fullmatch(value) is None
        ):
            raise ValueError(
                "write auto, off, a memory node such as 0, or a list of them such as 0,1"
            )
        return value

    @field_validator("weights")
    @classmethod
    def _weights(cls, value: str) -> str:
        return one_of(value, WEIGHTS, "type of target weights")

    @field_validator("backend")
    @classmethod
    def _backend(cls, value: str) -> str:
        return one_of(value, BACKENDS, "back end")


class DraftSettings(Frozen):
    """The model that proposes."""

    kind: str = Field(
        "auto",
        description="auto (recognised from the folder), small (a smaller model), a head of the "
        f"target's ({', '.join(HEAD_KINDS)}), "
        "ngram (looks up what was said before), substitute (the target itself in a few bits) "
        "or none (the target alone)",
    )
    model: str = Field(
        "", description="id, id@revision or folder; empty: the embedded one of that kind"
    )
    weights: str = Field(
        "auto",
        description="fp32, fp16, bf16, int8 or, for a head, int4; of a substitute int8, int4, "
        "int3 or int2; auto: as the checkpoint has them on a CPU, fp16 on "
        "a GPU; of a substitute int4",
    )
    device: str = Field(
        "auto",
        description="auto (the first GPU if there is one, else the CPU), cpu, cuda:N or, for "
        "tests, pretended: the CPU behind the rules of a GPU",
    )
    share: bool | Literal["auto"] = Field(
        "auto",
        description="whether a substitute is one process with its target and shares embedding, "
        "norms, head, resident layers, keys and values with it; auto: no",
    )
    contrast: bool | Literal["auto"] = Field(
        "auto",
        description="whether a head's contrast output (jakiro) guesses the last level without "
        "a pass of its own; auto: where the head has one",
    )
    ahead: bool | Literal["auto"] = Field(
        "auto",
        description="keep drafting while the target verifies; auto: where the two share no "
        "device, or where measuring says that it pays",
    )
    pickled: bool = Field(
        False,
        description="read the weights of a head from a *.bin where it has no *.safetensors; "
        "only numbers are loaded, never code",
    )
    proof: Proving = Field("auto", description=f"proof of a smaller model: {PROVING}")

    @field_validator("kind")
    @classmethod
    def _kind(cls, value: str) -> str:
        return one_of(value, DRAFT_KINDS, "draft kind")

    @field_validator("weights")
    @classmethod
    def _weights(cls, value: str) -> str:
        return one_of(value, DRAFT_WEIGHTS, "type of draft weights")


def _listed(value: Any) -> Any:
    """A list of TOML or JSON, or the text "0.3,0.6", as a tuple; anything else as it is, for the
    types to judge."""
    if isinstance(value, list):
        return tuple(value)
    return (
        tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, str)
        else value
    )


def _numbers(value: Any) -> Any:
    parts = _listed(value)
    try:
        return (
            tuple(float(part) if isinstance(part, str) else part for part in parts)
            if isinstance(parts, tuple)
            else parts
        )
    except ValueError:
        raise ValueError(
            "write numbers, such as 0.3,0.6,1.0 on a command line or [0.3, 0.6, 1.0] in a file"
        ) from None


def _path_or_numbers(value: Any) -> Any:
    """Numbers where there are only such, else the name of a file."""
    try:
        return _numbers(value) or ""
    except ValueError:
        return value


def _ascending(bounds: tuple[float, ...] | str) -> tuple[float, ...] | str:
    if not isinstance(bounds, str) and any(after <= before for before, after in pairwise(bounds)):
        raise ValueError("the bounds between bins ascend")
    return bounds


Shares = Annotated[
    tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...],
    FailFast(),
    MaxLen(MAX_BINS),
    BeforeValidator(_numbers),
]
Thresholds = Annotated[
    str | Annotated[tuple[Annotated[float, Field(ge=0.0, le=1e6)], ...], MaxLen(MAX_BINS - 1)],
    BeforeValidator(_path_or_numbers),
    AfterValidator(_ascending),
]
Adaptations = Annotated[
    tuple[Literal["extend", "prune", "compute"], ...],
    FailFast(),
    MaxLen(3),
    BeforeValidator(_listed),
]


class TreeSettings(Frozen):
    """The shape of the token tree of a round; gamma 0 decodes with the target alone."""

    policy: str = Field(
        "goodput",
        description="how the tree is shaped: goodput (as large as it pays, up to gamma and "
        "down to none), dynamic (expand and rerank, EAGLE-2), static (a "
        "fixed shape; 25/5/10 is EAGLE-1's), budget (best first up to gamma, SpecExec), beam "
        "(the best of every level, SubSpec: gamma = width x depth) or "
        "heterospec (deeper and narrower where the draft is sure)",
    )
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)] = Field(
        15, description="drafted nodes verified in a round at most, root not counted"
    )
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(8, description="levels below the root")
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = Field(
        10, description="nodes expanded a level, and children considered a node"
    )
    insist: bool = Field(
        False,
        description="true: each round is drafted and verified as the tree is, even at a loss; "
        "false: less of it, or none, where that is faster",
    )
    sharpening: Annotated[float, Field(gt=0.0, le=100.0)] | Literal["auto"] = Field(
        "auto",
        description="scores of children are log_softmax(z / sharpening); 1.0 is EAGLE-2; auto: "
        "fitted to what the target accepts",
    )
    thresholds: Thresholds = Field(
        "",
        description="heterospec: the file that `dovetail stratify` wrote, or the bounds "
        "between its bins of entropy in nats, ascending",
    )
    prune: Shares = Field(
        (0.3, 0.6, 1.0),
        description="heterospec: which share of the gamma + 1 rows is verified in each of the "
        "bins of lowest entropy",
    )
    adapt: Adaptations = Field(
        ("extend", "prune", "compute"),
        description="heterospec: what follows the entropy - extend (more levels), prune (fewer "
        "rows), compute (a prepared shape for each bin)",
    )

    @field_validator("policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        return one_of(value, tuple(POLICIES), "tree policy")

    @property
    def traits(self) -> PolicyTraits:
        """The properties of the policy."""
        return POLICIES[self.policy]

    @property
    def low_bins(self) -> int:
        """Return in how many bins of entropy, from the lowest on, heterospec adapts the tree; never
        in the last one, which has no upper bound."""
        return (
            0
            if not self.traits.by_entropy or isinstance(self.thresholds, str)
            else min(len(self.prune), len(self.thresholds))
        )

    def size_in(self, stratum: int) -> tuple[int, int]:
        """Nodes and levels of the tree in a bin of entropy, counted from 0, the lowest (HeteroSpec,
        section 4.3).

        The paper's depth counts the levels below the first one; in levels its alpha is ceil((depth
        - 1) / 2), and Delta = alpha - bin. Of the gamma + 1 rows (the paper's N counts the root)
        the bin's share is verified, and Delta more; never fewer than it takes for a path to the
        deepest level.
        """
        if stratum >= self.low_bins or not self.gamma:
            return self.gamma, self.depth
        longer = max(0, self.depth // 2 - stratum) if "extend" in self.adapt else 0
        levels = min(self.depth + longer, MAX_DEPTH)
        rows = (
            math.ceil(round(self.prune[stratum] * (self.gamma + 1), 6)) + longer
            if "prune" in self.adapt
            else self.gamma + 1
        )
        return min(max(rows - 1, levels), MAX_GAMMA), levels

    @property
    def most_nodes(self) -> int:
        """Return the most nodes of any proposal."""
        return max(self.size_in(stratum)[0] for stratum in range(self.low_bins + 1))

    @property
    def most_levels(self) -> int:
        """Return the most levels of any proposal."""
        return max(self.size_in(stratum)[1] for stratum in range(self.low_bins + 1))


def _pairs(value: Any) -> Any:
    """A table of TOML or JSON (token id -> bias), or the text "5=-2.5,17=3", as pairs; anything
    else as it is, for the types to judge."""
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
        )  # the types judge true and false
    except (TypeError, ValueError):
        raise ValueError(
            "write token ids and biases, such as 17=-100,5=2.5 on a command line or { 17 = "
            "-100, 5 = 2.5 } in a file"
        ) from None


def _in_order(pairs: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Sorted by token id, so that equal biases are equal values."""
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
"""Pairs of a token id and what is added to its logit, in order of the ids."""


class Sampling(Frozen):
    """The processors of a session, applied in this order: logit bias, repetition penalty (over
    prompt and reply), presence and frequency penalty (over the reply), least number of tokens,
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
        0.0, description="subtracted from the logit of every token that the reply holds"
    )
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = Field(
        0.0, description="subtracted from a token's logit for each time that the reply holds it"
    )
    logit_bias: LogitBias = Field(
        (),
        description="added to the logits of tokens: TOKEN=BIAS,..., with biases from -100 to 100",
    )
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        0, description="no token that ends the reply is chosen before this many tokens"
    )
    acceptance: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="above temperature 0: coupled (draft and target share their noise) or "
        "rejection (the papers' speculative sampling, of trees of a static "
        "shape; exact in distribution, but the tokens depend on the draft)",
    )

    @property
    def rejects(self) -> bool:
        """Return whether what is drafted is drawn at random and accepted with probability p/q; at
        temperature 0 both rules are the greedy one."""
        return self.acceptance == "rejection" and self.temperature > 0.0

    @property
    def truncates(self) -> bool:
        """Return whether there are tokens that cannot be chosen because others are likelier."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def looks_back(self) -> bool:
        """Return whether anything is asked for beside temperature, top-k, top-p and min-p: then a
        token's logit depends on what was said before."""
        return self.repetition_penalty != 1.0 or bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens
        )

    @field_serializer("logit_bias", when_used="json")
    def _table(self, pairs: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """In JSON a map from token id to bias, as OpenAI has it."""
        return {str(token): bias for token, bias in pairs}


class SamplingSettings(Sampling):
    """Defaults of a request."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        512, description="capped by the room left in the context"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: chat and serve take sampling defaults from the target's "
        "generation_config.json; none: they do not",
    )


class MemorySettings(Frozen):
    """The memory that a target may take: for weights, buffers, the keys and values of one long
    conversation and a pass; for a substitute that shares them, too."""

    vram: str = Field(
        "auto",
        description="memory of a device that the target may take, such as 7GB (10^9) or 7GiB "
        "(2^30); auto: what is free there",
    )
    ram: str = Field("auto", description="the same of the host, such as 16GB; auto: what is free")

    @field_validator("vram", "ram")
    @classmethod
    def _size(cls, value: str) -> str:
        if value != "auto":
            byte_count(value)
        return value

    @property
    def vram_bytes(self) -> int | None:
        """None: auto."""
        return None if self.vram == "auto" else byte_count(self.vram)

    @property
    def ram_bytes(self) -> int | None:
        """None: auto."""
        return None if self.ram == "auto" else byte_count(self.ram)


class CoordinatorSettings(Frozen):
    """The process that owns the token logs."""

    listen: str = Field(
        "ipc",
        description="ipc (a socket in a private folder), ipc://PATH or tcp://HOST:PORT (needs "
        "keys)",
    )
    keys: str = Field("", description="folder of CURVE keys made by `dovetail keygen`")
    reuse: bool = Field(
        True,
        description="keep what was computed of ended conversations, so that their next turns "
        "read only what is new",
    )
    recovery_s: Annotated[float, Field(ge=0.0, le=86400.0)] | Literal["auto"] = Field(
        "auto",
        description="how long a session whose target was lost waits for another one; auto: 30 "
        "s and twice the time that the lost one took to load",
    )
    stuck_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(
        10.0, description="a worker without progress for this long is replaced"
    )
    move: Literal["same", "any"] = Field(
        "same",
        description="on which target a session continues if its own was lost: same (of equal "
        "fingerprint: the text is the same) or any of its vocabulary",
    )
    record: str = Field(
        "",
        description="folder that gets a file of every session, for `dovetail replay`: all its "
        "messages, what users say among them",
    )


class HttpSettings(Frozen):
    """The HTTP API of `dovetail serve`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="port to listen on; 0: one that is free"
    )
    api_key_file: str = Field(
        "", description="file with the key that clients send, one a line; required beyond loopback"
    )
    model: str = Field("", description="name under which the target is served; empty: its own")
    deadline_s: Annotated[float, Field(gt=0.0, le=86400.0)] = Field(
        600.0, description="a request that takes longer is ended"
    )
    receive_s: Annotated[float, Field(gt=0.0, le=3600.0)] = Field(
        20.0,
        description="a request must arrive within this time, and a client must read on within it",
    )
    body: str = Field("2MiB", description="largest body of a request")
    connections: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        4096, description="connections held at a time; further ones are refused with 503"
    )
    dashboard: Literal["auto", "full", "anonymous", "off"] = Field(
        "auto",
        description="the page at /: full shows the tokens of all requests, anonymous none of "
        "them; auto: full without a key",
    )

    @field_validator("body")
    @classmethod
    def _body(cls, value: str) -> str:
        byte_count(value)
        return value


class Settings(Frozen):
    """Every setting, with its default."""

    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    tree: TreeSettings = TreeSettings()
    sampling: SamplingSettings = SamplingSettings()
    memory: MemorySettings = MemorySettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    http: HttpSettings = HttpSettings()


def misfit(sampling: Sampling, tree: TreeSettings, kind: str = "auto") -> str | None:
    """Why these settings, and a draft of that kind, do not go together, in one line; None if they
    do."""
    if sampling.acceptance == "rejection" and not tree.traits.fixed_shape:
        return (
            "sampling.acceptance 'rejection' needs a shape that no drawn token changes: "
            f"set tree.policy to {_named('fixed_shape')}, not {tree.policy!r}"
        )
    if sampling.acceptance == "rejection" and kind == "ngram":
        return (
            "sampling.acceptance 'rejection' needs a draft that draws from probabilities: "
            "choose another draft.kind than 'ngram', or 'coupled'"
        )
    if kind == "ngram" and not tree.traits.without_model:
        return (
            "a draft of kind 'ngram' grows its tree best first: set tree.policy to "
            f"{_named('without_model')}, not {tree.policy!r}"
        )
    return None


def _named(trait: str) -> str:
    """Return the policies that have a property, as a list in words."""
    return " or ".join(repr(name) for name, traits in POLICIES.items() if getattr(traits, trait))


def byte_count(text: str) -> int:
    """The number of bytes that "512MiB", "7GB" (10^9) or "7GiB" (2^30) names; `ValueError` if it
    names none."""
    units = {
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :] or "B"
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(
            f"{text!r} is not a size: write a number and a unit, such as 512MiB or 7GB"
        )
    return size
