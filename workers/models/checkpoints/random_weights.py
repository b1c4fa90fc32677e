"""Models of random weights from a config.json alone, for measurements before a download."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from dovetail.workers.models import attention
from dovetail.workers.models.checkpoints.configured import built, read_config, with_buffers
from dovetail.workers.models.checkpoints.context import limit_context
from dovetail.workers.models.checkpoints.loader import Skeleton, linearise
from dovetail.workers.models.checkpoints.pieces import UnreadStack
from dovetail.workers.progress import count_bytes

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
