"""The door to transformers, which takes seconds to import: members are imported on first use."""

from importlib import import_module
from typing import Any

from dovetail.protocol.memory import uncollected

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


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with uncollected():  # a quarter of the time of imports, and modules stay
        found = getattr(import_module(MODULES[name]), name)
    globals()[name] = found
    return found
