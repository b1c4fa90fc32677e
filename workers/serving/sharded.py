"""A target that is spread over the memory nodes of its machine: what it needs, and what became of
it."""

import sys
from collections.abc import Sequence

from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import shards
from dovetail.workers.kernels.shards import Placed, Shard
from dovetail.workers.models.language_model import LanguageModel

SHARDED = "a target over memory nodes"


def begin_shards(wanted: Sequence[Shard]) -> None:
    """Have a model that is loaded from now on spread over these shards; `UserError` where there are
    no kernels."""
    if why := kernels.why_not():
        raise UserError(f"{SHARDED} (target.numa = 'shard') is computed by the kernels: {why}")
    shards.set_shards(wanted)


def settle_target(model: LanguageModel) -> str:
    """Keep this thread, which computes a loaded target from now on, on the first of its shards, and
    return in words how it is spread; empty: it is not. `UserError` for one that torch computes,
    whose threads are spread over nothing."""
    if shards.count() == 1:
        return ""
    if model.backend != "kernels":
        raise UserError(
            f"{SHARDED} (target.numa = 'shard') is computed by the kernels, and torch computes "
            f"{model.checkpoint.source}, because {model.choice}: leave it out"
        )
    shards.settle()
    return words_of(shards.count(), shards.placed())


def words_of(count: int, placed: Placed) -> str:
    """Return in words where the weights of so many shards lie."""
    where = (
        f"{placed.home} of {placed.looked} pages of weights that were looked for lie on the node "
        "whose cores read them"
        if placed.looked
        else "where its weights lie, the kernel does not say"
    )
    refused = (
        f" (set_mempolicy refused: {placed.refused}; memory is that of the cores that wrote first)"
        if placed.refused
        else ""
    )
    return f"spread over {count} shards; {where}{refused}"


def tell_shards(model: LanguageModel, name: str) -> None:
    """Settle, and say on stderr how a target is spread, if it is."""
    if words := settle_target(model):
        print(f"{name}: {words}", file=sys.stderr)
