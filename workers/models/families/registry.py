"""Model type of a configuration -> description of the family."""

from collections.abc import Mapping

from dovetail.workers.models.families import (
    gemma,
    latent,
    layer_normed,
    llama,
    mamba,
    mixtures,
    post_normed,
    recurrent,
)
from dovetail.workers.models.families.description import Family

FAMILIES: Mapping[str, Family] = (
    llama.FAMILIES
    | gemma.FAMILIES
    | post_normed.FAMILIES
    | layer_normed.FAMILIES
    | mixtures.FAMILIES
    | latent.FAMILIES
    | recurrent.FAMILIES
    | mamba.FAMILIES
)
