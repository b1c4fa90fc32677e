"""Describes a family's decoder layers, by index, in the kernels' terms, from a configuration: parts
of transformers' layer by name. At load every layer is proved against transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dovetail.workers.kernels.layer_plan import Activation, HeadNorm, MixerGate, NormKind, Score
from dovetail.workers.kernels.states import ScanRule
from dovetail.workers.models.parity.following import UnsupportedError

GATED = {
    **dict.fromkeys(("silu", "swish"), Activation.SILU_GATED),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), Activation.GELU_TANH_GATED
    ),
    "relu2": Activation.RELU2_GATED,
}
"""Activations of gated MLPs, by their names in configurations."""
UNGATED = {
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "gelu": Activation.GELU,
    "xielu": Activation.XIELU,
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), Activation.GELU_TANH
    ),
}
"""Activations of MLPs without a gate, by their names in configurations."""
SEPARATE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Growth:
    """Queries are multiplied by 1 + beta ln(1 + floor((position + ahead) / period))."""

    beta: float
    period: int
    ahead: int = 0


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer."""

    table: str = ""  # the layer type whose angles are taken, where a model has several tables
    interleaved: bool = False  # True if neighbours are rotated together; else a head's halves
    part: str = ""  # the rotary embedding in the model, where there are several; or empty
    backward: bool = False  # True if heads are rotated backward, by the negative angles


@dataclass(frozen=True)
class Attention:
    """The attention of a layer; parts by their names within it."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = field(default_factory=Rope)
    window: int = 0  # a position attends to itself and window - 1 before it; 0: all
    chunk: int = 0  # a position attends to those before it back to a multiple of chunk; 0: all
    growth: Growth | None = None
    softcap: float = 0.0
    qkv: Sequence[str] = SEPARATE
    by_head: bool = False  # True if one linear has query, key and value of each head together
    output: str = "self_attn.o_proj"
    norms: tuple[str, str | None] | None = None  # the norms of queries and keys; None: none
    norm_place: HeadNorm = HeadNorm.HEAD_BEFORE_ROPE
    norms_heads: bool = False  # True if heads' queries and keys have norms without weights
    norms_values: bool = False  # True if each head's values have an RMS norm without weights
    sinks: str | None = None  # the name of a score per head that takes its share of weights
    reads: int | None = None  # the layer whose keys and values it reads; None: its own
    key_factor: float = 1.0  # the factor of keys
    gated: bool = False  # True if each head's queries are followed by a gate
    gate: str | None = None
    """The linear of the gates, one per number or per head, if these are not fused with the
    queries."""
    gate_kind: MixerGate = MixerGate.SIGMOID
    output_norm: str | None = None  # the norm of what the output's linear reads
    clip: float = 0.0  # queries, keys and values are clipped to -clip .. clip; 0: they are not
    query_factor: float = 1.0  # the part of `scale` by which transformers multiplies queries


@dataclass(frozen=True)
class Latent:
    """Attention whose cache holds a latent and a rotated key for all heads; parts by name."""

    heads: int
    rank: int  # width of a latent
    plain: int  # numbers of a head's query and key that are not rotated; they come first
    rotated: int
    value_dim: int
    scale: float
    rope: Rope | None  # None: nothing is rotated
    growth: Growth | None = None
    query: str = "self_attn.q_proj"  # the linear of queries, or of what `query_up` makes queries of
    query_norm: str | None = None
    query_up: str | None = None
    latent: str = "self_attn.kv_a_proj_with_mqa"  # the linear of latents, with the key behind them
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"  # makes the keys and values of latents, head by head
    output: str = "self_attn.o_proj"
    epsilon: float = 1e-6  # the epsilon of the two norms


class Given(Enum):
    """Order of a state mixer's inputs: the kernels'; query, key, value and gate by key head, then b
    and a; or gate, value, key, query and step."""

    IN_ORDER = 0
    BY_KEY_HEAD = 1
    GATE_FIRST = 2


@dataclass(frozen=True)
class StateMixer:
    """A mixer with a state in the place of attention; parts by their names within the layer."""

    rule: ScanRule
    given: Sequence[str]  # the linears before it
    output: str
    conv: str
    order: Given = Given.IN_ORDER
    behind: tuple[str, str] | None = None
    """The linears of the gate and of the decays, which read the outputs of the last two given."""
    key_heads: int = 1
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    decay: str | None = None  # the logarithms of negative decays, one per value head
    step_bias: str | None = None
    skip: str | None = None
    norm: str | None = None  # the name of the output's RMS norm, with plain weights
    norm_width: int = 0  # numbers that are normed together
    gate_first: bool = False  # True if the norm follows the multiplication by the gate
    epsilon: float = 1e-6
    query_scale: float = 1.0
    step_factor: float = 1.0  # the factor of steps (after their sigmoid) of the gated delta rule
    factors: tuple[float, float, float, float, float] | None = None
    """The factors of gate, value, key, query and step in the preceding linear's output."""
    limited: str | None = None
    """transformers' part that bounds steps of prompts, for training, but not of single tokens."""


@dataclass(frozen=True)
class Beside:
    """A mixer with a state parallel to attention; results are added."""

    mixer: StateMixer
    given_factor: float = 1.0  # the factor of the mixer's input
    factor: float = 1.0  # the factor of its output
    attention_given_factor: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Mlp:
    """The MLP of a layer."""

    activation: Activation
    gate_up: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    function: str | None = None  # transformers' activation, if it has parameters
    gate_factor: float = 1.0  # the factor of the gate, before the activation
    factor: float = 1.0  # the factor of the MLP's output
    norm: str | None = None  # the norm of what the last linear reads
    cut: float = 0.0  # gates become max(0, gate - mean - cut * deviation); 0: not


@dataclass(frozen=True)
class Router:
    """The choice of a row's experts; parts by their names within the layer."""

    weight: str = "mlp.gate.weight"  # [experts, hidden], of the logits
    score: Score = Score.SOFTMAX
    correction: str | None = None  # added to the scores for the selection only
    groups: int = 1
    chosen_groups: int = 1
    """Experts are chosen within this many groups: those whose two best experts are best."""
    best_alone: bool = False  # True if a group's score is its best expert's
    normalised: bool = True  # True if the weights are divided by their sum, or by `least_sum`
    least_sum: float = 0.0
    added_sum: float = 0.0  # added to that sum
    scale: float = 1.0
    bias: str | None = None  # the name of what is added to the logits, a number for each expert
    scales_input: bool = False  # True if an expert's input is weighted, not its output
    part: str | None = None
    """The router's part, if experts do not get its choice or if it reads the states through its own
    norm."""
    norm_weight: str | None = None  # that norm's weights, times the root of the width
    epsilon: float = 0.0  # the epsilon of that norm
    scales: str | None = None
    """The name of a factor of the weights, a number for each expert."""
    softcap: float = 0.0  # logits become softcap tanh(logit / softcap); 0: no softcap
    jitter: float = 0.0  # of SPARSE_MIXER
    scale_after: float = 1.0
    """The part of `scale` by which transformers multiplies the experts' sum."""


@dataclass(frozen=True)
class Experts:
    """A layer's experts, instead of its MLP or beside a shared one."""

    chosen: int  # the number of experts that a row uses
    activation: Activation
    router: Router = field(default_factory=Router)
    part: str = "mlp.experts"
    """The part with the `stacks` [experts, 2 units, hidden] and [experts, hidden, units]; it says
    whether they are transposed, interleaved, ungated or biased."""
    stacks: tuple[str, str] = ("gate_up_proj", "down_proj")
    transposed: bool | None = None  # True if transposed; None: the part has a flag
    flat: str | None = None
    """The part that has the gate, up and transposed down matrices concatenated, not stacked."""
    numbers: tuple[float, float] = (0.0, 0.0)  # the numbers of the activation
    shared: Mlp | None = None  # the MLP of all rows
    factor: float = 1.0  # the factor of the sum of the shared MLP and a row's experts
    shared_gate: str | None = None  # a linear [1, hidden]: its sigmoid weights the shared MLP
    input_norm: str | None = None
    """The norm of what the experts read, the states before the half's norm."""
    output_norm: str | None = None  # the norm of the sum of a row's experts
    shared_norm: str | None = None  # the norm of the shared MLP's output
    around: tuple[str, str] | None = None  # the linears before and after experts of another width


@dataclass(frozen=True)
class Norms:
    """The norms around both halves of a layer by name, None for those it does not have."""

    epsilon: float
    pre_mixer: str | None = "input_layernorm"
    post_mixer: str | None = None  # the norm of attention's output
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    kind: NormKind = NormKind.RMS
    plus_one: bool = False  # True if the checkpoint stores weights minus one
    plain: int = 0  # the width of norms that have no weights; 0: they have


@dataclass(frozen=True)
class OwnInput:
    """A layer's own input, computed from the token alone; parts by their names within the layer."""

    first: int  # where it begins in a row of all layers' inputs
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True)
class Streams:
    """Several states per token (AltUp), of which a layer computes the first, and a low-rank
    addition to attention (LAuReL); parts by their names within the layer, or the model. Around the
    layers, each state has the first one's root mean square; the final norm reads their mean."""

    scaled: bool = True  # True if `scale` multiplies what the layer's own input reads
    router: str = "altup.modality_router.weight"
    router_norm: str = "altup.router_norm"
    predict: str = "altup.prediction_coefs.weight"
    correct: str = "altup.correction_coefs.weight"
    scale: str = "altup.correct_output_scale"
    left: str = "laurel.linear_left"
    right: str = "laurel.linear_right"
    norm: str = "laurel.post_laurel_norm"
    begins: str = "altup_projections"  # of the model: linears of the embedding
    ends: str = "altup_unembed_projections"  # of the model: of the states after the layers
    least: float = 1e-5  # a state's own mean square there counts as at least this


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer, of two halves or one."""

    attention: Attention | Latent | StateMixer | None
    mlp: Mlp | Experts | None
    norms: Norms
    beside: Beside | None = None  # the mixer with a state next to attention, if any
    residual_scale: float = 1.0  # the factor of each half's output
    parallel: bool = False
    """True if the MLP reads the attention's input, or runs parallel to it with its own norm."""
    scalar: str | None = None  # the name of the number by which the layer's result is multiplied
    own_input: OwnInput | None = None
    streams: Streams | None = None  # None: a token has one state
    given: int = 0  # width of rows that attention reads instead of states; 0: none

    @property
    def state(self) -> StateMixer | None:
        """Return the mixer with a state; None if there is none."""
        if self.beside is not None:
            return self.beside.mixer
        return self.attention if isinstance(self.attention, StateMixer) else None


@dataclass(frozen=True)
class TokenInputs:
    """Own inputs of layers: (norm(projection(embedding) hidden^-0.5) + a row of a table) 2^-0.5."""

    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    width: str = "hidden_size_per_layer_input"  # their width in the config; 0 there: none


@dataclass(frozen=True)
class Family:
    """A family of models, by transformers' names of tensors."""

    layer: Callable[[Any, int], LayerSpec]  # the layer of a configuration at an index
    embeddings: str = ""  # the field of the factor of embeddings; empty: there is none
    logits: str = ""  # the field of the factor of logits
    divides: bool = False  # True if logits are divided by it
    inputs: TokenInputs | None = None


def attention(config: Any, index: int, **fields: Any) -> Attention:
    """Return attention as Llama's, with the heads and the window of a configuration."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    given: dict[str, Any] = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "window": window(config, index),
    }
    return Attention(**(given | fields))


def window(config: Any, index: int) -> int:
    """Return the window of a layer; 0: it sees all."""
    if not slides(config, index):
        return 0
    return getattr(config, "sliding_window", None) or 0


def slides(config: Any, index: int) -> bool:
    """Return whether the type of a layer is one with a window, or no types are given."""
    types = getattr(config, "layer_types", None)
    return not types or types[index] == "sliding_attention"


def gated(name: str, **fields: Any) -> Mlp:
    """Return a gated MLP with the activation of this name."""
    return Mlp(activation(GATED, name), **fields)


def ungated(
    name: str, up: str = "mlp.up_proj", down: str = "mlp.down_proj", function: str | None = None
) -> Mlp:
    """Return an MLP without a gate, with the activation of this name."""
    return Mlp(activation(UNGATED, name), gate_up=(up,), down=down, function=function)


def activation(known: Mapping[str, Activation], name: str) -> Activation:
    """Return a known activation by its configured name; `UnsupportedError` for another."""
    if name not in known:
        raise UnsupportedError(f"the kernels have no activation {name!r} for this family")
    return known[name]
