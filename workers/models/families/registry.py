"""All descriptions, by the model type of a configuration."""

from collections.abc import Mapping

from dovetail.workers.models.families import cohere, gemma, llama, mixtures, post_normed
from dovetail.workers.models.families.description import Family

FAMILIES: Mapping[str, Family] = (
    llama.FAMILIES | gemma.FAMILIES | post_normed.FAMILIES | cohere.FAMILIES | mixtures.FAMILIES
)
