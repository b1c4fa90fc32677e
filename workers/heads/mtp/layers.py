"""Opens MTP layers as a head: the layer is loaded as a model of one layer, by the code that loads
the target, and computed by the target's engines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.devices.base import Device
from dovetail.workers.heads.checkpoint import Target, read_shared
from dovetail.workers.heads.engines import TYPES, HeadKernels, HeadTorch, Rotation, halves
from dovetail.workers.heads.head import Head
from dovetail.workers.heads.mtp.kind import MtpSpec
from dovetail.workers.heads.parts import HeadCheckpoint
from dovetail.workers.heads.reduced.rows import FrequentRows
from dovetail.workers.heads.spec import FeatureType
from dovetail.workers.kernels.layer import LayerPass
from dovetail.workers.models.assembly import assembled
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.loader import open_skeleton
from dovetail.workers.models.checkpoints.quantised.searched import in_blocks
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import resident
from dovetail.workers.models.mtp import MtpLayer, mtp_layer
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.models.wanted import Wanted, type_of

MATRICES = {"stored": "auto", "file": "auto"}
"""Types of a layer's weights -> those of a head's other matrices, if different."""


class MtpKernels(HeadKernels):
    """The layer and the matrices around it, on a CPU."""

    raw = False  # True if later levels read the layer's result before its norm

    def __init__(self, model: Kernels, *, weights: str) -> None:
        super().__init__(Rotation(torch.empty(0), 1.0), weights=MATRICES.get(weights, weights))
        self.norms = model.described.norms.kind
        self._model, self._plans = model, list(model.plans)
        run = self._run_of
        self._halves = [halves(plan, run, _free_rows) for plan in self._plans]

    @property
    def final_norm(self) -> Product:
        return self._model.norm

    def see(
        self, positions: Tensor, segments: Sequence[Segment], inputs: Tensor | None = None
    ) -> LayerPass:
        return super(HeadKernels, self).see(positions, segments, inputs)

    def layers(self, states: Tensor, seen: LayerPass, rows: Tensor | None) -> Tensor:
        """Return states [R, H] after the layer, for the selected `rows`."""
        *layers, last = self._halves
        for layer in layers:
            states = layer(states, seen)
        return last(states, seen, rows)


class MtpTorch(HeadTorch):
    """The layer and the matrices around it, on a device."""

    raw = False

    def __init__(self, model: Kernels, *, weights: str, device: torch.device) -> None:
        kind = weights if weights in TYPES or weights in ("int8", "int4") else "fp16"
        super().__init__(
            Rotation(torch.empty(0), 1.0),
            weights=kind,
            device=device,
            cached=torch.float32,
            table=TYPES.get(kind, torch.float16),
        )
        self.norms = model.described.norms.kind
        self._model = model

    @property
    def ours(self) -> None:
        """Return None: levels are not captured."""
        return None

    @property
    def final_norm(self) -> Product:
        return self._model.norm

    def open_cache(self, capacity: int) -> Cache:
        return self._model.new_cache(capacity)

    def see(
        self, positions: Tensor, segments: Sequence[Segment], inputs: Tensor | None = None
    ) -> Any:
        return positions, segments

    def layers(self, states: Tensor, seen: Any, rows: Tensor | None) -> Tensor:
        states = self._model.run(states, *seen)
        return states if rows is None else states[rows]


class MtpHead(Head):
    """An MTP layer, ready to compute."""

    _engine: MtpKernels | MtpTorch

    def __init__(self, *parts: Any, probed: bool, **more: Any) -> None:
        """`probed`: False if it is not known which of its results later levels read."""
        super().__init__(*parts, **more)
        self.probed = probed

    @property
    def raw(self) -> bool:
        """Return whether later levels read the layer's result before its norm."""
        return self._engine.raw

    @raw.setter
    def raw(self, raw: bool) -> None:
        self._engine.raw = raw

    def normed(self, states: Tensor) -> Tensor:
        """Return results [T, H] after the layer's norm."""
        normed: Tensor = self._engine.final_norm(states)
        return normed


def _free_rows(count: int) -> LayerPass:
    """Return `count` rows for an MLP, which needs no cache."""
    return LayerPass(torch.zeros(count, dtype=torch.int64), [])


def open_mtp(
    source: str,
    *,
    target: str,
    weights: str,
    device: Device,
    context: int | None = None,
    reduced: FrequentRows | None = None,
) -> MtpHead:
    """Return the MTP layer of `source`, the target itself or a file of such a layer; raise
    `CheckpointError` for one that is missing, damaged or not supported. `weights`: a type of
    `models/wanted.py`; `context`: the longest sequence asked for.
    `reduced`: chooses the rows of the output head; None: all."""
    layer = mtp_layer(find_folder(target), None if source == target else find_folder(source))
    theirs = Target(target)
    embedding, output = _tables(layer, theirs)
    with layer.checkpoint(embedding, context) as checkpoint:
        model = _load(checkpoint, weights, device)
    kernel = model.back_end
    assert isinstance(kernel, Kernels)
    added = 1.0 if kernel.described.norms.plus_one else 0.0
    head = HeadCheckpoint(
        layer.source,
        layer.digest,
        "",
        _spec(layer, theirs, kernel, model.context, embedding.dtype),
        Rotation(torch.empty(0), 1.0),
        {
            "fusion": layer.fusion,
            "embedding_norm": layer.embedding_norm.float() + added,
            "state_norm": layer.state_norm.float() + added,
        },
        embedding,
        output,
        None,
    )
    engine = (
        MtpKernels(kernel, weights=weights)
        if device.is_cpu
        else MtpTorch(kernel, weights=weights, device=device.torch_device)
    )
    rows = None if reduced is None else reduced.choose(head, on_cpu=device.is_cpu)
    tokens = None if rows is None else torch.from_numpy(rows)
    probed = layer.config["model_type"] != "deepseek_v3"
    return MtpHead(head, engine, weights=model.weights, rows=tokens, probed=probed)


def _tables(layer: MtpLayer, target: Target) -> tuple[Tensor, Tensor]:
    """Return embedding and output head [V, H]: the layer's copies, else the target's."""
    shape = target.shape.vocabulary_size, target.shape.width
    found = {"embed_tokens": layer.embedding, "shared_head.head": layer.output}
    for name, stored in found.items():
        if stored is not None and stored.shape != shape:
            raise CheckpointError(
                f"{layer.source}: tensor {layer.layout.layer}{name}.weight has the shape "
                f"{list(stored.shape)}, not that of the target's embedding"
            )
    own, head = layer.embedding, layer.output
    embedding = target.embedding() if own is None else read_shared(own, "embed_tokens")
    output = target.output(embedding) if head is None else read_shared(head, "shared_head.head")
    return embedding, output


def _spec(
    layer: MtpLayer, target: Target, kernel: Kernels, context: int, embedded: torch.dtype
) -> MtpSpec:
    noted, shape = kernel.noted[0], target.shape
    wide = torch.bfloat16 in (embedded, layer.fusion.dtype)
    dtype: FeatureType = "bfloat16" if wide else "float16"
    return MtpSpec(
        kind="mtp",
        hidden=shape.width,
        target_width=shape.width,
        heads=noted.heads,
        kv_heads=noted.kv_heads,
        head_dim=noted.head_dim,
        intermediate=0,
        vocabulary_size=shape.vocabulary_size,
        draft_vocabulary=shape.vocabulary_size,
        context=context,
        dtype=dtype,
        epsilon=kernel.described.norms.epsilon,
        normed=layer.normed,
        logit_scale=kernel.logit_scale,
    )


def _load(checkpoint: Checkpoint, weights: str, device: Device) -> LanguageModel:
    """Return the model of the layer alone, which is proved as a target is."""
    wanted = Wanted(weights, type_of(weights, checkpoint), "kernels", cache="fp32")
    if not device.is_cpu:
        found = resident(checkpoint, wanted, device)
        if isinstance(found, str):
            raise checkpoint.refusal(
                f"its MTP layer is not computed on {device.name}: {found}; set draft.device to "
                "'cpu'"
            )
        return found
    if why_not := kernels.why_not():
        raise checkpoint.refusal(
            f"its MTP layer needs the C++ kernels, and {why_not}; choose another draft"
        )
    try:
        skeleton = in_blocks(open_skeleton(checkpoint), checkpoint, wanted.weights)
        return assembled(skeleton, checkpoint, wanted, kernels=True, choice="an MTP layer")
    except UnsupportedError as error:
        raise checkpoint.refusal(
            f"its MTP layer cannot be computed: {error}; choose another draft"
        ) from error
