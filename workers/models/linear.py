"""The seam for linears: how y = x W^T + b is computed on this machine.

On a CPU, fp32 weights are laid out once as oneDNN likes them: a pass over 16 rows then costs about twice a pass over one, where torch's own linear
takes four times as long. Elsewhere, and for small matrices, torch's linear stays. The choice follows from the machine, the shape and a self-test,
never from a timing, so that the same machine computes the same function every time. Knows single matrices, not models.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

LEAST_ROWS = 4
"""oneDNN takes longer for 1 to 3 rows than for 4 (fp32, 7B shapes on Zen 4: 54 ms against 40 ms), so fewer are padded."""
SMALLEST_PACKED = 1 << 17
"""Weights of fewer elements stay plain: their product takes less than the call's own overhead (256 x 256, 1 row: 5 us plain, 19 us packed, equal at
704 x 256, Zen 4)."""
BATCH_HINT = 16
TOLERANCE = 1e-5
"""Largest accepted difference to torch's linear relative to the largest output; rounding alone gives 1e-6."""


class PackedLinear(nn.Module):
    """A linear whose fp32 weight [out, in] exists only in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), BATCH_HINT)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count < LEAST_ROWS:
            rows = pad(rows, (0, 0, 0, LEAST_ROWS - count))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return y[:count].view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> str:
    """Replace the linears of `model` in place by the fastest kind that computes the same here; returns what was chosen, in a word."""
    if not packing_works():
        return "plain"
    chosen = "plain"
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and _gains(module.weight):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(module.weight, module.bias))
            chosen = "onednn-packed"
    return chosen


def _gains(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST_PACKED


def packing_works() -> bool:
    """Whether oneDNN's packed linear exists in this build of torch and agrees with torch's own, padded and not, with a bias and without."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(96, 80, generator=generator), torch.randn(96, generator=generator)
    with torch.inference_mode():
        return all(_agrees(weight, b, torch.randn(rows, 80, generator=generator)) for rows in (1, LEAST_ROWS, 16) for b in (None, bias))


def _agrees(weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
    try:
        y = PackedLinear(weight, bias)(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    expected = linear(x, weight, bias)
    return bool((y - expected).abs().max() <= TOLERANCE * expected.abs().max())
