"""The parts of a transformers layer, by the names in its family's description, those of mixers with
a state, and the rotary tables, compared with the angles of transformers' own embedding."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.exact import exp
from dovetail.workers.kernels.layer import rotary_table
from dovetail.workers.kernels.layer_plan import (
    Activation,
    BesidePlan,
    HeadNorm,
    InputPlan,
    LayerPlan,
    MixerGate,
    Norm,
    Rotary,
    StreamsPlan,
)
from dovetail.workers.kernels.states import ScanPlan
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.experts import ExpertParts, exactly, part_of, tensor_of
from dovetail.workers.models.backends.packing import LatentParts
from dovetail.workers.models.checkpoints.configured import base_model
from dovetail.workers.models.checkpoints.gguf.rows import drop_weight, rows_of, take_places
from dovetail.workers.models.families.description import (
    Attention,
    Beside,
    Experts,
    Given,
    Growth,
    Latent,
    LayerSpec,
    Mlp,
    Norms,
    Rope,
    StateMixer,
    Streams,
)
from dovetail.workers.models.parity.following import UnsupportedError

ROTARY_NAMES = ("rotary_emb", "pos_emb")  # the names of a model's rotary embedding
TABLE_ROWS = 512  # positions of the context at which angles are compared with the model's
TABLE_TOLERANCE = 1e-5


class RotaryTables:
    """The angles of all positions of a model, a table for each type of layer."""

    def __init__(self, model: Any, context: int) -> None:
        base = base_model(model)
        found = (getattr(base, name, None) for name in ROTARY_NAMES)
        embedding = next((part for part in found if part is not None), None)
        self.given = embedding is not None
        self._base, self._context = base, context
        self._embeddings: dict[str, Any] = {"": copy.deepcopy(embedding)}
        self._tables: dict[tuple[Rope | None, Growth | None], Rotary] = {}
        self.angles: dict[str, tuple[Sequence[float], float]] = {}
        """Frequencies of each table in use, and the factor of its cosines and sines."""

    def of(self, rope: Rope | None, growth: Growth | None = None) -> Rotary | None:
        """Return the table of a layer; None if it neither rotates nor has growing queries."""
        if rope is None and growth is None:
            return None
        key = rope, growth
        if key not in self._tables:
            table = Rotary(*torch.empty(2, self._context, 0)) if rope is None else self._make(rope)
            self._tables[key] = (
                table if growth is None else replace(table, factors=self._grow(growth))
            )
        return self._tables[key]

    def _make(self, rope: Rope) -> Rotary:
        name = rope.part + rope.table
        if name not in self.angles:
            self.angles[name] = self._read(rope)
        frequencies, scaling = self.angles[name]
        table = rotary_table(torch.tensor(frequencies), self._context, scaling=scaling)
        self._check(table, rope)
        return replace(table, sines=-table.sines) if rope.backward else table

    def _read(self, rope: Rope) -> tuple[Sequence[float], float]:
        if rope.part not in self._embeddings:
            self._embeddings[rope.part] = copy.deepcopy(self._base.get_submodule(rope.part))
        embedding, prefix = self._embeddings[rope.part], f"{rope.table}_" if rope.table else ""
        frequencies = getattr(embedding, f"{prefix}inv_freq", None)
        if not isinstance(frequencies, Tensor) or frequencies.ndim != 1:
            raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
        fields = getattr(getattr(embedding, "config", None), "rope_parameters", None) or {}
        scaling = fields.get("short_mscale", getattr(embedding, f"{prefix}attention_scaling", 1.0))
        return frequencies.float().tolist(), float(scaling)

    def _check(self, table: Rotary, rope: Rope) -> None:
        _check_table(table, self._embeddings[rope.part], self._context, rope)

    def _grow(self, growth: Growth) -> Tensor:
        """Return the factors of queries, float32 [context]: the same bytes on every machine."""
        steps = (torch.arange(self._context) + growth.ahead) // growth.period
        last = int(steps[-1])
        return torch.tensor([1 + growth.beta * math.log1p(k) for k in range(last + 1)])[steps]


class KnownTables(RotaryTables):
    """The angles of a model that was proved before."""

    def __init__(self, angles: Mapping[str, tuple[Sequence[float], float]], context: int) -> None:
        self.given, self._context, self._tables = bool(angles), context, {}
        self.angles = dict(angles)

    def _read(self, rope: Rope) -> tuple[Sequence[float], float]:
        raise UnsupportedError(f"the proof has no rotary table {rope.part + rope.table!r}")

    def _check(self, table: Rotary, rope: Rope) -> None:
        """Do nothing: the table comes with the proof."""


def _check_table(table: Rotary, embedding: nn.Module, context: int, of: Rope) -> None:
    """`UnsupportedError` if a table has other angles than the model's rotary embedding."""
    positions = torch.linspace(0, context - 1, min(context, TABLE_ROWS), dtype=torch.float64).long()
    which = (of.table,) if of.table else ()
    given = embedding(torch.zeros(1, 1), positions.unsqueeze(0), *which)
    if isinstance(given, Tensor) and given.is_complex():
        given = given.real, given.imag
    if not isinstance(given, tuple) or len(given) != 2:
        raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
    for own, other in zip((table.cosines, table.sines), given, strict=True):
        found = own[positions]
        expected = found.repeat_interleave(2, 1) if of.interleaved else found.repeat(1, 2)
        # some embeddings of neighbours give halves, and their layers repeat each angle
        if of.interleaved and torch.equal(other[0, :, 0], other[0, :, other.shape[-1] // 2]):
            expected = found.repeat(1, 2)
        if other.shape[-1] == found.shape[-1]:  # each angle once
            expected = found
        if other.shape[1:] != expected.shape:
            raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
        far = (other[0] - expected).abs().amax(-1) > TABLE_TOLERANCE
        if bool(far.any()):
            position = int(positions[far][0])
            kind = type(embedding).__name__
            raise UnsupportedError(f"the angles of position {position} are not those of {kind}")


class NoAngles(nn.Module):
    """Replaces transformers' rotary embedding: the kernels have a table of all angles."""

    layer_types: Sequence[str] = ()  # LFM3 asks for the angles of each

    def forward(self, *unused: Any, **also_unused: Any) -> None:
        """Compute nothing."""


@dataclass(frozen=True)
class Gates:
    """A linear whose outputs are queries and gates, head by head, to be separated."""

    module: nn.Linear
    queries: nn.Linear
    gates: nn.Linear
    order: Tensor  # int64 [out]: the places of both outputs in the checkpoint


def split_gates(module: nn.Linear, heads: int, head_dim: int) -> Gates:
    """Separate queries and gates; the linear loses its weights."""
    order = torch.arange(2 * heads * head_dim).view(heads, 2, head_dim).transpose(0, 1).flatten()
    if len(order) != module.out_features:
        raise UnsupportedError(f"{module.out_features} queries and gates, not {len(order)}")
    queries, gates = (_rows(module, part) for part in order.chunk(2))
    drop_weight(module)
    return Gates(module, queries, gates, order)


def _rows(module: nn.Linear, rows: Tensor) -> nn.Linear:
    part = nn.Linear(module.in_features, len(rows), bias=module.bias is not None, device="meta")
    take_places(module, rows, part)
    return part


def orders_of(said: StateMixer) -> list[Tensor | None]:
    """Return the places in the checkpoint of outputs that the kernels read; None: in place."""
    if said.order is Given.IN_ORDER:
        return [None] * len(said.given)
    keys, values = said.key_heads * said.key_dim, said.value_heads * said.value_dim
    if said.order is Given.GATE_FIRST:
        places = torch.arange(2 * values + 2 * keys + said.value_heads)
        gate, value, key, query, step = torch.split(
            places, [values, values, keys, keys, said.value_heads]
        )
        return [torch.cat([query, key, value, gate, step])]
    each = said.value_heads // said.key_heads
    widths = [said.key_dim, said.key_dim, each * said.value_dim, each * said.value_dim]
    wide = torch.arange(2 * keys + 2 * values).view(said.key_heads, sum(widths))
    narrow = torch.arange(2 * said.value_heads).view(said.key_heads, 2 * each)
    return [
        torch.cat([part.flatten() for part in torch.split(wide, widths, 1)]),
        torch.cat([part.flatten() for part in torch.split(narrow, each, 1)]),
    ]


def scan_of(layer: nn.Module, said: StateMixer) -> ScanPlan:
    """Return the mixer of a layer without its matrices."""
    weight, bias = tensor_of(layer, f"{said.conv}.weight").float(), None
    if weight.ndim != 3 or weight.shape[1] != 1:
        raise UnsupportedError(f"{said.conv} of {type(layer).__name__} is not a convolution")
    weight = weight[:, 0]
    if getattr(part_of(layer, said.conv), "bias", None) is not None:
        bias = tensor_of(layer, f"{said.conv}.bias").float()
    if said.order is Given.GATE_FIRST:
        keys, values = said.key_heads * said.key_dim, said.value_heads * said.value_dim
        value, key, query = torch.split(torch.arange(len(weight)), [values, keys, keys])
        order = torch.cat([query, key, value])
        weight, bias = weight[order], None if bias is None else bias[order]
    norm = None if said.norm is None else f"{said.norm}.weight"
    decay = _numbers(layer, said.decay)
    return ScanPlan(
        said.rule,
        weight.t().contiguous(),
        None if bias is None else bias.contiguous(),
        said.key_heads,
        said.value_heads,
        said.key_dim,
        said.value_dim,
        None if decay is None else -exp(decay),
        _numbers(layer, said.step_bias),
        _numbers(layer, said.skip),
        _numbers(layer, norm),
        said.norm_width,
        said.gate_first,
        said.epsilon,
        said.query_scale,
        said.step_factor,
        _linear(layer, said.behind[0]).in_features if said.behind else 0,
        _factors(said),
    )


def _factors(said: StateMixer) -> Tensor | None:
    if said.factors is None:
        return None
    gate, value, key, query, step = map(torch.tensor, said.factors)
    keys, values = said.key_heads * said.key_dim, said.value_heads * said.value_dim
    widths = (keys, keys, values, values, said.value_heads)
    parts = (query, key, value, gate, step)
    return torch.cat([part.expand(width) for part, width in zip(parts, widths, strict=True)])


def _numbers(layer: nn.Module, name: str | None) -> Tensor | None:
    return None if name is None else tensor_of(layer, name).float().flatten().contiguous()


BESIDE = "beside_"
"""The beginning of the names of the matrices of a mixer with a state that is next to attention."""
BEHIND = ("scan_gate", "scan_decay")
"""The names of the matrices of a mixer's gate and decays, which follow its first matrix."""
AROUND = ("before", "behind")
"""The names of the matrices before and after experts of another width."""


class LayerParts:
    """The parts of a decoder layer that a description names."""

    def __init__(self, layer: nn.Module, spec: LayerSpec) -> None:
        self.layer, self.spec = layer, spec
        self.order: Tensor | None = None  # int64 [head_dim]: a head's places in the checkpoint
        self.rows: dict[str, Sequence[Tensor | None]] = {}
        """Matrix -> for each linear int64 [out]: places of its outputs in the checkpoint, or
        None."""
        self.experts: ExpertParts | None = None
        self.sinks: Tensor | None = None  # float32 [heads]: scores without a value
        self.value_norm: Norm | None = None
        self.unit_norms: dict[str, Norm] = {}  # the norms of queries and keys that have no weights
        self.scalar = 1.0  # the factor of the layer's output
        self.numbers = (0.0, 0.0)  # the numbers of the activation
        self.scan: ScanPlan | None = None  # the mixer with a state, instead of or next to attention
        self.activation = Activation.SILU_GATED
        self.linears: dict[str, list[nn.Linear]] = {}
        """The linears of each matrix, concatenated by outputs."""
        self.gates: Gates | None = None  # queries, and the gates after attention, separated
        self.latent: LatentParts | None = None
        """The matrices of heads and the norms of attention over latents."""
        mixer, norms = spec.attention, spec.norms
        query, key = None, None
        if isinstance(mixer, Latent):
            self._take_latent(layer, mixer)
        if isinstance(mixer, Attention):
            query, key = mixer.norms or (None, None)
            self._take_attention(layer, mixer)
        if (state := spec.state) is not None:
            self._take_state(layer, state, "" if state is mixer else BESIDE)
        if spec.mlp is not None:
            self._take_mlp(layer, spec.mlp)
        named = {
            "attention_norm": norms.pre_mixer,
            "post_attention_norm": norms.post_mixer,
            "mlp_norm": norms.pre_mlp,
            "post_mlp_norm": norms.post_mlp,
            "query_norm": query,
            "key_norm": key,
            "mixer_norm": mixer.output_norm if isinstance(mixer, Attention) else None,
            "inner_norm": spec.mlp.norm if isinstance(spec.mlp, Mlp) else None,
        }
        self.norms = {
            part: part_of(layer, name) for part, name in named.items() if name is not None
        }
        if (own := spec.own_input) is not None:
            self.linears["input_gate"] = [_linear(layer, own.gate)]
            self.linears["input_projection"] = [_linear(layer, own.projection)]
        if spec.streams is not None:
            self.linears["left"] = [_linear(layer, spec.streams.left)]
            self.linears["right"] = [_linear(layer, spec.streams.right)]
            for name in (spec.streams.router, spec.streams.predict, spec.streams.correct):
                if rows_of(part_of(layer, name.removesuffix(".weight"))) is not None:
                    raise UnsupportedError(f"{name} is stored in blocks")
        if spec.scalar is not None:
            self.scalar = float(tensor_of(layer, spec.scalar))

    def _take_attention(self, layer: nn.Module, said: Attention) -> None:
        self.linears["qkv"] = [_linear(layer, name) for name in said.qkv]
        self.linears["output"] = [_linear(layer, said.output)]
        if said.by_head:
            parts = torch.arange(3 * said.heads * said.head_dim)
            parts = parts.view(said.heads, 3, said.head_dim).transpose(0, 1)
            self._reorder("qkv", [parts.flatten()])
        if said.gated:
            self.gates = split_gates(self.linears["qkv"][0], said.heads, said.head_dim)
            self.linears["qkv"][0] = self.gates.queries
            self.linears["mixer_gate"] = [self.gates.gates]
        if said.gate is not None:
            self.linears["mixer_gate"] = [_linear(layer, said.gate)]
        if said.sinks is not None:
            self.sinks = tensor_of(layer, said.sinks).float().contiguous()
        if said.norms_heads:
            unit = Norm(torch.ones(said.head_dim))
            self.unit_norms = {"query_norm": unit, "key_norm": unit}
        if said.norms_values:
            self.value_norm = Norm(torch.ones(said.head_dim))

    def _take_latent(self, layer: nn.Module, said: Latent) -> None:
        self.linears["qkv"] = [_linear(layer, name) for name in (said.query, said.latent)]
        self.linears["output"] = [_linear(layer, said.output)]
        if said.query_up is not None:
            self.linears["query_up"] = [_linear(layer, said.query_up)]
        latent_norm, query_norm = (
            None if name is None else _weight_of(part_of(layer, name))
            for name in (said.latent_norm, said.query_norm)
        )
        assert latent_norm is not None
        self.latent = LatentParts(said, _linear(layer, said.latent_up), latent_norm, query_norm)

    def _take_state(self, layer: nn.Module, said: StateMixer, where: str) -> None:
        given = f"{where}qkv"
        self.linears[given] = [_linear(layer, name) for name in said.given]
        self.linears[f"{where}output"] = [_linear(layer, said.output)]
        self.scan = scan_of(layer, said)
        for name, part in zip(BEHIND, said.behind or (), strict=False):
            self.linears[name] = [_linear(layer, part)]
        self._reorder(given, orders_of(said))

    def _take_mlp(self, layer: nn.Module, said: Mlp | Experts) -> None:
        mlp = said.shared if isinstance(said, Experts) else said
        if mlp is not None:
            self.linears["gate_up"] = [_linear(layer, name) for name in mlp.gate_up]
            self.linears["down"] = [_linear(layer, mlp.down)]
        if isinstance(said, Experts):
            self.experts, self.numbers = ExpertParts(layer, said), said.numbers
            for name, part in zip(AROUND, said.around or (), strict=False):
                self.linears[name] = [_linear(layer, part)]
            named = (said.input_norm, said.output_norm, said.shared_norm)
            self.experts.norms = [
                None if name is None else Norm(_weight_of(part_of(layer, name))) for name in named
            ]
        elif said.function is not None:
            self.numbers = _xielu_numbers(part_of(layer, said.function))
        elif said.gate_factor != 1.0:
            if said.activation is not Activation.SILU_GATED:
                raise UnsupportedError("the kernels multiply no gate but that of SiLU")
            self.numbers = (said.gate_factor, 0.0)
        self.activation = said.activation

    def interleave(self, rotated: int, head_dim: int) -> None:
        """Reorder queries and keys whose first `rotated` numbers are rotated in pairs of
        neighbours: the pairs become halves."""
        if len(self.linears["qkv"]) != 3 or "query_norm" in self.norms:
            raise UnsupportedError("the kernels rotate no neighbours in fused or normed queries")
        self.order = torch.cat([_pairs_apart(rotated), torch.arange(rotated, head_dim)])
        queries, keys, _ = (part.out_features for part in self.linears["qkv"])
        self._reorder("qkv", [by_heads(self.order, queries), by_heads(self.order, keys), None])

    def interleave_latent(self, said: Latent) -> None:
        """Reorder the rows of queries and of the key that are turned in pairs of neighbours."""
        order = _pairs_apart(said.rotated)
        queries = _rotary_rows(order, said.heads, said.plain)
        key = _rotary_rows(order, 1, said.rank)
        if said.query_up is None:
            self._reorder("qkv", [queries, key])
        else:
            self._reorder("qkv", [None, key])
            self._reorder("query_up", [queries])

    def _reorder(self, name: str, rows: Sequence[Tensor | None]) -> None:
        self.rows[name] = rows
        for part, order in zip(self.linears[name], rows, strict=True):
            if order is None:
                continue
            if len(order) != part.out_features:
                raise UnsupportedError(f"a linear of {part.out_features} outputs, not {len(order)}")
            take_places(part, order, part)


def _xielu_numbers(function: Any) -> tuple[float, float]:
    """Return the factors of the squares of positive and of negative values."""
    learned = (getattr(function, name, None) for name in ("alpha_p", "alpha_n"))
    positive, negative = (
        part.detach().double().exp().log1p().float().item() if isinstance(part, Tensor) else None
        for part in learned
    )
    if positive is None or negative is None or float(function.beta) != 0.5:
        raise UnsupportedError(f"the activation {type(function).__name__}")
    return positive, 0.5 + negative


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    found = part_of(layer, name)
    if type(found) is not nn.Linear:
        raise UnsupportedError(f"{name} of {type(layer).__name__} is not a linear layer")
    return found


def _pairs_apart(count: int) -> Tensor:
    """Return the order of this many numbers in which pairs of neighbours are halves."""
    return torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2)])


def _rotary_rows(order: Tensor, heads: int, plain: int) -> Tensor:
    """Return the order of heads' numbers if the last ones of each are reordered."""
    size = plain + len(order)
    own = torch.cat([torch.arange(plain), plain + order])
    return (torch.arange(0, heads * size, size).unsqueeze(1) + own).flatten()


def by_heads(order: Tensor, width: int) -> Tensor:
    """Return the order [width] of the numbers of all heads, given that of one head."""
    return (torch.arange(0, width, len(order)).unsqueeze(1) + order).flatten()


def _weight_of(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise UnsupportedError(f"a norm of type {type(module).__name__} without weights")
    return weight.detach().float().contiguous()


def described_norm(module: nn.Module, norms: Norms) -> Norm:
    """Return the weights of a norm that a description knows."""
    if norms.plain:
        return Norm(torch.ones(norms.plain))
    weight, bias = _weight_of(module), getattr(module, "bias", None)
    weight = 1.0 + weight if norms.plus_one else weight
    return Norm(weight, None if bias is None else bias.detach().float().contiguous())


def plan_of(
    parts: LayerParts,
    index: int,
    noted: Noted,
    matrices: Mapping[str, PackedMatrix],
    tables: RotaryTables,
    kind: Kind,
) -> LayerPlan:
    """Return a layer's plan without experts; `noted`: the call of its attention."""
    spec, said = parts.spec, parts.spec.norms
    mixer = spec.attention if isinstance(spec.attention, Attention) else None
    rotates = spec.attention if isinstance(spec.attention, Attention | Latent) else None
    kv_heads, head_dim, latent = noted.kv_heads, noted.head_dim, None
    if parts.latent is not None:
        kv_heads, head_dim = 1, parts.latent.width
        latent = parts.latent.pack(kind, matrices.get("query_up"))
    norms: dict[str, Any] = {"attention_norm": None, "mlp_norm": None}
    norms |= {name: described_norm(module, said) for name, module in parts.norms.items()}
    norms |= parts.unit_norms
    beside = _beside(spec.beside, norms["attention_norm"], matrices)
    if spec.beside is not None:
        norms["attention_norm"] = _times(
            norms["attention_norm"], spec.beside.attention_given_factor
        )
    own_input = None
    if spec.own_input is not None:
        own_input = InputPlan(
            matrices["input_gate"],
            matrices["input_projection"],
            described_norm(part_of(parts.layer, spec.own_input.norm), said),
            spec.own_input.first,
        )
    return LayerPlan(
        index=index,
        heads=noted.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=matrices.get("qkv"),
        output=matrices.get("output"),
        gate_up=matrices.get("gate_up"),
        down=matrices.get("down"),
        **norms,
        rotary=None if rotates is None else tables.of(rotates.rope, rotates.growth),
        head_norm=HeadNorm.HEAD_BEFORE_ROPE if mixer is None else mixer.norm_place,
        reads=None if mixer is None else mixer.reads,
        own_input=own_input,
        streams=None if spec.streams is None else _streams(parts.layer, spec.streams, matrices),
        cut=spec.mlp.cut if isinstance(spec.mlp, Mlp) else 0.0,
        scan=parts.scan,
        latent=latent,
        beside=beside,
        key_factor=1.0 if mixer is None else mixer.key_factor,
        mixer_gate=matrices.get("mixer_gate"),
        scan_gate=matrices.get("scan_gate"),
        scan_decay=matrices.get("scan_decay"),
        gate_kind=MixerGate.SIGMOID if mixer is None else mixer.gate_kind,
        clip=0.0 if mixer is None else mixer.clip,
        residual=spec.residual_scale,
        mlp_residual=spec.residual_scale * (1.0 if spec.mlp is None else spec.mlp.factor),
        parallel=spec.parallel,
        norm_kind=said.kind,
        activation=parts.activation,
        activation_numbers=parts.numbers,
        sinks=parts.sinks,
        value_norm=parts.value_norm,
        scalar=parts.scalar,
        epsilon=said.epsilon,
        scale=noted.scaling,
        softcap=noted.softcap or 0.0,
        window=noted.window or 0,
        chunk=0 if mixer is None else mixer.chunk,
        given=spec.given,
    )


def _streams(layer: nn.Module, said: Streams, matrices: Mapping[str, PackedMatrix]) -> StreamsPlan:
    router, predict, correct = (
        exactly(tensor_of(layer, name)) for name in (said.router, said.predict, said.correct)
    )
    read, norm = (_weight_of(part_of(layer, name)) for name in (said.router_norm, said.norm))
    scale = tensor_of(layer, said.scale).float() if said.scaled else torch.ones(router.k)
    low_rank = matrices["left"], matrices["right"], Norm(norm)
    return StreamsPlan(router, Norm(read / router.k), predict, correct, scale, *low_rank)


def _times(norm: Norm, factor: float) -> Norm:
    bias = None if norm.bias is None else norm.bias * factor
    return Norm(norm.weight * factor, bias)


def _beside(
    said: Beside | None, norm: Norm | None, matrices: Mapping[str, PackedMatrix]
) -> BesidePlan | None:
    """Return a mixer with a state beside attention; `norm`: of the input of both."""
    if said is None:
        return None
    if norm is None:
        raise UnsupportedError("a mixer next to attention must read a norm's output")
    given, output = (matrices[f"{BESIDE}{name}"] for name in ("qkv", "output"))
    return BesidePlan(
        _times(norm, said.given_factor), given, output, said.factor, said.attention_factor
    )


def without_fixed_shapes(spec: LayerSpec) -> str:
    """Return the part of a layer that levels of fixed shapes on a GPU do not cover; else empty."""
    mixer = spec.attention
    if spec.state is not None:
        return "states"
    if isinstance(mixer, Latent):
        return "attention over latents"
    if not isinstance(mixer, Attention) or spec.mlp is None:
        return "one half"
    found = {
        "experts": isinstance(spec.mlp, Experts),
        "chunked attention": mixer.chunk > 0,
        "keys and values of another": mixer.reads is not None,
        "inputs of their own": spec.own_input is not None,
    }
    return next((what for what, there in found.items() if there), "")


def final_norm(base: Any) -> tuple[str, nn.Module]:
    """Return name and module of a model's final norm."""
    for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm", "norm_f"):
        if hasattr(base, name):
            return name, getattr(base, name)
    raise UnsupportedError(f"{type(base).__name__} has no known final norm")
