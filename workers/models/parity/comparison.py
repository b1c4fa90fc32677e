"""Compares what transformers passes to a layer for the same rows in different passes."""

from typing import Any

import torch
from torch import Tensor

from dovetail.workers.models.parity.following import Call, Path, UnprovableError

CHANGING = ("dynamic", "longrope")  # rotations that may depend on the longest sequence
SAME = 1e-5  # tolerance of a layer's inputs with other rows in the batch: rounding only


class Comparison:
    """Tensors that layers are given for the same rows in different passes, compared once each."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._same: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Compared pairs by address, kept so that addresses are not reused."""

    def compare(self, part: Call, whole: Call, count: int, first: int, rows: int) -> None:
        """`UnprovableError` if a layer gets other numbers for the same rows in a larger batch,
        except masks."""
        others = dict(whole.leaves())
        for path, tensor in part.leaves():
            other = others.get(path)
            key = (id(tensor), id(other))
            if other is None or tensor.ndim == 4 or key in self._same:
                continue
            axes = [
                axis
                for axis, size in enumerate(tensor.shape)
                if (size, other.shape[axis : axis + 1]) == (count, (rows,))
            ]
            beside = other.narrow(axes[0], first, count) if axes else other
            if beside.shape != tensor.shape:
                raise UnprovableError(
                    f"transformers gives a layer {named_path(path)} {list(tensor.shape)}, which is "
                    "not one row for each token"
                )
            self._same[key] = (tensor, other)
            if tensor.is_floating_point() or tensor.is_complex():
                far = (tensor - beside).abs() > SAME
                if bool(far.any()):
                    raise UnprovableError(self._why(path))
            elif not torch.equal(tensor, beside):
                raise UnprovableError(self._why(path))

    def _why(self, path: Path) -> str:
        kind = self._config.model_type
        if (
            any("position_embeddings" in str(name) or "rot" in str(name) for name in path)
            or "args" in path
        ):
            rope = getattr(self._config, "rope_parameters", None) or {}
            kinds = sorted(
                {
                    str(part["rope_type"])
                    for part in (rope, *rope.values())
                    if isinstance(part, dict) and "rope_type" in part
                }
            )
            changing = [part for part in kinds if part in CHANGING]
            named = f" of type {' and '.join(changing or kinds)}" if kinds else ""
            return (
                f"rotary embeddings{named} ({kind}) are not supported: they depend on the "
                "longest sequence of a pass"
            )
        return (
            f"what transformers gives to the layers of a {kind} model ({named_path(path)}) "
            "depends on the other rows of a pass"
        )


def near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=SAME, atol=SAME))


def named_path(path: Path) -> str:
    return ".".join(map(str, path))
