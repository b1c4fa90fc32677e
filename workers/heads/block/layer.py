"""A decoder layer over the rows of a block, and the convolution of DFlash-2 around its halves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.heads.block.config import BlockSpec
from dovetail.workers.heads.parts import HeadParts
from dovetail.workers.models.backends.device.products import Product


class Convolution:
    """A convolution along a block with kernels that depend on the row: a base, plus a product of
    the row for each group of numbers. Its first side is applied to the input of a sublayer, its
    second to the output. Rows before the block count as 0."""

    def __init__(self, parts: HeadParts, name: str) -> None:
        base = parts.checkpoint.tensors[f"{name}.base_kernel"]
        self._base = base.to(parts.engine.device, torch.float32)  # [2, taps, H]
        self._project: Product = parts.linear(f"{name}.kernel_projection")
        self._block = parts.checkpoint.spec.block

    def kernels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kernels [T, taps, H] of both sides for the normed inputs [T, H]."""
        sides, taps, hidden = self._base.shape
        groups = self._project(rows).view(len(rows), sides, taps, -1)
        kernels = self._base + groups.repeat_interleave(hidden // groups.shape[-1], dim=-1)
        return kernels[:, 0], kernels[:, 1]

    def apply(self, kernels: Tensor, rows: Tensor) -> Tensor:
        """Return the convolution of rows [T, H]."""
        blocks = rows.view(-1, self._block, rows.shape[1])
        mixed = torch.zeros_like(rows)
        for tap in range(min(kernels.shape[1], self._block)):
            shifted = torch.zeros_like(blocks)
            shifted[:, tap:] = blocks[:, : self._block - tap]
            mixed += kernels[:, tap] * shifted.view(rows.shape)
        return mixed


class BlockLayer:
    """A decoder layer; `convolved`: with convolutions around attention and MLP."""

    def __init__(self, parts: HeadParts, index: int, *, convolved: bool = False) -> None:
        layer, spec = f"layers.{index}.", parts.checkpoint.spec
        assert isinstance(spec, BlockSpec)
        self._scale, self._gated = spec.value_scale, parts.engine.gated
        self._norms = [
            parts.norm(f"{layer}{name}") for name in ("input_layernorm", "post_attention_layernorm")
        ]
        self._attention = parts.layer(layer, index, mlp=False, given=spec.hidden)
        self._up = parts.linear(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj")
        self._down = parts.linear(f"{layer}mlp.down_proj")
        self._convolutions = [
            Convolution(parts, f"{layer}{name}") if convolved else None
            for name in ("attention_conv", "mlp_conv")
        ]

    def place(self, seen: Any, context: Tensor) -> None:
        """Cache the keys and values of rows of the context [T, H]."""
        assert self._attention.place is not None
        self._attention.place(seen, context)

    def __call__(self, states: Tensor, seen: Any) -> Tensor:
        """Return the states [T, H] of a block after the layer."""

        def attend(rows: Tensor) -> Tensor:
            mixed = torch.zeros_like(rows)
            self._attention.attend(seen, mixed, rows)
            return mixed if self._scale == 1.0 else mixed * self._scale

        def feed(rows: Tensor) -> Tensor:
            return self._down(self._gated(self._up(rows)))

        sublayers: Sequence[Product] = attend, feed
        for norm, convolution, run in zip(self._norms, self._convolutions, sublayers, strict=True):
            rows = norm(states)
            if convolution is None:
                states = states + run(rows)
                continue
            before, behind = convolution.kernels(rows)
            states = states + convolution.apply(behind, run(convolution.apply(before, rows)))
        return states
