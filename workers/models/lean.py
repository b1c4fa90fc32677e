"""transformers without the packages that it imports wherever they are installed and no worker
needs.

hqq brings torch's compiler along, scipy its optimisers (for a loss of object detection): together a
quarter of what it takes a worker to start. transformers is told that they are not installed, and
remembers it; whoever needs one of them imports it as ever. Where transformers has been imported
already it has seen what there is, and is left as it is.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

UNUSED = ("accelerate", "hqq", "scipy")


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let no import within find these packages, nor `find_spec`; one that is imported already
    stays."""
    absent = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None is how Python marks a name that is not to be found
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


with hidden(*UNUSED) if "transformers" not in sys.modules else nullcontext():
    import transformers
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        DynamicCache,
        LlamaConfig,
    )
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.pytorch_utils import Conv1D

__all__ = [
    "CONFIG_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "ROPE_INIT_FUNCTIONS",
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "Conv1D",
    "DynamicCache",
    "LlamaConfig",
    "get_checkpoint_conversion_mapping",
    "transformers",
]
