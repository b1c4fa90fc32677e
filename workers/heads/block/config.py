"""The config.json of a block drafter, and the numbers that its forward pass needs."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from dovetail.protocol.messages import MAX_ROW, MAX_TAPS
from dovetail.workers.heads.block.views import View
from dovetail.workers.heads.config import (
    REMEDY,
    Factor,
    HeadConfig,
    Layers,
    MisfitError,
    Outputs,
    Positions,
    Read,
)
from dovetail.workers.heads.spec import HeadSpec, TargetShape

MOST_ROWS = 64  # rows of a block; published ones have 7 to 16
LAYER_TYPES = ("full_attention", "sliding_attention")


class BlockKeys(Read):
    """Keys in `dflash_config` or at the top level."""

    block_size: Positions | None = None  # rows of a block, the root included
    mask_token_id: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    target_layer_ids: Outputs = ()
    causal: bool | None = None


class DFlashConfig(HeadConfig, BlockKeys):
    """Keys of its config.json."""

    dflash_config: BlockKeys = BlockKeys()
    aux_hidden_state_layer_ids: Layers = ()  # of speculators, counted by inputs
    model_type: str = ""
    sample_from_anchor: bool | None = None
    layer_types: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    sliding_window_non_causal: bool = False
    use_swa: bool = False
    swa_window_size: Positions | None = None
    is_causal: bool | None = None
    is_neox_style: bool = True
    rope_is_neox_style: bool = True
    attention_bias: bool = False
    attention_value_scale: Factor = 1.0
    input_embedding_scale: Factor = 1.0


@dataclass(frozen=True, kw_only=True)
class BlockSpec(HeadSpec):
    """A DFlash drafter, or one with more parts."""

    layer_views: tuple[View, ...]
    embedding_scale: float  # the factor of embedded tokens
    value_scale: float  # the factor of the output of attention

    @property
    def views(self) -> tuple[View, ...]:
        return self.layer_views


def required(key: str, *found: int | None) -> int:
    """Return the first value that is not None. Raises `MisfitError` if there is none."""
    for value in found:
        if value is not None:
            return value
    raise MisfitError(f"has no {key} in config.json; {REMEDY}")


def taps_of(config: DFlashConfig) -> tuple[int, ...]:
    """Return the layers of the target whose inputs are read. Raises `MisfitError` if none are
    named."""
    outputs = config.target_layer_ids or config.dflash_config.target_layer_ids
    if taps := config.aux_hidden_state_layer_ids or tuple(output + 1 for output in outputs):
        return taps
    raise MisfitError(f"has no target_layer_ids in config.json; {REMEDY}")


def views_of(config: DFlashConfig) -> tuple[View, ...]:
    """Return what the rows of a block see in each layer: the whole block if attention is full,
    those up to their own if it slides, unless config.json has one rule for both."""
    count, window = config.num_hidden_layers, config.sliding_window
    types = config.layer_types
    if config.use_swa:
        types, window = ("sliding_attention",) * count, config.swa_window_size or window
    elif not types and config.use_sliding_window:
        raise MisfitError(
            "has use_sliding_window but no layer_types in config.json, which name the layers that "
            f"slide; {REMEDY}"
        )
    types = types or ("full_attention",) * count
    if len(types) != count or not {*types} <= {*LAYER_TYPES}:
        raise MisfitError(
            f"has layer_types {list(types)} in config.json: it should name each of {count} layers, "
            f"{' or '.join(LAYER_TYPES)}; {REMEDY}"
        )
    if "sliding_attention" in types and window is None:
        raise MisfitError(f"has sliding layers but no sliding_window in config.json; {REMEDY}")
    bidirectional = config.model_type == "muse_glimmer_assistant"
    rule = config.is_causal if config.is_causal is not None else config.causal
    rule = config.dflash_config.causal if rule is None else rule

    def view(kind: str) -> View:
        if kind == "full_attention":
            return View(causal=bool(rule))
        causal = not (config.sliding_window_non_causal or bidirectional)
        # transformers' two-sided window includes its end
        return View(causal if rule is None else rule, (window or 0) + bidirectional)

    return tuple(view(kind) for kind in types)


def check_block(spec: BlockSpec, target: TargetShape) -> None:
    """Raise `MisfitError` if a block does not fit its target."""
    if not all(0 <= tap <= target.layers for tap in spec.taps):
        raise MisfitError(
            f"reads the inputs of layers {list(spec.taps)}, but {target.name} has "
            f"{target.layers} layers: use the drafter that was trained for it"
        )
    if len(spec.taps) > MAX_TAPS or len(spec.taps) * target.width > MAX_ROW:
        raise MisfitError(
            f"reads {len(spec.taps)} layers of width {target.width}, but a row of features "
            f"has at most {MAX_TAPS} layers and {MAX_ROW} numbers"
        )
    if not 2 <= spec.block <= MOST_ROWS:
        raise MisfitError(
            f"has block_size {spec.block} in config.json: it should be 2 to {MOST_ROWS}; {REMEDY}"
        )
    if spec.mask_token >= spec.vocabulary_size:
        raise MisfitError(
            f"has mask_token_id {spec.mask_token} in config.json, which is outside the "
            f"vocabulary of {spec.vocabulary_size}; {REMEDY}"
        )
