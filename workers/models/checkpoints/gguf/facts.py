"""The keys of a GGUF architecture, read one by one: an unread key could mean another function."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.gguf.architectures.namings import NOT_READ
from dovetail.workers.models.checkpoints.gguf.files import Model, Place

HARMLESS = frozenset(("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"))
"""Keys that do not change what a model computes."""
_NEUTRAL: Mapping[tuple[float, ...], str] = {
    (0,): "attention.scale attention.clamp_kqv attention.max_alibi_bias attn_logit_softcapping "
    "router_logit_softcapping final_logit_softcapping attention.temperature_scale pooling_type "
    "attention.sliding_window attention.shared_kv_layers attention.indexer.top_k swin_norm "
    "rope.dimension_sections embedding_length_out embedding_length_per_layer_input num_loops "
    "n_deepstack_layers token_shift_count rescale_every_n_layers hash_layer_count "
    "activation_sparsity_scale swiglu_clamp_exp swiglu_clamp_shexp leading_dense_block_count "
    "expert_count expert_used_count expert_shared_count expert_gating_func experts_per_group "
    "expert_feed_forward_length expert_shared_feed_forward_length expert_latent_length "
    "expert_chunk_feed_forward_length moe_latent_size moe_every_n_layers ssm.conv_kernel "
    "ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms "
    "rope.scaling.yarn_log_multiplier",
    (1,): "attention.causal attention.value_scale attention.output_scale logit_scale "
    "rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_slow",
    (0, 1): "residual_scale embedding_scale rope.scaling.alpha expert_weights_scale "
    "expert_group_count expert_group_used_count interleave_moe_layer_step",
    (-1, 0, 1): "rope.scaling.yarn_ext_factor",
    (32,): "rope.scaling.yarn_beta_fast",
}
NEUTRAL = {key: values for values, keys in _NEUTRAL.items() for key in keys.split()}
"""Keys -> the values with which they change nothing, in an architecture that does not read them."""
EQUAL = {
    "embedding_length_out": "embedding_length",
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
"""Keys that change nothing if their value is that of another key."""
PARTS = {
    ".indexer": "a sparse indexer",
    ".enc.blk.": "an encoder",
    ".fc.": "the states of the model that it drafts for",
    ".nextn.pre_projection.": "the states of the model that it drafts for",
    ".time_mix_": "RWKV's recurrent states",
    ".ssm_x.": "the recurrent states of Mamba-1",
}
"""Parts of tensor names -> what such a model needs, and no supported architecture has."""
NEEDS = {
    "attention.causal": (True, "bidirectional attention"),
    "attention.max_alibi_bias": (0, "attention scores that fall with distance (ALiBi)"),
    "num_loops": (1, "layers that run several times"),
}
"""Keys -> the value that needs nothing, and what a model with another value needs."""
EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
"""An architecture uses the one for its kind of norms; converters write both."""
WINDOW = "attention.sliding_window"
PARALLEL = ("phi2", "cohere2")  # attention and MLP are parallel; llama.cpp reads no key for it
MOST_LAYERS = 1 << 16
LARGEST = 1 << 32  # the largest whole number in a file's architecture, which has 32 bits
HEADS = "attention.head_count"
KV_HEADS = "attention.head_count_kv"
GUESSES = "nextn_predict_layers"
GUESSING = frozenset(
    (
        *("bailingmoe2", "deepseek2", "exaone-moe", "exaone4", "glm4moe", "hy_v3"),
        *("nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
    )
)
"""Architectures whose last layers may predict further tokens (multi-token prediction)."""


class Facts:
    """The facts of a model under `general.architecture`, and its tensors by name."""

    def __init__(self, model: Model, *, mtp: bool = False) -> None:
        """`mtp`: count MTP layers among the model's, as for a file that has no others."""
        self.model = model
        self.architecture = str(model.facts["general.architecture"])
        self.tensors: Mapping[str, Place] = {
            place.name: place for head in model.heads for place in head.tensors
        }
        self._prefix = f"{self.architecture}."
        trunk = any(name.startswith("blk.0.") for name in self.tensors)
        self.only_mtp = not trunk and bool(model.facts.get(f"{self._prefix}{GUESSES}"))
        self._mtp = mtp or self.only_mtp
        self._asked: set[str] = set(HARMLESS)
        self._needed: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self.model.facts

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number, or the one that a list has for all layers."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        elif isinstance(value, np.ndarray):
            raise self.refusal(f"{self._prefix}{key} differs from layer to layer")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(f"{self._prefix}{key} is {str(value)[:50]}, no whole number")
        if not 0 <= value <= LARGEST:
            raise self.refusal(f"{self._prefix}{key} is {value}, no number from 0 to {LARGEST}")
        return value

    def numbers(self, key: str, default: Sequence[int] | None = None) -> list[int]:
        """Return a list of whole numbers, or of booleans."""
        value = self._get(key, default)
        if value is default and default is not None:
            return [*default]
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iub":
            raise self.refusal(f"{self._prefix}{key} is {str(value)[:50]}, no list of numbers")
        if value.size and not 0 <= min(value.tolist()) <= max(value.tolist()) <= LARGEST:
            raise self.refusal(f"{self._prefix}{key} is {str(value)[:50]}, not 0 to {LARGEST}")
        return [int(one) for one in value]

    def reals(self, key: str) -> list[float]:
        """Return a number, or infinity, for each layer that a token passes."""
        value = self._get(key, None)
        listed = isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
        if not listed or len(value) < self.layers or np.isnan(value).any():
            raise self.refusal(f"{self._prefix}{key} has no number for each layer")
        return [float(one) for one in value[: self.layers]]

    def each(self, key: str) -> list[int]:
        """Return a whole number for each layer that a token passes, from one number or a list."""
        if not self.is_list(key):
            return [self.whole(key)] * self.layers
        found = self.numbers(key)[: self.layers]
        if len(found) != self.layers:
            raise self.refusal(f"{self._prefix}{key} has {len(found)} numbers")
        return found

    def is_list(self, key: str) -> bool:
        """Return whether there is a list under a key."""
        return isinstance(self.model.facts.get(self._prefix + key), np.ndarray)

    def truth(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{self._prefix}{key} is {str(value)[:50]}, neither true nor false")
        return value

    @property
    def layers(self) -> int:
        """Return the layers that a token passes; MTP layers may follow in the file."""
        guesses = self.whole(GUESSES, 0)
        if guesses and self.architecture not in GUESSING:
            raise self.refusal(f"{self._prefix}{GUESSES} is {guesses}, but such layers are missing")
        found = self.whole("block_count") - (0 if self._mtp else guesses)
        if found < 1 or guesses < 0:
            raise self.refusal(f"it has {found} layers")
        if found > (
            MOST_LAYERS if self._mtp else len(self.tensors)
        ):  # and no list is made of as many
            raise self.refusal(f"it declares {found} layers, and has fewer tensors")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """Return a number; one of 32 bits as its shortest decimal."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(f"{self._prefix}{key} is {str(value)[:50]}, no number")
        if not isfinite(value):
            raise self.refusal(f"{self._prefix}{key} is {value}, no finite number")
        short = np.float32(value)
        return float(str(short)) if float(short) == value else float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.real(key, default)
        if not 0 < value < float("inf"):
            raise self.refusal(f"{self._prefix}{key} is {value}, no positive finite number")
        return value

    def epsilon(self, key: str, default: float | None = None) -> float:
        """Return a finite number of at least 0."""
        value = self.real(key, default)
        if value < 0:
            raise self.refusal(f"{self._prefix}{key} is {value}, below 0")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refusal(f"{self._prefix}{key} is {str(value)[:50]}, no text")
        return value

    def need(self, name: str) -> Place:
        """Return a required tensor."""
        if name not in self.tensors:
            raise self.refusal(f"tensor {name} is missing")
        self._needed.add(name)
        return self.tensors[name]

    def refuse_more(self) -> None:
        """`CheckpointError` naming an unread key, or unused factors of the rotation."""
        for key in self._keys():
            if key in self._asked or self._is_neutral(key):
                continue
            value = str(self.model.facts[self._prefix + key])[:50]
            why = f"is {value}, which is" if key in NEUTRAL or key in EQUAL else "is"
            raise self.refusal(f"key {self._prefix}{key} {why} not known for this architecture")
        for name in sorted(NOT_READ & self.tensors.keys() - self._needed):
            raise self.refusal(f"tensor {name} is not known for this architecture here")

    def refusal(self, why: str) -> CheckpointError:
        """Return the error for a file that cannot be read as a model."""
        return CheckpointError(
            f"{self.model.file} (architecture {self.architecture}): {why}; use another file of "
            "this model, or its folder of safetensors"
        )

    def undescribed(self) -> CheckpointError:
        """Return the error for an architecture that is not described here. It names what the file's
        tensors and keys show to be missing, else the description."""
        facts, names = self.model.facts, [f".{name}" for name in self.tensors]
        found = [what for part, what in PARTS.items() if any(part in name for name in names)]
        for key, (needless, what) in NEEDS.items():
            if not np.any(facts.get(self._prefix + key, needless) == needless):
                found.append(what)
        use = "use a model of another architecture"
        if not found:
            found = ["a description of its tensors"]
            use += ", or a folder of safetensors if its model type is supported"
        where = f"{self.model.file} (architecture {self.architecture})"
        return CheckpointError(f"{where} is not supported: it needs {found[0]}; {use}")

    def _is_neutral(self, key: str) -> bool:
        if key == "use_parallel_residual":
            return self.model.facts[self._prefix + key] is (self.architecture in PARALLEL)
        if key in EPSILONS:
            return any(other in self._asked for other in EPSILONS)
        if WINDOW not in self._asked and (key == f"{WINDOW}_pattern" or key.endswith("_swa")):
            return True  # about sliding windows, which this architecture does not have
        value = self.model.facts[self._prefix + key]
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        same = self.model.facts.get(self._prefix + EQUAL[key]) if key in EQUAL else None
        if key in NEUTRAL and all(one in NEUTRAL[key] for one in values):
            return True
        return not isinstance(same, np.ndarray | None) and values == [same]

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        value = self.model.facts.get(self._prefix + key, default)
        if value is None:
            raise self.refusal(f"key {self._prefix}{key} is missing")
        return value

    def _keys(self) -> Iterator[str]:
        return (
            key.removeprefix(self._prefix)
            for key in self.model.facts
            if key.startswith(self._prefix)
        )
