"""The library back end: transformers' modules, with linears laid out for torch on a CPU, and
attention by torch over our cache. A token's logits depend on the other rows of a pass only by
rounding."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.protocol.experts import Routing
from dovetail.workers.models import attention
from dovetail.workers.models.attention import Masks, Noted
from dovetail.workers.models.backends.embedding import widen_embeddings
from dovetail.workers.models.backends.linear import PackedLinear, Selection
from dovetail.workers.models.cache import CACHE_NAMES, KVCache
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.parity.following import (
    EAGER,
    UnprovableError,
    foreign,
    implementation,
    short_text,
    stand_in,
)
from dovetail.workers.models.segment import PROMPT_ROWS, Segment
from dovetail.workers.models.states import ModelPass, keeping
from dovetail.workers.models.timing import Part, timing_modules

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle

LAYER_TOLERANCE = 2e-4  # the tolerance of a layer's update, in fp32; rounding gives 1e-6


def transformers_pass(model: Any, asked: ModelPass, **given: Any) -> Tensor:
    """Logits [R, V] by transformers' own forward; `given` is passed on to the layers."""
    device = model.get_input_embeddings().weight.device
    output = model(
        input_ids=asked.tokens.to(device).unsqueeze(0),
        position_ids=asked.positions.to(device).unsqueeze(0),
        use_cache=False,
        logits_to_keep=0 if asked.rows is None else asked.rows.to(device),
        **given,
    )
    logits: Tensor = output.logits[0]
    return logits


class Library:
    """Takes over the layers of a model one by one, then the rest. A `BackEnd`."""

    backend = "library"
    prompt_rows = PROMPT_ROWS
    reads_apart = 0
    routing: Routing | None = None  # the experts of a pass; None: they are not counted

    def __init__(
        self,
        selection: Selection | None,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        oracle: "Oracle | None" = None,
    ) -> None:
        """`oracle`: proves each layer; None: no proof is needed."""
        self._oracle = oracle
        self._noted: list[Noted] = []  # the attention that each proved layer asks for
        self.kernels = "plain" if selection is None else selection.name
        self._selection, self._device, self._dtype = selection, device, dtype

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Return the layer for computing; its linears are packed, and the originals dropped."""
        self.prove(layer, index)
        self._pack(layer)
        if self._selection is not None:
            _widen(layer)
        return layer.to(self._device)

    def prove(self, layer: nn.Module, index: int) -> None:
        """`UnprovableError` if our attention changes a layer, which has its numbers on the CPU."""
        if self._oracle is None:
            return
        what, noted = (
            f"layer {index} ({type(layer).__name__})",
            prove_layer(self._oracle, layer, index),
        )
        self._noted.append(noted)
        if noted.shape != self._noted[0].shape:
            raise UnprovableError(f"the heads of {what} differ from those of earlier layers")
        if noted.value_dim != noted.head_dim:
            raise UnprovableError(f"{what} has values of another width than keys")

    def finish(self, model: Any) -> None:
        self._pack(model)
        if self._device.type == "cpu":
            widen_embeddings(model)
        self._model = model.to(self._device)
        self._decoder_layers = decoder_layers(self._model)[1]
        self._layers = len(self._decoder_layers)
        heads, self._kv_heads, self._head_dim = (
            self._noted[0].shape if self._noted else _configured_heads(model.config)
        )
        self._timed = (
            _parts(self._model, self._decoder_layers) if self._device.type == "cpu" else ()
        )
        self._masks = Masks(groups=heads // self._kv_heads, device=self._device, dtype=self._dtype)

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(
            layers=self._layers,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            capacity=capacity,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def cache(self) -> str:
        """Return the type of keys and values, which is the type of the states."""
        return CACHE_NAMES[self._dtype]

    def compute(self, asked: ModelPass) -> Tensor:
        layers, blocks = tuple(self._decoder_layers), attention.arrange(asked.segments, self._masks)
        with keeping(self._model, layers, asked.kept), timing_modules(self._timed):
            return transformers_pass(self._model, asked, blocks=blocks)

    def _pack(self, module: nn.Module) -> None:
        if self._selection is None:
            return
        for name, part in list(module.named_modules()):
            if type(part) is nn.Linear:
                module.set_submodule(name, self._selection.pack(part.weight, part.bias))
                part.weight = nn.Parameter(
                    torch.empty(0), requires_grad=False
                )  # no reference to the original remains


def _widen(layer: nn.Module) -> None:
    for part in layer.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dtype in (torch.float16, torch.bfloat16):
                part.register_parameter(name, nn.Parameter(parameter.float(), requires_grad=False))


def _configured_heads(config: Any) -> tuple[int, int, int]:
    heads: int = config.num_attention_heads
    return (
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


@torch.inference_mode()
def prove_layer(oracle: "Oracle", layer: nn.Module, index: int) -> Noted:
    """Return a layer's call of attention; `UnprovableError` if it differs from transformers' own
    with ours, in fp32 at every position of the oracle."""
    what = f"layer {index} ({type(layer).__name__})"
    own, states = stand_in(layer, {}), oracle.states(index)
    notes: list[Noted] = []
    with foreign(UnprovableError, f"{what} cannot be computed here"):
        found = oracle.run_ours(own, index, states, lambda noted, *_: notes.append(noted))
        expected = oracle.run_eager(own, index, states)
    if not notes:
        raise UnprovableError(f"{what} computes attention by itself, which token trees replace")
    if len(notes) != 1:
        raise UnprovableError(f"{what} computes {len(notes)} attentions, but only one is supported")
    oracle.check_window(index, notes[0].window)
    ours = f"{what} with our attention differs"
    oracle.compare(UnprovableError, ours, expected, found, LAYER_TOLERANCE, states=states)
    return notes[0]


@torch.inference_mode()
def prove_whole(model: Any, back_end: Library, context: int, tolerance: float) -> None:
    """`UnprovableError` if the model's logits, in two passes shared with another session, differ
    from transformers' by more than `tolerance` (relative)."""
    count = short_text(model.config.to_dict(), context)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(
        model.get_input_embeddings().weight.shape[0], (count,), generator=generator
    )
    positions = torch.arange(count)
    with implementation(model, EAGER):
        expected = transformers_pass(model, ModelPass(tokens, positions)).float().cpu()
    cut, stranger = count // 2, min(3, count)
    cache, other = back_end.new_cache(count), back_end.new_cache(stranger)
    passes = [
        (
            torch.cat([tokens[:stranger].flip(0), tokens[:cut]]),
            torch.cat([positions[:stranger], positions[:cut]]),
            [(other, 0, stranger), (cache, 0, cut)],
        ),
        (tokens[cut:], positions[cut:], [(cache, cut, count - cut)]),
    ]
    found = []
    for rows, places, segments in passes:
        parts = [Segment(*segment) for segment in segments if segment[2]]
        logits = back_end.compute(ModelPass(rows, places, parts)).float().cpu()
        found.append(logits[-segments[-1][2] or len(rows) :])
        cache.keep(range(cache.length, cache.length + segments[-1][2]), segments[-1][2])
    norms = expected.norm(dim=-1)
    shares = (torch.cat(found) - expected).norm(dim=-1) / norms.clamp(
        min=1e-3 * float(norms.max())
    )  # a padding token may have none
    if wrong := (~(shares <= tolerance)).nonzero().flatten().tolist():
        raise UnprovableError(
            "the model with our attention differs from transformers' at position "
            f"{wrong[0]} by {float(shares[wrong[0]]):.1e} of its logits"
        )


def _parts(model: Any, layers: nn.ModuleList) -> Sequence[tuple[Part, nn.Module]]:
    """Return the matrices of layers and head that can be timed."""
    kinds = (nn.Linear, PackedLinear)
    linears: list[tuple[Part, nn.Module]] = [
        ("linears", part) for layer in layers for part in layer.modules() if isinstance(part, kinds)
    ]
    return [*linears, ("head", model.get_output_embeddings())]
