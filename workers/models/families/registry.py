"""Model type of a configuration -> description of the family."""

from collections.abc import Mapping

from dovetail.workers.models.families import gemma, latent, layer_normed, llama, mixtures, states
from dovetail.workers.models.families.description import Family

FAMILIES: Mapping[str, Family] = (
    llama.FAMILIES
    | gemma.FAMILIES
    | layer_normed.FAMILIES
    | mixtures.FAMILIES
    | latent.FAMILIES
    | states.FAMILIES
)
