"""Codes of a model's layers, cached by checkpoint and bits, a file a layer and one for its experts;
and a model of described layers with codes in place of matrices."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.devices.memory import HELD
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.coded import GROUP, KINDS, groups_of
from dovetail.workers.kernels.layer_plan import ExpertsPlan
from dovetail.workers.models.backends.experts import ExpertParts
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import LayerParts
from dovetail.workers.models.checkpoints.checkpoint import load_tensors, save_tensors
from dovetail.workers.models.substitutes.coded import pack_codes, pack_stack
from dovetail.workers.models.substitutes.quantize import (
    CPU,
    SCHEME,
    Codes,
    check_installed,
    from_bytes,
    quantise,
    to_bytes,
)
from dovetail.workers.progress import beat

Tell = Callable[[int, int], None]  # is called with the number of layers that have codes, and of all
PARTS = ("codes", "scales", "offsets")
TYPES = (torch.uint8, torch.float16, torch.float16)

Kept = Mapping[str, Tensor]  # the codes of matrices as a file has them: `PARTS` of each by its name

log = logging.getLogger(__name__)


class Substitutes:
    """The codes of a model's layers: made if missing, and cached in a folder."""

    def __init__(
        self,
        digest: str,
        bits: int,
        folder: Path | None,
        tell: Tell = lambda _done, _all: None,
        device: torch.device = CPU,
    ) -> None:
        """`digest`: the checkpoint's; `folder`: of all caches, or None; `device`: where hqq
        computes."""
        self.bits, self._tell, self._device = bits, tell, device
        key = hashlib.sha256(f"{digest}\0{SCHEME}\0{bits}".encode()).hexdigest()
        self.folder = None if folder is None else folder / key[:32]
        self.made = 0  # layers that had to be quantised
        self.seconds = 0.0  # the seconds that it took
        self.weights = 0

    def of_layer(self, layer: nn.Module, index: int, layers: int) -> Mapping[nn.Linear, Codes]:
        """Return the codes of every linear of a layer with its weights; `layers`: their number."""
        linears = {name: part for name, part in layer.named_modules() if type(part) is nn.Linear}
        shapes = {name: (part.out_features, part.in_features) for name, part in linears.items()}
        file = self._file("layer", index)
        if (kept := self._kept(file, shapes)) is None:
            kept = self._make(file, {name: part.weight.detach for name, part in linears.items()})
            self.made += 1
            self._tell(index + 1, layers)
        return {linears[name]: self._codes(kept, name, *shape) for name, shape in shapes.items()}

    def of_experts(self, parts: ExpertParts, index: int) -> Callable[[str, int], Codes]:
        """Return a function of stack and number that gives an expert's codes."""
        rows = [(name, expert) for name in parts.said.stacks for expert in range(parts.count)]
        of_stack = {name: tuple(parts.matrix(name, 0).shape) for name in parts.said.stacks}
        shapes = {f"{name}.{expert}": of_stack[name] for name, expert in rows}
        file = self._file("experts", index)
        matrices = {f"{name}.{one}": partial(parts.matrix, name, one) for name, one in rows}
        kept = self._kept(file, shapes) or self._make(file, matrices)
        return lambda name, expert: self._codes(kept, f"{name}.{expert}", *of_stack[name])

    def _file(self, what: str, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{what}-{index:03}.safetensors"

    def _kept(self, file: Path | None, shapes: Mapping[str, tuple[int, ...]]) -> Kept | None:
        """Return cached codes of these shapes; None without any, or with bad ones, which is
        logged."""
        if file is None or not file.exists():
            return None
        try:
            tensors = load_tensors(file)
            for name, (rows, inputs) in shapes.items():
                self._check(tensors, name, rows, inputs)
        except (CheckpointError, KeyError, ValueError) as error:
            log.warning("%s is made again: %s", file, error)
            return None
        return tensors

    def _check(self, tensors: Kept, name: str, rows: int, inputs: int) -> None:
        content, scales, offsets = found = [tensors[f"{name}.{what}"] for what in PARTS]
        groups = groups_of(inputs)
        shapes = [(rows, groups * GROUP * self.bits // 8), (rows, groups), (rows, groups)]
        if [tuple(part.shape) for part in found] != shapes:
            raise ValueError(f"{name} has other shapes")
        if (content.dtype, scales.dtype, offsets.dtype) != TYPES:
            raise ValueError(f"{name} has other types")
        if not (scales.isfinite().all() and offsets.isfinite().all()):
            raise ValueError(f"{name} has scales that are not numbers")

    def _codes(self, kept: Kept, name: str, _rows: int, inputs: int) -> Codes:
        content, scales, offsets = (kept[f"{name}.{what}"] for what in PARTS)
        return Codes(self.bits, inputs, from_bytes(content, self.bits), scales, offsets)

    def _make(self, file: Path | None, matrices: Mapping[str, Callable[[], Tensor]]) -> Kept:
        check_installed()
        start, found = time.monotonic(), dict[str, Tensor]()
        for name, matrix in matrices.items():
            beat()
            made = quantise(matrix(), self.bits, self._device)
            parts = to_bytes(made.codes, self.bits), made.scales, made.offsets
            found |= {f"{name}.{what}": part for what, part in zip(PARTS, parts, strict=True)}
            self.weights += made.codes.numel()
        HELD.give_back()  # quantising on a device needs much memory in fp32 for a moment
        self.seconds += time.monotonic() - start
        try:
            if file is not None:
                save_tensors(file, found)
        except OSError as error:  # a full or read-only disk costs the next start time, no more
            where = "" if file is None else file.parent
            log.warning("what was quantised cannot be saved in %s (%s)", where, error.strerror)
            self.folder = None
        return found

    def report(self, name: str) -> str:
        """Return what was done, in one line; empty if everything was cached."""
        if not self.made:
            return ""
        where = "not kept" if self.folder is None else f"saved in {self.folder}"
        return (
            f"{name}: quantised {self.made} layers, {self.weights / 1e6:.1f} million "
            f"weights, to {self.bits} bits in {self.seconds:.1f} s, {where}"
        )


class CodedLayers(Kernels):
    """Takes over layers as codes of their linears and experts."""

    def __init__(self, model: Any, kind: Kind, *, substitutes: Substitutes, **more: Any) -> None:
        """`kind`: of the head. `more`: arguments of the back end that computes the layers."""
        super().__init__(model, kind, **more)
        self._substitutes = substitutes
        self._codes: Mapping[nn.Linear, Codes] = {}

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        self._codes = self._codes_of(layer, index)
        taken = super().take_layer(layer, index)
        self._codes = {}
        return taken

    def _codes_of(self, layer: nn.Module, index: int) -> Mapping[nn.Linear, Codes]:
        return self._substitutes.of_layer(layer, index, self._model.config.num_hidden_layers)

    @property
    def _layers_kind(self) -> IntEnum:
        return KINDS[self._substitutes.bits]

    def _expert_plan(self, experts: ExpertParts) -> ExpertsPlan:
        codes = self._substitutes.of_experts(experts, self._taken)

        def packed(name: str) -> Sequence[PackedMatrix]:
            return pack_stack(
                lambda expert: codes(name, expert), experts.count, experts.biases(name)
            )

        return experts.plan(packed)

    def _arrange(self, parts: LayerParts) -> None:
        """Reorder codes from the order of the checkpoint's rows to that of the linears."""
        super()._arrange(parts)
        if not self._codes:
            return
        codes = dict(self._codes)
        if (gates := parts.gates) is not None:
            queries, others = gates.order.chunk(2)
            codes[gates.queries] = codes[gates.module].rows(queries)
            codes[gates.gates] = codes[gates.module].rows(others)
        for name, orders in parts.rows.items():
            for part, order in zip(parts.linears[name], orders, strict=True):
                if order is not None:
                    codes[part] = codes[part].rows(order)
        self._codes = codes

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        return pack_codes([self._codes[part] for part in linears], [part.bias for part in linears])
