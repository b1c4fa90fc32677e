"""Loads a checkpoint as a transformers model on the CPU: a skeleton without weights first, then one
part after the other, so that at most one part is in memory twice. Missing tensors, which
transformers would fill at random, and remote code are errors."""

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.memory import read_room
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.kernels.exact import ExactPowers
from dovetail.workers.models import attention, transformers
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.composite import renaming
from dovetail.workers.models.checkpoints.configured import (
    built,
    configured,
    for_text,
    quiet,
    read_config,
    said_by,
    with_buffers,
)
from dovetail.workers.models.checkpoints.context import limit_context
from dovetail.workers.models.checkpoints.files import damaged, read_json
from dovetail.workers.models.checkpoints.gguf.rows import Pile, Rows, keep_rows, rows_of
from dovetail.workers.models.checkpoints.gguf.tensors import name_in_file
from dovetail.workers.models.checkpoints.namings import NAMINGS
from dovetail.workers.models.checkpoints.pieces import (
    STACK,
    Pieces,
    UnreadStack,
    leave_unread,
    others,
    within_fp32,
)
from dovetail.workers.models.checkpoints.tables import BlockEmbedding, is_table, scale_of
from dovetail.workers.progress import count_bytes, loading

log = logging.getLogger(__name__)


def refuse_beyond(source: str, size: int, what: str) -> None:
    """`CheckpointError` if `size` more bytes, for `what`, exceed the free memory."""
    room = read_room()
    if room is not None and size > room.size + room.swap:
        found = f"there are {room.size / 1e9:.3g} GB {room.bound}"
        raise CheckpointError(
            f"{source}: {what} takes {size / 1e9:.3g} GB of memory while it is loaded, and "
            f"{found}: use a smaller model, or free memory"
        )


Read = Callable[[str], Tensor]  # the tensor of a name, in the type it is stored in


@dataclass(frozen=True)
class Types:
    """The types that a model's weights get when read; None: as stored."""

    linear: torch.dtype | None
    table: torch.dtype | None  # the type of embeddings
    rest: torch.dtype | None = torch.float32
    blocks: bool = False  # True if matrices and tables stay as a GGUF file has them


@dataclass(frozen=True)
class Skeleton:
    """A transformers model with shapes but no weights yet, and their source."""

    model: Any
    read: Read
    transposed: frozenset[str]  # weights that the checkpoint holds as [in, out]
    buffers: frozenset[str] = frozenset()  # buffers that the checkpoint holds
    stored: Mapping[str, str] | None = None  # parameter -> tensor of the checkpoint; None: several
    experts: Callable[[str], UnreadStack] | None = None  # reads experts one by one; None: together
    tied: Mapping[str, str] | None = None  # tensor -> its stand-in, for pieces; None: none
    rows: Callable[[str, nn.Module], Rows | Pile | None] | None = None
    """Return the blocks of a module's weight; None if there are none."""
    size_bytes: int = 0  # the bytes of all of it where there is no checkpoint

    def fill(
        self,
        module: nn.Module,
        prefix: str,
        types: Types,
        *,
        but: nn.Module | None = None,
        one_by_one: bool = False,
    ) -> None:
        """Fill a module's empty parameters, named from `prefix`, without those of `but`.
        `one_by_one`: leave experts to be read singly (`leave_unread`)."""
        later = set() if but is None else set(but.modules())
        blocks: dict[str, Rows | Pile] = {}
        tensors: dict[str, nn.Parameter] = {}
        for path, part in list(module.named_modules()):
            if part in later or (types.blocks and self._fill_blocks(module, prefix, path, blocks)):
                continue
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.is_meta and not (name == "weight" and rows_of(part) is not None):
                    full = ".".join(filter(None, (prefix, path, name)))
                    if one_by_one and STACK.match(full) and self.experts is not None:
                        leave_unread(part, name, self.experts(full), blocks=types.blocks)
                        continue
                    own = self._own(full) if types.linear == types.table else full
                    if own not in tensors:  # a tied head and its table are one tensor
                        tensors[own] = nn.Parameter(self._tensor(full, part, types), False)
                    part.register_parameter(name, tensors[own])
            for name, _ in part.named_buffers(recurse=False):
                full = ".".join(filter(None, (prefix, path, name)))
                if full in self.buffers:
                    part.register_buffer(name, self.read(full).float())

    def _own(self, name: str) -> str:
        """Return a parameter's name in the checkpoint, the same for parameters that are tied."""
        return ((self.stored or {}) if self.tied is None else self.tied).get(name, name)

    def _fill_blocks(
        self, module: nn.Module, prefix: str, path: str, found: dict[str, Rows | Pile]
    ) -> bool:
        """Give a part its weight as blocks, if there are any, and return whether it is complete.
        Embeddings are replaced; `found`: rows that tied parts share."""
        full = ".".join(filter(None, (prefix, path, "weight")))
        part: Any = module.get_submodule(path)
        able = ((table := is_table(part)) or type(part) is nn.Linear) and rows_of(part) is None
        if self.rows is None or not able:
            return False
        rows = found.get(self._own(full)) or self.rows(full, part)
        if rows is None:
            return False
        found[self._own(full)] = rows
        if table and isinstance(rows, Rows):
            module.set_submodule(path, BlockEmbedding(rows, scale_of(part)))
            return True
        shape, dtype = part.weight.shape, part.weight.dtype
        part.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False)
        keep_rows(part, rows)
        return part.bias is None

    def _tensor(self, name: str, part: nn.Module, types: Types) -> Tensor:
        tensor = self.read(name)
        if name in self.transposed:
            tensor = tensor.t()
        wanted = types.rest if tensor.ndim < 3 else None  # the experts of a layer
        if tensor.ndim == 2:
            wanted = types.linear if isinstance(part, nn.Linear) else types.table
        tensor = within_fp32(tensor) if wanted is None else tensor.to(wanted)
        return tensor.contiguous()


def open_skeleton(checkpoint: Checkpoint) -> Skeleton:
    """Return a checkpoint's model, to be filled. `CheckpointError` for missing tensors, and
    superfluous ones of GGUF. Where transformers renames or rearranges tensors, it has loaded all in
    fp32."""
    model = configured(checkpoint)
    if model.config.model_type in NAMINGS:
        return pieced_skeleton(model, checkpoint, _tied(model), checked=False)
    if not _maps_one_to_one(model, checkpoint):
        if checkpoint.is_coded:  # what is decoded here has the model's tensors one by one
            missing = checkpoint.own_names(sorted(_missing(model, checkpoint)))
            such = f", such as {missing[0]}" if missing else ""
            raise damaged(f"{checkpoint.source} lacks tensors of its architecture{such}")
        whole = load_transformers(checkpoint, torch.float32)
        linearise(whole)
        return Skeleton(whole, checkpoint.read, frozenset())
    tied = _tied(model)
    _settle_unused(model, checkpoint, set(checkpoint.tensors) - set(model.state_dict()))
    stored = {
        name: name if name in checkpoint.tensors else tied[name]
        for name, _ in model.named_parameters(remove_duplicate=False)
    }
    transposed = linearise(model)
    return stored_skeleton(model, checkpoint, stored, transposed)


def stored_skeleton(
    model: Any, checkpoint: Checkpoint, stored: Mapping[str, str], transposed: frozenset[str]
) -> Skeleton:
    """Return the skeleton of a model whose parameters are tensors of a checkpoint one by one."""

    def rows(name: str, part: Any) -> Rows | Pile | None:
        meant = part.weight.is_meta
        return checkpoint.rows(stored[name], transposed=name in transposed) if meant else None

    return Skeleton(
        model, lambda name: checkpoint.read(stored[name]), transposed, stored=stored, rows=rows
    )


def pieced_skeleton(
    model: Any, checkpoint: Checkpoint, tied: Mapping[str, str], *, checked: bool
) -> Skeleton:
    """Return the skeleton of a model read from pieces; unless these have been `checked`,
    `CheckpointError` for bad ones."""
    tensors = checkpoint.tensors
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name in tensors or tied.get(name) not in tensors
    }
    pieces = Pieces(NAMINGS[model.config.model_type], tensors, shapes)
    if not checked:
        pieces.refuse_misshapen(checkpoint.folder, checkpoint.own_names)
        _settle_unused(model, checkpoint, pieces.superfluous())
    one_by_one = all(stored.reads_one for stored in tensors.values() if len(stored.shape) > 2)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name: pieces.of(name if name in shapes else tied[name]) for name in names}
    whole = set(names) == set(model.state_dict()) and all(len(of) == 1 for of in found.values())
    return Skeleton(
        model,
        lambda name: pieces.read(name if name in shapes else tied[name]),
        frozenset(),
        frozenset(shapes) - set(names),
        {name: of[0] for name, of in found.items()} if whole else None,
        experts=pieces.unread if one_by_one else None,
        rows=lambda name, _: checkpoint.rows(*found[name], transposed=False),
        tied={name: other for name, other in tied.items() if name not in shapes},
    )


def load_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Return the whole transformers model on the CPU with our attention; refuses missing
    tensors."""
    skeleton = open_skeleton(checkpoint) if checkpoint.is_coded else None
    config = configured(checkpoint).config if skeleton is None else None
    held = sum(math.prod(stored.shape) for stored in checkpoint.tensors.values()) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    refuse_beyond(checkpoint.source, held, f"all of it as {name}")
    size = sum(stored.size_bytes for stored in checkpoint.tensors.values())
    if skeleton is not None:
        with loading("loading", size):
            skeleton.fill(skeleton.model, "", Types(dtype, dtype, dtype))
        skeleton.model.tie_weights()
        return skeleton.model.to(dtype).eval()
    with (
        _refusing(checkpoint, config),
        quiet(),
        ExactPowers(),
        torch.inference_mode(False),
        loading("loading", size) as count,
    ):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            config=config,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            key_mapping=dict(renaming(read_json(checkpoint.folder / "config.json"))) or None,
        )
        count(size)
    checkpoint.refuse_changed()
    if missing := sorted(info["missing_keys"]):
        text = f"lacks tensor {missing[0]}{others(missing)}, which its config.json calls for"
        raise damaged(f"{checkpoint.source} {text}")
    _report_superfluous(checkpoint, info["unexpected_keys"])
    model.requires_grad_(False)
    return for_text(model).eval()


@contextlib.contextmanager
def _refusing(checkpoint: Checkpoint, config: Any) -> Iterator[None]:
    """Turn transformers' errors about tensors into a `CheckpointError` of one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) or is_out_of_memory(error):
            raise
        why = f": {said}" if (said := said_by(error)) else ""
        text = (
            "transformers cannot load these tensors as a model of type "
            f"{config.model_type}{why}; fetch config.json and weights again, of one revision"
        )
        raise CheckpointError(f"{checkpoint.source}: {text}") from error


def _settle_unused(model: Any, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Report unused tensors, unless transformers lists them as harmless. `CheckpointError` for
    GGUF, whose configuration follows from its tensors."""
    names = sorted(names)
    if names and (own := name_in_file(checkpoint.tensors[names[0]])) is not None:
        text = f"tensor {own} is not used by a model of type {model.config.model_type}"
        raise checkpoint.refusal(f"{text}; use another file of this model, or its safetensors")
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    _report_superfluous(
        checkpoint,
        [name for name in names if not any(re.search(pattern, name) for pattern in ignored)],
    )


def _report_superfluous(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    if unexpected := sorted(names):
        log.warning(
            "%s has %d tensors that the model does not use, such as %s",
            checkpoint.source,
            len(unexpected),
            unexpected[0],
        )


def _maps_one_to_one(model: Any, checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has every tensor of the model, by its name or a tied one's,
    unchanged."""
    changes = [
        change
        for kind in (model.config.model_type, type(model).__name__)
        for change in transformers.get_checkpoint_conversion_mapping(kind) or ()
    ]
    if any(hasattr(change, "operations") for change in changes) or any(
        re.search(pattern, name)
        for change in changes
        for pattern in change.source_patterns
        for name in checkpoint.tensors
    ):
        return False
    if any(
        buffer is None or bool(buffer.isnan().any())
        for module in model.modules()
        for buffer in module._buffers.values()
    ):
        return False
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return set(parameters) == set(model.state_dict()) and not _missing(model, checkpoint)


def _missing(model: Any, checkpoint: Checkpoint) -> set[str]:
    tied, tensors = _tied(model), checkpoint.tensors
    return {
        name for name in model.state_dict() if name not in tensors and tied.get(name) not in tensors
    }


def _tied(model: Any) -> dict[str, str]:
    """Map each tied tensor to its twin: a checkpoint holds either."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {**{source: target for target, source in tied.items()}, **tied}


def linearise(model: Any) -> frozenset[str]:
    """Replace GPT-2's linears, whose weights are [in, out]; return the names of those weights."""
    transposed = set()
    for name, module in list(model.named_modules()):
        if isinstance(module, transformers.Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, device="meta")
            if not module.weight.is_meta:
                linear.weight = nn.Parameter(module.weight.t().contiguous(), requires_grad=False)
                linear.bias = module.bias
            model.set_submodule(name, linear.requires_grad_(False))
            transposed.add(f"{name}.weight")
    return frozenset(transposed)


def linear_shapes(model: Any) -> list[tuple[int, int]]:
    """[out, in] of every linear."""
    return [
        (module.out_features, module.in_features)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]


def expert_shapes(model: Any) -> list[tuple[int, int]]:
    """Return [out, in] of all experts' linears, from stacks [experts, out, in] or DBRX's fields."""
    if (flat := getattr(model.config, "ffn_config", None)) is not None:
        hidden, units = model.config.hidden_size, flat.ffn_hidden_size
        count = model.config.num_hidden_layers * flat.moe_num_experts
        return [(2 * units, hidden), (hidden, units)] * count
    return [
        (int(tensor.shape[1]), int(tensor.shape[2]))
        for name, tensor in model.named_parameters()
        if tensor.ndim == 3 and "experts" in name.split(".")
        for _ in range(tensor.shape[0])
    ]


RANDOM_NUMBERS = (1 << 20) + 7  # numbers to take weights from: a prime, so that rows differ


def random_skeleton(
    folder: Path, *, layers: int | None, stored: torch.dtype, context: int | None = None
) -> Skeleton:
    """Return a config.json's model with random numbers of type `stored`, with `layers` layers, for
    at most `context` tokens."""
    attention.register()
    file = folder if folder.is_file() else folder / "config.json"
    config = limit_context(read_config(file), context, folder)
    if layers is not None:
        kinds = getattr(config, "layer_types", None)
        config.num_hidden_layers = layers
        if kinds and len(config.layer_types) != layers:  # those of some depend on their number
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    model = with_buffers(built(config, file))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    transposed = linearise(model)
    numbers = torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0))
    scaled: dict[int, Tensor] = {}

    def fresh(name: str, shape: Sequence[int]) -> Tensor:
        """Return random numbers from one store, from an offset by name: drawing all would take
        minutes."""
        if (width := shape[-1]) not in scaled:
            scaled[width] = (numbers / math.sqrt(width)).to(stored)
        whole, turn = torch.empty(shape, dtype=stored), crc32(name.encode()) % RANDOM_NUMBERS
        first, rest = whole.view(-1).tensor_split([RANDOM_NUMBERS - turn])
        for piece, source in ((first, scaled[width][turn:]), *_turns(rest, scaled[width])):
            piece.copy_(source[: len(piece)])
        count_bytes(whole.nbytes)
        return whole

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            whole = torch.ones if name.endswith("weight") else torch.zeros
            return whole(shape, dtype=stored)
        return fresh(name, shape)

    return Skeleton(
        model,
        read,
        transposed,
        experts=lambda name: UnreadStack(
            lambda index: fresh(f"{name}.{index}", shapes[name][1:]),
            math.prod(shapes[name][1:]) * stored.itemsize,
        ),
        size_bytes=sum(map(math.prod, shapes.values())) * stored.itemsize,
    )


def _turns(rest: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the rest to be filled, each at most as long as the source."""
    pieces: Sequence[Tensor] = torch.split(rest, len(source))
    return ((piece, source) for piece in pieces)
