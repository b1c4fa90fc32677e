"""The layers of a target whose residual streams a head reads: the keys of config.json that name
them, and the default."""

from dovetail.protocol.messages import MAX_ROW
from dovetail.workers.heads.config import HeadConfig, Layers, MisfitError, Outputs, Read
from dovetail.workers.heads.spec import TargetShape


class NestedConfig(Read):
    """The object `eagle_config` of SGLang, SpecForge and ModelOpt, which counts layers by their
    outputs: one less."""

    use_aux_hidden_state: bool = True
    norm_before_fc: bool | None = None
    eagle_aux_hidden_state_layer_ids: Outputs = ()
    aux_hidden_state_layer_ids: Outputs = ()


class TapsConfig(HeadConfig):
    """Keys of config.json that name layers of the target."""

    eagle_aux_hidden_state_layer_ids: Layers = ()
    """vLLM's: the layers whose inputs are read; () for the default ones."""
    aux_hidden_state_layer_ids: Layers = ()
    eagle_config: NestedConfig = NestedConfig()


def taps_of(config: TapsConfig, target: TargetShape) -> tuple[int, ...]:
    """Return the layers whose inputs are read: those of config.json, else 2, L // 2 and L - 3."""
    nested, count = config.eagle_config, target.layers
    if not nested.use_aux_hidden_state:
        return ()
    outputs = nested.eagle_aux_hidden_state_layer_ids or nested.aux_hidden_state_layer_ids
    given = (
        config.eagle_aux_hidden_state_layer_ids
        or config.aux_hidden_state_layer_ids
        or tuple(output + 1 for output in outputs)
    )
    taps = given or (2, count // 2, count - 3)
    reads = f"reads layers {list(taps)}"
    if not given and len(set(taps)) < len(taps):
        raise MisfitError(
            f"{reads} of {target.name}, which has {count} layers: name three different ones in "
            "eagle_aux_hidden_state_layer_ids"
        )
    if not all(0 <= tap <= count for tap in taps):
        raise MisfitError(
            f"{reads}{config.made_for}, but {target.name} has {count} layers: use the head that "
            "was trained for it"
        )
    if len(taps) * target.width > MAX_ROW:
        raise MisfitError(
            f"reads {len(taps)} layers of width {target.width}, but a row of features has at most "
            f"{MAX_ROW} numbers"
        )
    return taps
