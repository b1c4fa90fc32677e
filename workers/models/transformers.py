"""The door to transformers, which takes seconds to import: a member is imported when it is first
used. A model on the kernels whose proof is on record needs none.
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
    """Suspend garbage collection during imports: it takes a quarter of their time and finds
    nothing, since modules stay."""
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
