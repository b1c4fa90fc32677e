"""The longest sequence of a model, and its choice of a rotary table."""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import MAX_TOKENS

LONGEST, SECOND = "longest_sequence", "second_rotary_table"
"""Configuration fields from the settings: longest sequence, and use of the second longrope
table."""
TABLES = ("short_factor", "long_factor")
"""longrope's factors of frequencies, within the original length and beyond."""
ASKED = ("yarn", "linear", "longrope")
"""Kinds of rotation for longer contexts; some configurations have the scaled length."""


def scaled_positions(
    config: Mapping[str, Any], positions: int, kinds: Sequence[str] = ("yarn",)
) -> int:
    """Return the configured positions or, if more, the original ones times the factor of such a
    rotation: model cards add YaRN without changing the positions."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found, ropes = [int(positions)], list[Any]()
    if isinstance(rope, Mapping):
        ropes = [rope, *rope.values()]  # some have one for each type of layer
    for one in ropes:
        kind = one.get("rope_type", one.get("type")) if isinstance(one, Mapping) else None
        if kind not in kinds:
            continue
        original = one.get("original_max_position_embeddings") or positions
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # transformers reports it
            found.append(int(float(one.get("factor") or 1) * int(original)))
    return max(found)


def context_of(config: Any) -> int:
    """Return the longest sequence in tokens, of the settings or the model. With two longrope
    tables, the first one's: beyond it transformers recomputes all rows by the second."""
    if (said := getattr(config, LONGEST, None)) is not None:
        return int(said)
    positions = scaled_positions(vars(config), config.max_position_embeddings)
    if (original := _length_of_first(config)) is not None:
        positions = min(positions, original)
    return min(positions, MAX_TOKENS)


def limit_context(config: Any, context: int | None, source: object) -> Any:
    """Limit a configuration to `context` tokens in place, by the second longrope table if the first
    is too short. `CheckpointError` if the model has fewer positions."""
    if context is None:
        return config
    positions = scaled_positions(vars(config), config.max_position_embeddings, ASKED)
    if context > (most := min(positions, MAX_TOKENS)):
        text = f"target.context = {context} is more than the {most} positions of the model"
        where = "(max_position_embeddings, or the original times the factor of rope_parameters)"
        raise CheckpointError(f"{source}: {text} {where}: use at most {most}")
    original = _length_of_first(config)
    if original is not None and context > original:
        first, second = TABLES
        config.rope_parameters = {**config.rope_parameters, first: config.rope_parameters[second]}
        setattr(config, SECOND, True)
    setattr(config, LONGEST, context)
    return config


def digest_within(digest: str, config: Any) -> str:
    """Return a checkpoint's digest; the second longrope table makes it a different one."""
    return digest_of_second(digest) if getattr(config, SECOND, False) else digest


def digest_of_second(digest: str) -> str:
    """Return the digest of a checkpoint with the second longrope table."""
    return hashlib.sha256(f"{digest}\0{SECOND}".encode()).hexdigest()


def _length_of_first(config: Any) -> int | None:
    """The length that the first of two longrope tables is for; None if there is only one."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping) or rope.get("rope_type") != "longrope":
        return None
    short, long = (rope.get(name) for name in TABLES)
    return None if short == long else int(rope["original_max_position_embeddings"])
