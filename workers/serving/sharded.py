"""Sets up a target that is spread over the memory nodes of its machine, and reports the result."""

import sys
from collections.abc import Sequence

from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import shards
from dovetail.workers.kernels.shards import SampledPages, Shard
from dovetail.workers.models.language_model import LanguageModel

SHARDED = "a target over memory nodes"


def begin_shards(wanted: Sequence[Shard]) -> None:
    """Spread all models loaded later over these shards. Raises `UserError` without kernels."""
    if why := kernels.why_not():
        raise UserError(f"{SHARDED} (target.numa = 'shard') needs the kernels: {why}")
    shards.set_shards(wanted)


def settle_target(model: LanguageModel) -> str:
    """Pin this thread, which will compute a loaded target, to its first shard, and return a
    description of the shards; empty if it has none. Raises `UserError` if torch computes the
    target, which cannot be spread."""
    if shards.count() == 1:
        return ""
    if model.backend != "kernels":
        raise UserError(
            f"{SHARDED} (target.numa = 'shard') needs the kernels, but torch computes "
            f"{model.checkpoint.source}, because {model.choice}: leave it out"
        )
    shards.settle()
    return words_of(shards.count(), shards.placed())


def words_of(count: int, placed: SampledPages) -> str:
    """Describe where the weights of these shards are."""
    where = (
        f"{placed.home} of {placed.looked} sampled pages of weights are on the node "
        "whose cores read them"
        if placed.looked
        else "the kernel does not report where its weights are"
    )
    refused = (
        f" (set_mempolicy: {placed.refused}; memory is on the node that wrote to it first)"
        if placed.refused
        else ""
    )
    return f"spread over {count} shards; {where}{refused}"


def tell_shards(model: LanguageModel, name: str) -> None:
    """Set up a target that is spread, and report the result on stderr."""
    if words := settle_target(model):
        print(f"{name}: {words}", file=sys.stderr)
