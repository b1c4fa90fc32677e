"""Model type of a configuration -> description of the family."""

from collections.abc import Mapping

from dovetail.workers.models.families import (
    cohere,
    gemma,
    latent,
    layer_normed,
    llama,
    mamba,
    mixtures,
    post_normed,
    recurrent,
    sunken,
)
from dovetail.workers.models.families.description import Family

FAMILIES: Mapping[str, Family] = (
    llama.FAMILIES
    | gemma.FAMILIES
    | post_normed.FAMILIES
    | cohere.FAMILIES
    | layer_normed.FAMILIES
    | mixtures.FAMILIES
    | latent.FAMILIES
    | sunken.FAMILIES
    | recurrent.FAMILIES
    | mamba.FAMILIES
)
