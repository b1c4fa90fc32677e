"""Attention over latents by torch: the kernels' function up to rounding
(`kernels/native/latent.inl`)."""

import torch
from torch import Tensor

from dovetail.workers.kernels.layer_plan import LayerPlan, Norm, NormKind
from dovetail.workers.models.backends.blob import numbered
from dovetail.workers.models.backends.device.experts import Multiply, plain
from dovetail.workers.models.backends.device.parts import DeviceNorm
from dovetail.workers.models.backends.device.rows import Seen


class DeviceLatents:
    """Attention over latents: queries pass through the matrix of keys, results through that of
    values."""

    def __init__(self, plan: LayerPlan, device: torch.device) -> None:
        assert plan.latent is not None
        self._plan, self._own = plan, plan.latent

        def norm(weight: Tensor) -> DeviceNorm:
            return DeviceNorm(NormKind.RMS, Norm(weight), self._own.epsilon, device)

        self._latent_norm = norm(self._own.latent_norm)
        query_norm = self._own.query_norm
        self._query_norm = plain if query_norm is None else norm(query_norm)

    def run(self, rows: Seen, given: Tensor, multiply: Multiply) -> Tensor:
        """Return [T, heads value_dim] of what the first matrix gave [T, ...]; caches latents and
        keys."""
        plan, own = self._plan, self._own
        first = given.shape[1] - plan.head_dim
        queries, latent, key = torch.split(
            given, [first, own.rank, plan.head_dim - own.rank], dim=1
        )
        if own.query_up is not None:
            queries = multiply("query_up", self._query_norm(queries))
        heads, key = queries.reshape(len(given), plan.heads, -1), key.unsqueeze(1)
        if plan.rotary is not None:
            assert rows.turn is not None
            heads = rows.turn.grow(heads, plan.rotary)
            key = rows.turn.of(key, plan.rotary)
        ends = heads[..., own.plain :]
        if plan.rotary is not None and rows.turn is not None:
            ends = rows.turn.of(ends, plan.rotary)
        absorbed = [
            multiply(numbered("key_up", head), heads[:, head, : own.plain].contiguous())
            for head in range(plan.heads)
        ]
        query = torch.cat([torch.stack(absorbed, dim=1), ends], dim=-1).transpose(0, 1)
        row = torch.cat([self._latent_norm(latent), key.squeeze(1)], dim=-1).unsqueeze(0)
        mixed = rows.attend(plan, query, row, row)
        values = [
            multiply(numbered("value_up", head), mixed[:, head].contiguous())
            for head in range(plan.heads)
        ]
        return torch.cat(values, dim=1)
