"""The door to transformers, which takes seconds to import: nothing of it is imported before one of
these members is used. A model whose proof is remembered and that the kernels compute needs none.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

MODULES = {
    "__version__": "transformers",
    "AttentionInterface": "transformers",
    "AutoConfig": "transformers",
    "AutoModelForCausalLM": "transformers",
    "CONFIG_MAPPING": "transformers",
    "Conv1D": "transformers.pytorch_utils",
    "DynamicCache": "transformers",
    "LlamaConfig": "transformers",
    "MODEL_FOR_CAUSAL_LM_MAPPING": "transformers",
    "ROPE_INIT_FUNCTIONS": "transformers.modeling_rope_utils",
    "get_checkpoint_conversion_mapping": "transformers.conversion_mapping",
    "logging": "transformers.utils",
}
"""The members of this module, and where each is in transformers."""


@contextmanager
def importing() -> Iterator[None]:
    """Import within without collecting garbage, which takes a quarter of the time and finds none:
    what modules hold stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        found = getattr(import_module(MODULES[name]), name)
    globals()[name] = found
    return found
