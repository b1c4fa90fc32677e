"""Settings of the target and of the draft."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from dovetail.protocol.settings.values import Frozen, words

BLOCK_KINDS = ("dflash", "dspark", "dflash2", "peagle")
"""Heads that predict several positions in one pass."""
HEAD_KINDS = ("eagle", "eagle3", "dovetail", "jakiro", *BLOCK_KINDS)
"""The draft kinds that are heads: they read features of the one target they are trained for."""


@dataclass(frozen=True)
class DraftTraits:
    """The properties of a kind of draft."""

    own_model: bool = True
    """False: it has no model of its own."""
    draws: bool = True
    """True: it draws from probabilities, so that rejection sampling is possible."""
    any_policy: bool = True
    """False: it grows its whole tree at once, best first."""
    trained: bool = True
    """False: `dovetail train` makes none."""


DRAFT_KINDS: dict[str, DraftTraits] = {
    **dict.fromkeys(("auto", "small", *HEAD_KINDS), DraftTraits()),
    **dict.fromkeys(("dflash2", "peagle"), DraftTraits(trained=False)),
    "ngram": DraftTraits(own_model=False, draws=False, any_policy=False),
    **dict.fromkeys(("mtp", "substitute", "none"), DraftTraits(own_model=False)),
}
"""All kinds of drafts; `workers/drafters/registry.py` opens them."""
WEIGHTS = ("fp32", "half", "int8", "int4", "file", "bf16", "int8-per-tensor")
ACTIVATIONS = ("int8", "fp32")
BACKENDS = ("auto", "kernels", "library")
CACHES = ("auto", "fp32", "half", "q8")
ISAS = ("auto", "plain", "sse41", "avx", "avx2", "avx512", "vnni", "neon")
Isa = Annotated[str, AfterValidator(str.lower), words(ISAS, "instruction set")]
ISA = f"instruction set of the kernels: {', '.join(ISAS)}; auto: the best that the CPU has"
Proving = Literal["auto", "anew", "off"]
"""How a model is proved against transformers when it is loaded."""
PROVING = (
    "auto (an earlier proof of the same files, code and libraries is enough), anew (prove "
    "again) or off (prove again, and do not store it)"
)
DRAFT_WEIGHTS = ("auto", "fp32", "fp16", "bf16", "int8", "file", "int4", "int3", "int2")
SUBSTITUTE_WEIGHTS = ("auto", "int8", "int4", "int3", "int2")
"""Types of the weights of a target's substitute; auto is int4."""
NODES = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
TARGETS_OWN = ("target.model", "target.context")
"""Settings of the target that a draft reads too: what a head or a substitute is made for."""


def cache_of(cache: str, weights: str) -> str:
    """Return the type of keys and values, fp32, half or q8, for weights of a type."""
    if cache != "auto":
        return cache
    return "half" if weights in ("half", "int8", "int4", "file") else "fp32"


class SplitSettings(Frozen):
    """A target whose last layers are computed by another device."""

    device: str = Field(
        "",
        description="device of the last layers and the head, such as cuda:0; cpu stands for a "
        "GPU in tests; empty: no split",
    )
    layers: Annotated[int, Field(ge=1, le=1 << 16)] | Literal["auto"] = Field(
        "auto",
        description="number of the last layers, not counting the head; auto: as many as fit into "
        "memory.vram, or the device's free memory",
    )

    experts_on_cpu: bool = Field(
        False,
        description="leave the routed experts of these layers to the CPU, which computes them from "
        "its own memory",
    )
    parts: Literal["layer", "mixer"] = Field(
        "layer", description="deprecated, kept for one release: mixer sets experts_on_cpu"
    )

    @property
    def host_experts(self) -> bool:
        """Return whether the CPU computes the routed experts of the device's layers."""
        return self.experts_on_cpu or self.parts == "mixer"


class TargetSettings(Frozen):
    """The model whose output is decoded."""

    model: str = Field(
        "", description="id, id@revision, folder or GGUF file; empty: the embedded demo target"
    )
    weights: Annotated[str, words(WEIGHTS, "type of target weights")] = Field(
        "fp32",
        description="fp32, half (the checkpoint's 16 bits), int8, int4 (4-bit blocks, made "
        "once and cached) or file (a GGUF file's own blocks, its default); bf16 and "
        "int8-per-tensor change the model's function, and int8-per-tensor is not lossless",
    )
    activations: Annotated[str, words(ACTIVATIONS, "type of activations")] = Field(
        "int8",
        description="type of activations with int4 and file weights: int8 (rounded to 8 bits in "
        "groups of 32) or fp32 (exact, slower)",
    )
    backend: Annotated[str, words(BACKENDS, "back end")] = Field(
        "auto",
        description="code for a CPU: kernels (dovetail's, in C++), library (torch) or auto "
        "(kernels where they support the model)",
    )
    isa: Isa = Field("auto", description=ISA)
    cache: Annotated[str, words(CACHES, "type of keys and values")] = Field(
        "auto",
        description="keys and values: fp32, half (fp16, which takes half the memory and changes "
        "logits by about a rounding) or q8 (8 bits in blocks of 32, 0.27 of the memory, CPU only); "
        "auto: half with half, int8, int4 and file weights on the kernels",
    )
    context: Annotated[int, Field(ge=2, le=1 << 20)] | Literal["auto"] = Field(
        "auto",
        description="the longest sequence, in tokens; auto: the model's own limit, or with two "
        "longrope tables (Phi-3.5, Phi-4-mini) the length of the first; above that, the second is "
        "used for texts of every length",
    )
    device: str = Field(
        "cpu",
        description="cpu, cuda:N (NVIDIA's GPUs, and AMD's with torch for ROCm), xpu:N (Intel's) "
        "or mps (Apple's)",
    )
    numa: str | Annotated[int, Field(ge=0, le=1023)] = Field(
        "auto",
        description="memory nodes of the target: shard (spread over all), auto (shard where "
        "calibrate found that faster, else the best one), off, a node, or a list such as 0,1",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="CPU threads; auto: one per physical core, less one for the draft"
    )
    resident: Annotated[int, Field(ge=0, le=1 << 16)] | Literal["auto"] = Field(
        "auto",
        description="number of a device's layers that keep their weights there; the weights of the "
        "others are streamed to it; auto: as many as fit into memory.vram, or the device's free "
        "memory",
    )
    prefill: str = Field(
        "auto",
        description="where prompts are prefilled for layers on the CPU: local (the CPU), a device "
        "to which their weights are streamed (cuda:N, xpu:N, mps; cpu stands for one in tests), or "
        "auto (the one that the profile file shows to be faster for prompts of that length)",
    )
    proof: Proving = Field("auto", description=f"proof against transformers: {PROVING}")
    split: SplitSettings = Field(
        SplitSettings(), description="whether another device computes the last layers"
    )

    @field_validator("numa")
    @classmethod
    def _numa(cls, value: str | int) -> str | int:
        if (
            isinstance(value, str)
            and value not in ("auto", "off", "shard")
            and NODES.fullmatch(value) is None
        ):
            raise ValueError(
                "write auto, off, shard, a memory node such as 0, or a list of them such as 0,1"
            )
        return value

    @property
    def longest(self) -> int | None:
        """Return the longest sequence asked for, in tokens; None: the model's own limit."""
        return None if self.context == "auto" else self.context

    @property
    def cached(self) -> str:
        """Return the type of keys and values on a CPU, according to the settings."""
        library = self.backend == "library" and self.cache == "auto"
        return "fp32" if library else cache_of(self.cache, self.weights)


class DraftSettings(Frozen):
    """The model that proposes."""

    kind: Annotated[str, words(DRAFT_KINDS, "draft kind")] = Field(
        "auto",
        description="auto (recognised from the folder), small (a smaller model), a head of the "
        f"target's ({', '.join(HEAD_KINDS)}), "
        "mtp (the target's layer for multi-token prediction), "
        "ngram (looks up earlier text), substitute (the target itself in a few bits) "
        "or none (the target alone)",
    )
    model: str = Field(
        "", description="id, id@revision, folder or GGUF file; empty: the embedded one of that kind"
    )
    weights: Annotated[str, words(DRAFT_WEIGHTS, "type of draft weights")] = Field(
        "auto",
        description="fp32, fp16, bf16, int8, int4 or file (the blocks of a GGUF file); for a "
        "substitute int8, int4, int3 or int2; auto: the checkpoint's type on a CPU; on a GPU the "
        "blocks of a GGUF file, else the type of 16 or 32 bits that is fastest on that card; for "
        "a substitute int4",
    )
    device: str = Field(
        "auto",
        description="auto (the first GPU if the draft fits there, else the CPU), cpu, cuda:N, "
        "xpu:N or mps",
    )
    isa: Isa = Field("auto", description=ISA)
    share: bool | Literal["auto"] = Field(
        "auto",
        description="whether a substitute is in its target's process and shares embedding, norms, "
        "head, resident layers, keys and values; auto: no; a Gemma 4 assistant needs true",
    )
    contrast: bool | Literal["auto"] = Field(
        "auto",
        description="whether a head's contrast output (jakiro) drafts the last level without "
        "a separate pass; auto: where the head has one",
    )
    head_rows: Annotated[int, Field(ge=64, le=1 << 24)] | Literal["all", "auto"] = Field(
        "auto",
        description="number of frequent tokens that a head's output covers, besides the last ones "
        "of a session's text; all; or auto: on a CPU 32768 of a larger vocabulary, elsewhere all",
    )
    ahead: bool | Literal["auto"] = Field(
        "auto",
        description="keep drafting while the target verifies; auto: if the two share no device, or "
        "if measurements show a gain, and never on a shared core",
    )
    merge_lookup: bool = Field(
        True,
        description="under the policy goodput, what a look-up finds in the text joins the tree of "
        "a model or head",
    )
    pickled: bool = Field(
        False,
        description="read a head's weights from a *.bin if it has no *.safetensors; only numbers "
        "are loaded, never code",
    )
    proof: Proving = Field("auto", description=f"proof of a smaller model: {PROVING}")
