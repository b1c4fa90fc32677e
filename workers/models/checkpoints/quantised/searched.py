"""Weights int4: matrices are quantised to GGUF blocks at the first load, and cached on disk by the
checkpoint's digest, a file a matrix or stack of experts. Layers become Q4_K, or Q5_0 if 256 does
not divide their width; head and tables, which matter most, Q6_K or Q8_0; what 32 does not divide
stays."""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder, refusal, tidy
from dovetail.workers.kernels.blocks import search
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint, load_tensors, save_tensors
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, int4_kind
from dovetail.workers.models.checkpoints.gguf.rows import Rows
from dovetail.workers.models.checkpoints.loader import Skeleton
from dovetail.workers.models.checkpoints.pieces import UnreadStack
from dovetail.workers.models.checkpoints.quantised.stacks import Stack, check_of
from dovetail.workers.models.families.matrices import (
    expert_layouts,
    layer_matrices,
    tables_and_head,
)
from dovetail.workers.progress import count_bytes

SEARCH = "search-1"  # version of the search and its types: part of fingerprints and cache names
TYPES = ("int4-int8", "int4-fp32")  # types that are searched for, with their activations
FOLDER = "int4"
MOST_KEPT = 8  # checkpoints whose blocks are kept; the least recently used are removed
PIECE_WEIGHTS = 1 << 19  # weights that a thread quantises at a time
SAMPLED = 16  # rows of a matrix that are compared with the blocks found for them
MOST_OFF = 0.3  # largest distance of blocks from a matrix, relative to it: 0.07 is usual
LARGEST = 65504.0  # the largest number that 16 bits hold, and that blocks are searched for

log = logging.getLogger(__name__)


def in_blocks(skeleton: Skeleton, checkpoint: Checkpoint | None, weights: str) -> Skeleton:
    """Return a skeleton that reads matrices as searched blocks of these weights; `checkpoint`: the
    key of the cache, or None."""
    if weights not in TYPES:
        return skeleton
    searched = Searched(skeleton, checkpoint)
    if searched.layouts and skeleton.experts is None:
        source = "random weights" if checkpoint is None else checkpoint.source
        raise CheckpointError(
            f"{source}: its experts are not read one by one, as weights int4 need it: use weights "
            "int8"
        )
    return replace(skeleton, rows=searched.rows, experts=searched.experts)


class Searched:
    """The blocks of a model's matrices: searched for if not cached, and stored."""

    def __init__(self, skeleton: Skeleton, checkpoint: Checkpoint | None) -> None:
        self._skeleton, self._tensors = skeleton, {} if checkpoint is None else checkpoint.tensors
        self._layers = frozenset(layer_matrices(skeleton.model))
        self.layouts = expert_layouts(skeleton.model)  # the stacks of experts' matrices
        self._ends = frozenset(tables_and_head(skeleton.model))
        self._folder = None if checkpoint is None else _open_folder(checkpoint.digest)

    def rows(self, name: str, part: nn.Module) -> Rows | None:
        """Return the rows of a module's weight as blocks; None: it stays as stored."""
        weight: Any = part.weight
        count, width = weight.shape
        end = name in self._ends
        if not (end or name in self._layers) or (kind := int4_kind(width, end=end)) is None:
            return None
        shape = (count, KINDS[kind].size_of((width,)))
        stored = (self._skeleton.stored or {}).get(name, name)  # a tied head is stored once
        content = self._kept(stored, kind, shape)
        if content is None:
            content = _found(name, kind, self._numbers(name, weight))
            self._keep(stored, kind, content)
        elif stored in self._tensors:
            count_bytes(self._tensors[stored].size_bytes)
        return Rows(kind, content)

    def experts(self, name: str) -> UnreadStack:
        """Return a stack's experts, to be read one by one, as blocks if possible."""
        assert self._skeleton.experts is not None
        own, layout = self._skeleton.experts(name), self.layouts[name]
        part, _, last = name.rpartition(".")
        count, *stored = getattr(self._skeleton.model.get_submodule(part), last).shape
        outputs, inputs = reversed(stored) if layout.transposed else stored
        if (kind := int4_kind(inputs, end=False)) is None:
            return own
        stack = Stack(
            self._file(name, kind),
            (count, outputs, KINDS[kind].size_of((inputs,))),
            lambda index: _found(name, kind, layout.rows(own.numbers(index))),
            stored_bytes=count * own.size_bytes,
            not_kept=_not_kept,
        )
        return UnreadStack(
            lambda index: layout.stored(Rows(kind, stack.content(index)).numbers()),
            own.size_bytes if self._folder is None else 0,  # which are counted as they are read
            lambda index: [Rows(kind, stack.content(index))],
        )

    def _numbers(self, name: str, weight: Tensor) -> Tensor:
        if not weight.is_meta:
            return weight.detach()
        found = self._skeleton.read(name)
        return found.t() if name in self._skeleton.transposed else found

    def _file(self, name: str, kind: int) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{name}.{KINDS[kind].name}.safetensors"

    def _kept(self, name: str, kind: int, shape: tuple[int, int]) -> Tensor | None:
        """Return a matrix's cached blocks; None without any, or with damaged ones, which is
        logged."""
        file = self._file(name, kind)
        if file is None or not file.is_file():
            return None
        try:
            tensors = load_tensors(file)
            content, check = tensors["blocks"], tensors["check"]
            if content.dtype != torch.uint8 or tuple(content.shape) != shape:
                raise ValueError("it holds blocks of another matrix")
            if check.tolist() != [check_of(file, content.numpy().data)]:
                raise ValueError("it is not what was written")
        except (CheckpointError, KeyError, ValueError) as error:
            log.warning("%s is made again: %s", file, error)
            return None
        return content

    def _keep(self, name: str, kind: int, content: Tensor) -> None:
        """Store the blocks of a matrix; log the first failure."""
        if (file := self._file(name, kind)) is None:
            return
        try:
            check = torch.tensor([check_of(file, content.numpy().data)], dtype=torch.int64)
            save_tensors(file, {"blocks": content, "check": check})
        except OSError as error:
            _not_kept(file.parent, error)
            self._folder = None


def _open_folder(digest: str) -> Path | None:
    """Return the folder of a checkpoint's cached blocks, which only this user can read."""
    whole = cache_folder() / FOLDER
    folder = whole / hashlib.sha256(f"{digest}\0{SEARCH}".encode()).hexdigest()[:32]
    try:
        if not folder.is_absolute():
            raise FileNotFoundError(2, "this user has no home, and XDG_CACHE_HOME names no folder")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.touch()
        tidy(whole, MOST_KEPT)
    except OSError as error:
        _not_kept(folder, error)
        return None
    return folder


def _not_kept(folder: Path, error: OSError) -> None:
    log.warning(
        "int4 weights cannot be saved in %s (%s): every start quantises them once more",
        folder,
        refusal(error),
    )


@torch.inference_mode()
def _found(name: str, kind: int, weight: Tensor) -> Tensor:
    """Return the blocks uint8 [out, bytes] of a matrix; `CheckpointError` if none represent it."""
    count, width = weight.shape
    content = torch.empty(count, KINDS[kind].size_of((width,)), dtype=torch.uint8)
    step = max(1, PIECE_WEIGHTS // width)

    def find(first: int) -> None:
        rows = slice(first, first + step)
        numbers = weight[rows].float().contiguous()
        if float(numbers.abs().max()) > LARGEST:
            raise _unfit(name)
        search(kind, numbers, content[rows])

    _in_pieces(find, range(0, count, step))
    places = torch.linspace(0, count - 1, min(SAMPLED, count)).long()
    expected, rows = weight[places].double(), Rows(kind, content).taken(places)
    if not float((rows.numbers() - expected).norm()) <= MOST_OFF * float(expected.norm()):
        raise _unfit(name)
    return content


def _unfit(name: str) -> CheckpointError:
    return CheckpointError(
        f"the numbers of {name} are too large or too small for blocks of 4 bits, whose scales are "
        "halves: use weights int8"
    )


def _in_pieces(find: Callable[[int], None], firsts: range) -> None:
    if len(firsts) == 1:
        find(firsts[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in pool.map(find, firsts):
            assert done is None
