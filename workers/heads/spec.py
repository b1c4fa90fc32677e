"""What a draft head is made of, told by its config.json, the names and shapes of its tensors and
the target that it reads.

Five kinds are known, each in the formats of its public checkpoints: EAGLE-1/2, EAGLE-3 (in the
names of its own repository, of vLLM and of SpecForge), Dovetail, Jakiro and Jakiro*. Knows names
and shapes; reads no tensor and computes nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dovetail.protocol.messages import MAX_ROW
from dovetail.workers.heads.config import REMEDY, HeadConfig, MisfitError

Kind = Literal["eagle", "eagle3", "dovetail", "jakiro", "jakiro*"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

IGNORED = re.compile(r".*rotary_emb\.inv_freq")
"""Buffers of old transformers, which follow from config.json."""
NAMED = 8
"""So many tensors of each complaint are named; a checkpoint of something else would fill a page."""
LONGEST_NAME = 100
"""Of a tensor, in characters; a longer one is shown by its beginning."""


@dataclass(frozen=True)
class TargetShape:
    """What a head has to fit."""

    name: str
    width: int
    """Of its hidden state."""
    layers: int
    vocabulary_size: int
    """Rows of its embedding, V."""


@dataclass(frozen=True)
class HeadSpec:
    """A head, complete: with its weights this is all that there is to compute."""

    kind: Kind
    blocks: int
    """Decoder layers."""
    hidden: int
    """Of the head's own state, H."""
    target_width: int
    taps: tuple[int, ...]
    """The target's layers whose incoming residual streams are read, side by side; (): its last
    hidden state after the final norm."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the MLP, or of one expert."""
    vocabulary_size: int
    """Of the target, V."""
    draft_vocabulary: int
    """Rows of the output head, Vd: less than V where the head knows only the frequent tokens."""
    context: int
    """Positions that the head was trained for."""
    dtype: Literal["float16", "bfloat16"]
    """The 16-bit type in which features are to come."""
    epsilon: float
    """Of its norms."""
    experts: int = 0
    contrast: bool = False
    """Jakiro: whether there are gate rows for the token after the next."""
    dgf_silu: bool = True
    dgf_embed_norm: bool = True
    """Dovetail: the SiLU and the norm on the embedding, of which the paper says nothing and which
    its weights need."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual of its layer is the normed state."""
    norm_output: bool = False
    """EAGLE-3: the recurrent state is the one behind the final norm."""
    fc_norm: bool = False
    """EAGLE-3: each tap has a norm of its own before they are fused."""

    @property
    def feature_width(self) -> int:
        """Numbers of one feature row, W."""
        return self.target_width * max(1, len(self.taps))


def kind_of(names: Iterable[str], shapes: Shapes) -> Kind | None:
    """The kind of head that tensors of these names are; None: no head, such as an ordinary language
    model."""
    found = {plain_name(name): name for name in names}
    if "W_z" in found:
        return "dovetail"
    if "layers.0.mlp_moe.gate.weight" in found:
        return "jakiro*" if "layers.0.mlp_moe.experts.0.fc.weight" in found else "jakiro"
    if any(
        name in found
        for name in ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    ):
        return "eagle3"
    if (
        "fc.weight" in found
        and "layers.0.self_attn.q_proj.weight" in found
        and "layers.0.input_layernorm.weight" not in found
    ):
        shape = shapes[found["fc.weight"]]
        return "eagle" if len(shape) == 2 and shape[1] == 2 * shape[0] else None
    return None


def plain_name(name: str) -> str:
    """A tensor's name without the prefix that some checkpoints have, and in the words of EAGLE's
    own."""
    plain = name.removeprefix("model.")
    return "d2t" if plain == "draft_id_to_target_id" else plain.replace("fc_norms.", "fc_norm.")


def names_of(kind: Kind, names: Iterable[str]) -> dict[str, str]:
    """For each tensor's name as this module writes it the one in the checkpoint; two that mean the
    same are refused."""
    found: dict[str, str] = {}
    for name in names:
        plain = plain_name(name)
        if kind == "eagle3":
            plain = re.sub(r"^layers\.0\.", "midlayer.", plain)
        if plain in found:
            raise MisfitError(f"has both {found[plain]} and {name}, which mean the same tensor")
        if not IGNORED.fullmatch(plain):
            found[plain] = name
    return found


def read_spec(
    kind: Kind,
    config: HeadConfig,
    shapes: Shapes,
    target: TargetShape,
    dtype: Literal["float16", "bfloat16"],
) -> HeadSpec:
    """The head of a config.json and its tensors' shapes (by the names of `names_of`); `MisfitError`
    where it cannot be one or does not fit its target."""
    layer = "midlayer." if kind == "eagle3" else "layers.0."
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = _rows(shapes, f"{layer}self_attn.q_proj.weight", hidden) // heads
    experts = len(
        {name.split(".")[4] for name in shapes if name.startswith("layers.0.mlp_moe.experts.")}
    )
    spec = HeadSpec(
        kind=kind,
        blocks=config.num_hidden_layers if kind == "dovetail" else 1,
        hidden=hidden,
        target_width=config.target_hidden_size or hidden if kind == "eagle3" else hidden,
        taps=_taps(config, target) if kind == "eagle3" else (),
        heads=heads,
        kv_heads=_rows(shapes, f"{layer}self_attn.k_proj.weight", hidden) // max(1, head_dim),
        head_dim=head_dim,
        intermediate=_intermediate(kind, shapes, layer, config),
        vocabulary_size=_rows(
            shapes, "embed_tokens.weight", config.vocab_size or target.vocabulary_size
        ),
        draft_vocabulary=_rows(shapes, "lm_head.weight", target.vocabulary_size)
        if kind == "eagle3"
        else target.vocabulary_size,
        context=config.max_position_embeddings,
        dtype=dtype,
        epsilon=config.rms_norm_eps,
        experts=experts,
        contrast=kind == "jakiro"
        and _rows(shapes, "layers.0.mlp_moe.gate.weight", experts) > experts,
        dgf_silu=config.dgf_silu,
        dgf_embed_norm=config.dgf_embed_norm,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        fc_norm="fc_norm.0.weight" in shapes,
    )
    _refuse_misfit(spec, shapes, target)
    if kind != "jakiro*" and config.hidden_act not in ("silu", "swish"):
        raise MisfitError(f"has hidden_act {config.hidden_act!r}; heads compute with silu")
    return spec


def _taps(config: HeadConfig, target: TargetShape) -> tuple[int, ...]:
    """The streams that an EAGLE-3 head reads: as config.json says, else those entering layers 2, L
    // 2 and L - 3."""
    nested = config.eagle_config
    if not nested.use_aux_hidden_state:
        return ()
    outputs = nested.eagle_aux_hidden_state_layer_ids or nested.aux_hidden_state_layer_ids
    given = (
        config.eagle_aux_hidden_state_layer_ids
        or config.aux_hidden_state_layer_ids
        or tuple(output + 1 for output in outputs)
    )
    taps = given or (2, target.layers // 2, target.layers - 3)
    if not given and len(set(taps)) < len(taps):
        where = f"{target.name}, which has {target.layers}"
        raise MisfitError(
            f"reads layers {list(taps)} of {where}: name three different ones in "
            "eagle_aux_hidden_state_layer_ids"
        )
    if not all(0 <= tap < target.layers for tap in taps):
        raise MisfitError(
            f"reads layers {list(taps)}, but {target.name} has layers 0 to "
            f"{target.layers - 1}: take the head that was trained for it"
        )
    if len(taps) * target.width > MAX_ROW:
        raise MisfitError(
            f"reads {len(taps)} layers of width {target.width}; {MAX_ROW} numbers are the most "
            "that a row of features may have"
        )
    return taps


def _intermediate(kind: Kind, shapes: Shapes, layer: str, config: HeadConfig) -> int:
    name = {"jakiro": "mlp_moe.experts.0.gate_proj", "jakiro*": "mlp_moe.experts.0.fc"}.get(
        kind, "mlp.gate_proj"
    )
    return _rows(shapes, f"{layer}{name}.weight", config.intermediate_size or 0)


def _refuse_misfit(spec: HeadSpec, shapes: Shapes, target: TargetShape) -> None:
    """`MisfitError` with both shapes where a head reads another target than this."""
    width = spec.target_width
    if spec.kind == "eagle3" and len(shapes.get("fc.weight", ())) == 2:
        width = shapes["fc.weight"][1] // max(1, len(spec.taps))
    if (width, spec.vocabulary_size) != (target.width, target.vocabulary_size):
        raise MisfitError(
            f"is a head for a target of hidden width {width} and vocabulary "
            f"{spec.vocabulary_size}, but {target.name} has hidden width {target.width} "
            f"and vocabulary {target.vocabulary_size}: take the head that was trained for it, "
            "or name its own target with --target.model FOLDER"
        )


def refuse_strange(spec: HeadSpec, config: HeadConfig, shapes: Shapes) -> None:
    """`MisfitError` naming every tensor that is missing, that a head of this kind does not have,
    that is empty or that has another shape."""
    wanted = [
        group
        for group in _groups(spec, config)
        if group.needed or any(name in shapes for name in group.shapes)
    ]
    expected = {name: shape for group in wanted for name, shape in group.shapes.items()}
    missing = [name for name in expected if name not in shapes]
    unexpected = [name for name in shapes if name not in expected]
    misshapen = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    empty = [name for name, shape in shapes.items() if 0 in shape]
    complaints = [
        f"{what} {listed(names)}"
        for what, names in (
            ("lacks", missing),
            ("has unknown tensors", unexpected),
            ("has the wrong shape for", misshapen),
            ("has empty tensors", empty),
        )
        if names
    ]
    if complaints:
        raise MisfitError(f"is no whole {spec.kind} head: it {'; '.join(complaints)}")
    if spec.head_dim < 2 or spec.head_dim % 2 or spec.kv_heads < 1 or spec.heads % spec.kv_heads:
        raise MisfitError(
            f"has {spec.heads} attention heads of {spec.head_dim} numbers and {spec.kv_heads} "
            "key heads (num_attention_heads in config.json, and its tensors); "
            f"a head needs an even number of them, and each key head equally many heads: {REMEDY}"
        )


def listed(names: Sequence[str]) -> str:
    """The first few names of tensors, which may be anything."""
    shown = ", ".join(
        name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names[:NAMED]
    )
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


@dataclass(frozen=True)
class _Group:
    """Tensors of which a head has all or none."""

    shapes: Shapes
    needed: bool = True
    """False: only where any of them is there."""


def _groups(spec: HeadSpec, config: HeadConfig) -> list[_Group]:
    """All tensors of a head."""
    hidden, fusion = spec.hidden, _fusion_groups(spec, config)
    embedding = _Group({"embed_tokens.weight": (spec.vocabulary_size, hidden)}, needed=False)
    own_head = spec.draft_vocabulary != spec.vocabulary_size or spec.target_width != hidden
    output = _Group({"lm_head.weight": (spec.draft_vocabulary, hidden)}, needed=own_head)
    groups = [*fusion, embedding, output]
    if spec.kind == "eagle3":
        layer = "midlayer."
        norms = (
            "midlayer.hidden_norm",
            "midlayer.input_layernorm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        groups += [
            _Group({f"{name}.weight": (hidden,) for name in norms}),
            *_attention_groups(spec, config, layer, 2 * hidden),
            _mlp_group(spec, layer),
        ]
        mapped = spec.draft_vocabulary != spec.vocabulary_size
        return [
            *groups,
            _Group({"d2t": (spec.draft_vocabulary,)}, needed=mapped),
            _Group({"t2d": (spec.vocabulary_size,)}, needed=False),
        ]
    for index in range(spec.blocks):
        layer = f"layers.{index}."
        names = ("post_attention_layernorm", "input_layernorm")[: 1 if index == 0 else 2]
        groups += [
            _Group({f"{layer}{name}.weight": (hidden,) for name in names}),
            *_attention_groups(spec, config, layer, hidden),
            _mlp_group(spec, layer),
        ]
    return groups


def _fusion_groups(spec: HeadSpec, config: HeadConfig) -> list[_Group]:
    hidden = spec.hidden
    if spec.kind == "dovetail":
        norm = _Group({"input_layernorm.weight": (hidden,)}, needed=spec.dgf_embed_norm)
        return [
            _Group({"W_1": (hidden, hidden), "W_2": (hidden, hidden), "W_z": (2 * hidden, hidden)}),
            norm,
        ]
    if spec.kind != "eagle3":
        return [
            _Group({"fc.weight": (hidden, 2 * hidden)}),
            _Group({"fc.bias": (hidden,)}, needed=config.bias),
        ]
    fused = spec.taps != () or spec.target_width != hidden
    norms = {f"fc_norm.{i}.weight": (spec.target_width,) for i in range(max(1, len(spec.taps)))}
    return [
        _Group({"fc.weight": (hidden, spec.feature_width)}, needed=fused),
        _Group({"fc.bias": (hidden,)}, needed=False),
        _Group(norms, needed=config.fc_norm),
    ]


def _attention_groups(spec: HeadSpec, config: HeadConfig, layer: str, width: int) -> list[_Group]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    at = f"{layer}self_attn."
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return [
        _Group(
            {
                **{f"{at}{name}.weight": (rows, width) for name, rows in outputs.items()},
                f"{at}o_proj.weight": (spec.hidden, queries),
            }
        ),
        _Group(
            {f"{at}{name}.bias": (rows,) for name, rows in outputs.items()}, needed=config.qkv_bias
        ),
        _Group({f"{at}o_proj.bias": (spec.hidden,)}, needed=False),
        _Group(
            {f"{at}{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}, needed=False
        ),
    ]


def _mlp_group(spec: HeadSpec, layer: str) -> _Group:
    hidden, wide = spec.hidden, spec.intermediate
    gated = {
        "gate_proj.weight": (wide, hidden),
        "up_proj.weight": (wide, hidden),
        "down_proj.weight": (hidden, wide),
    }
    if not spec.kind.startswith("jakiro"):
        return _Group({f"{layer}mlp.{name}": shape for name, shape in gated.items()})
    expert = (
        gated
        if spec.kind == "jakiro"
        else {"fc.weight": (wide, hidden), "proj.weight": (hidden, wide)}
    )
    gate = {f"{layer}mlp_moe.gate.weight": (spec.experts + 2 * spec.contrast, hidden)}
    return _Group(
        {
            **gate,
            **{
                f"{layer}mlp_moe.experts.{i}.{name}": shape
                for i in range(max(2, spec.experts))
                for name, shape in expert.items()
            },
        }
    )


def _rows(shapes: Shapes, name: str, otherwise: int) -> int:
    """Rows of a tensor; of one that is missing what it should have, so that it is named as missing
    and nothing else."""
    shape = shapes.get(name, ())
    return shape[0] if shape else otherwise
