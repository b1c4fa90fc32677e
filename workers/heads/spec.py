"""The shape of a draft head: its numbers, the names and shapes of its tensors, and its target.
Kinds add their own in the files of their names. Reads no tensor and computes nothing."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dovetail.workers.heads.config import REMEDY, HeadConfig, MisfitError

if TYPE_CHECKING:
    from dovetail.workers.heads.block.views import View

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
FeatureType = Literal["float16", "bfloat16"]

IGNORED = re.compile(r".*rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
"""Buffers of old transformers versions, which can be derived from config.json, and the speculators
library's copies of the target's tensors."""
EXPERTS = "layers.0.mlp_moe"  # the module of a head's experts
NAMED = 8  # the most tensors named in an error; a checkpoint of another kind would fill a page
LONGEST_NAME = 100  # longer names of tensors are truncated to this many characters


@dataclass(frozen=True)
class TargetShape:
    """The target that a head must fit."""

    name: str
    width: int  # width of its hidden state
    layers: int
    vocabulary_size: int  # rows of its embedding, V


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A complete head except for its weights. Kinds with further numbers have a subclass."""

    kind: str
    blocks: int = 1  # decoder layers
    hidden: int  # width of the head's own state, H
    target_width: int
    taps: tuple[int, ...] = ()
    """Layers of the target whose input residual streams are read, concatenated; (): its last hidden
    state after the final norm."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of the MLP, or of one expert
    vocabulary_size: int  # tokens of the target, V
    draft_vocabulary: int
    """Rows of the output head, Vd: less than V if the head knows only the frequent tokens."""
    context: int  # positions that the head was trained for
    dtype: FeatureType  # the 16-bit type of the features
    epsilon: float  # epsilon of its norms
    contrast: bool = False  # True if it can predict the token after the next
    block: int = 0  # rows of a pass that predicts several positions; 0: a row predicts one
    levels: int = 1  # positions that a pass predicts
    candidates: int = 64
    """Tokens of a position for which pairs are scored."""
    mask_token: int = 0  # the token of the rows of a block after the first
    logit_scale: float = 1.0  # the factor of logits
    softcap: float = 0.0  # logits are softcap * tanh(logits / softcap); 0: they are as they are

    @property
    def feature_width(self) -> int:
        """Numbers of one feature row, W."""
        return self.target_width * max(1, len(self.taps))

    @property
    def views(self) -> "tuple[View, ...]":
        """What the rows of a block see in each layer; (): those up to their own."""
        return ()


def plain_name(name: str) -> str:
    """Return a tensor's name without the prefix of some checkpoints, and with EAGLE's own terms."""
    plain = name.removeprefix("model.")
    return "d2t" if plain == "draft_id_to_target_id" else plain.replace("fc_norms.", "fc_norm.")


def common_fields(
    config: HeadConfig, shapes: Shapes, target: TargetShape, *, mlp: str, layer: str
) -> dict[str, Any]:
    """Return the fields of `HeadSpec` that all kinds read alike. `layer`: the prefix of the first
    decoder layer's tensors; `mlp`: its matrix whose height is the width of the MLP."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = rows_of(shapes, f"{layer}self_attn.q_proj.weight", hidden) // heads
    return {
        "hidden": hidden,
        "target_width": hidden,
        "heads": heads,
        "kv_heads": rows_of(shapes, f"{layer}self_attn.k_proj.weight", hidden) // max(1, head_dim),
        "head_dim": head_dim,
        "intermediate": rows_of(shapes, f"{layer}{mlp}.weight", config.intermediate_size or 0),
        "vocabulary_size": rows_of(
            shapes, "embed_tokens.weight", config.vocab_size or target.vocabulary_size
        ),
        "draft_vocabulary": rows_of(shapes, "lm_head.weight", target.vocabulary_size)
        if "d2t" in shapes
        else target.vocabulary_size,
        "context": config.max_position_embeddings,
        "epsilon": config.rms_norm_eps,
    }


def refuse_other_target(
    width: int, spec: HeadSpec, target: TargetShape, made_for: str = ""
) -> None:
    """Raise `MisfitError` with both shapes if a head that reads features of this `width` was made
    for another target; `made_for`: its name in brackets, if known."""
    if (width, spec.vocabulary_size) != (target.width, target.vocabulary_size):
        raise MisfitError(
            f"is a head for a target of hidden width {width} and vocabulary "
            f"{spec.vocabulary_size}{made_for}, but {target.name} has hidden width {target.width} "
            f"and vocabulary {target.vocabulary_size}: use the head that was trained for it, "
            "or name its own target with --target.model FOLDER"
        )


@dataclass(frozen=True)
class Group:
    """Tensors of which a head has either all or none."""

    shapes: Shapes
    needed: bool = True  # False: the whole group is optional


def refuse_strange(spec: HeadSpec, groups: Iterable[Group], shapes: Shapes) -> None:
    """Raise `MisfitError` naming every tensor that is missing, unknown, empty or of another shape.
    `groups`: all tensors of the kind."""
    wanted = [
        group for group in groups if group.needed or any(name in shapes for name in group.shapes)
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
        raise MisfitError(f"is not a complete {spec.kind} head: it {'; '.join(complaints)}")
    if spec.head_dim < 2 or spec.head_dim % 2 or spec.kv_heads < 1 or spec.heads % spec.kv_heads:
        raise MisfitError(
            f"has {spec.heads} attention heads of {spec.head_dim} numbers and {spec.kv_heads} "
            "key heads (num_attention_heads in config.json, and its tensors); "
            f"a head needs an even number of them, and each key head equally many heads: {REMEDY}"
        )


def listed(names: Sequence[str]) -> str:
    """Return a list of the first few of tensors' names, truncated."""
    shown = ", ".join(
        name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names[:NAMED]
    )
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def shared_groups(spec: HeadSpec) -> list[Group]:
    """Return the embedding and the output head, which a head may have or share with its target, and
    the tables of the draft vocabulary."""
    hidden, mapped = spec.hidden, spec.draft_vocabulary != spec.vocabulary_size
    return [
        Group({"embed_tokens.weight": (spec.vocabulary_size, hidden)}, needed=False),
        Group(
            {"lm_head.weight": (spec.draft_vocabulary, hidden)},
            needed=mapped or spec.target_width != hidden,
        ),
        Group({"d2t": (spec.draft_vocabulary,)}, needed=mapped),
        Group({"t2d": (spec.vocabulary_size,)}, needed=False),
    ]


def attention_groups(spec: HeadSpec, config: HeadConfig, layer: str, width: int) -> list[Group]:
    """Return the attention tensors of a decoder layer that reads states of this `width`."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    at = f"{layer}self_attn."
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return [
        Group(
            {
                **{f"{at}{name}.weight": (rows, width) for name, rows in outputs.items()},
                f"{at}o_proj.weight": (spec.hidden, queries),
            }
        ),
        Group(
            {f"{at}{name}.bias": (rows,) for name, rows in outputs.items()}, needed=config.qkv_bias
        ),
        Group({f"{at}o_proj.bias": (spec.hidden,)}, needed=False),
        Group(
            {f"{at}{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}, needed=False
        ),
    ]


def gated_mlp(spec: HeadSpec, layer: str) -> Group:
    """Return the gated MLP of a decoder layer."""
    hidden, wide, at = spec.hidden, spec.intermediate, f"{layer}mlp."
    up = dict.fromkeys((f"{at}gate_proj.weight", f"{at}up_proj.weight"), (wide, hidden))
    return Group({**up, f"{at}down_proj.weight": (hidden, wide)})


def rows_of(shapes: Shapes, name: str, otherwise: int) -> int:
    """Return the rows of a tensor, or `otherwise` if it is missing, so that only its absence is
    reported."""
    shape = shapes.get(name, ())
    return shape[0] if shape else otherwise
