"""A Gemma 4 assistant: a small model without keys and values of its own, which attends to those of
two layers of its target and drafts all tokens of a round at one position. transformers computes it,
in float32 on the CPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.workers.models import transformers
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.checkpoints.checkpoint import open_weights
from dovetail.workers.models.checkpoints.configured import quiet, said_by
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache

FULL, SLIDING = "full_attention", "sliding_attention"
KeysAndValues = tuple[Tensor, Tensor]
"""Keys and values [kv_heads, T, head_dim] of one layer, float32."""


class Assistant:
    """An assistant and its target."""

    def __init__(self, source: str, target: LanguageModel) -> None:
        """Load the assistant `source` for a loaded target. Raises `CheckpointError` if its tensors
        are incomplete or do not fit the target, `SettingsError` for a target without the kernels'
        keys and values."""
        self.source, self._target = source, target
        if not isinstance(target.back_end, Kernels) or target.cache == "q8":
            how = "target.cache = 'q8'" if target.cache == "q8" else target.choice
            raise SettingsError(
                f"{source} reads keys and values of a target that the C++ kernels compute in fp32 "
                f"or half; here {how}"
            )
        self._back_end = target.back_end
        self._model = _load(source)
        self.config = self._model.config.get_text_config()
        self.digest = open_weights(find_folder(source)).digest
        self._check(target)
        self._layers = self._back_end.last_of_each_type()

    def _check(self, target: LanguageModel) -> None:
        """Raise `CheckpointError` unless the assistant fits its target."""
        own, whole = self.config, self._back_end.config
        if whole.model_type not in ("gemma4_text", "gemma4_unified_text"):
            raise CheckpointError(
                f"{self.source} is an assistant of Gemma 4, but {target.checkpoint.source} has "
                f"model type {whole.model_type}"
            )
        found = {
            "vocab_size": own.vocab_size,
            "hidden_size": self._model.config.backbone_hidden_size,
            "sliding_window": own.sliding_window,
            **_heads(own),
        }
        needed = {
            "vocab_size": whole.vocab_size,
            "hidden_size": whole.hidden_size,
            "sliding_window": whole.sliding_window,
            **_heads(whole),
        }
        if wrong := [name for name in found if found[name] != needed.get(name)]:
            name = wrong[0]
            raise CheckpointError(
                f"{self.source} was made for another target than {target.checkpoint.source}: "
                f"{name} is {found[name]} there and {needed.get(name)} here"
            )

    @property
    def width(self) -> int:
        """The width of the states that it reads, H: its target's."""
        return self._target.hidden_size

    def new_cache(self) -> Cache:
        """Return the cache of a session without rows of its own."""
        return self._target.new_cache(0)

    def keys(self, cache: Cache, start: int, stop: int) -> Mapping[str, KeysAndValues]:
        """Return the target's keys and values of rows `start` to `stop` - 1 for each layer type."""
        assert isinstance(cache, BlockedCache)
        found = {}
        for kind, layer in self._layers.items():
            first = cache.first  # rows before it are another session's, too
            assert start >= first, "sessions of a shared process share no rows"
            keys, values = cache.read(layer, start, stop)
            found[kind] = keys.float(), values.float()
        return found

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, states: Tensor, seen: Mapping[str, KeysAndValues]
    ) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] of the tokens after `tokens` int64 [N], and the states [N, H] for
        the next level; `states` [N, H]: the target's final state before each token, or its parent's
        from here. `seen`: rows 0 to n - 2 of a log of n tokens, whose last position is that of all
        N."""
        embedded = self._back_end.embedded(tokens).float()
        count, rows = len(tokens), seen[FULL if FULL in seen else SLIDING][0].shape[1]
        window = self.config.sliding_window
        shared = {
            kind: tuple(
                part[:, -window + 1 if kind == SLIDING else 0 :].expand(count, -1, -1, -1)
                for part in pair
            )
            for kind, pair in seen.items()
        }
        out = self._model(
            inputs_embeds=torch.cat((embedded, states), -1)[:, None],
            position_ids=torch.full((count, 1), rows),
            shared_kv_states=shared,
        )
        logits: Tensor = out.logits[:, 0]
        config = self._model.config
        if (
            config.use_ordered_embeddings
            and config.centroid_intermediate_top_k < config.num_centroids
        ):
            # logits that were not computed are one lower number, which depends on the other rows
            logits = logits.masked_fill(logits == logits.min(), float("-inf"))
        return logits, out.last_hidden_state[:, 0]


def _heads(config: Any) -> dict[str, tuple[int, int]]:
    """Return the number and the width of the key heads of each layer type."""
    layers = zip(config.layer_types, config.per_layer_config, strict=False)
    return {f"heads of {k}": (own.num_key_value_heads, own.head_dim) for k, own in layers}


def _load(source: str) -> Any:
    """Return transformers' model of an assistant, complete and finite."""
    folder = find_folder(source)
    try:
        with quiet():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=torch.float32,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
    except Exception as error:  # any error of transformers' code
        why = said_by(error) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{source} cannot be loaded as an assistant: {why}") from error
    for words, found in (
        ("lacks tensors", report["missing_keys"]),
        ("has tensors that an assistant does not", report["unexpected_keys"]),
        ("has tensors of other shapes than config.json says", report["mismatched_keys"]),
    ):
        if found:
            names = sorted(one if isinstance(one, str) else one[0] for one in found)
            raise CheckpointError(f"{source} {words}: {_listed(names)}")
    if bad := [name for name, own in model.named_parameters() if not own.isfinite().all()]:
        raise CheckpointError(f"{source} has NaN or infinite values: {_listed(bad)}")
    return model.eval()


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
