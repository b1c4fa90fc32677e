"""Keys of generation_config.json (or, without that file, of config.json) that change a model's
choices beyond sampling: tokens that it never chooses are masked; other keys are refused, since
replies would silently differ from those of transformers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json, shown

_CHANGING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("begin_suppress_tokens", "force_words_ids", "constraints"), ([],)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("forced_decoder_ids", "exponential_decay_length_penalty"), ([],)),
    **dict.fromkeys(("min_length", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("sequence_bias", "watermarking_config", "stop_strings"), ([], {})),
}
"""Keys that affect every reply -> their neutral values, besides null."""
_SAMPLED: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}
"""Keys that affect sampled replies only."""


def suppressed_in(folder: Path, end: Iterable[int]) -> tuple[int, ...]:
    """Return the tokens that a model never chooses, in order; `end`: the ids that end a reply,
    which bad words do not mask. Raises `CheckpointError` for unsupported keys."""
    file, own = folder / "generation_config.json", folder / "config.json"
    file = file if file.is_file() else own
    content = text_part(read_json(own)) if file == own else read_json(file)
    changing = {**_CHANGING, **(_SAMPLED if content.get("do_sample") is True else {})}
    for name, neutral in changing.items():
        if (value := content.get(name)) is not None and value not in neutral:
            raise _refusal(file, name, value)
    found = content.get("suppress_tokens") or []
    words = content.get("bad_words_ids") or []
    if not _are_ids(found):
        raise _refusal(file, "suppress_tokens", found)
    if not isinstance(words, list) or not all(_are_ids(word) and len(word) == 1 for word in words):
        raise _refusal(file, "bad_words_ids", words)
    return tuple(sorted({*found, *({word[0] for word in words} - {*end})}))


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _refusal(file: Path, name: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{file}: {name} is {shown(value)}, which is not supported; remove the key to load the "
        "model without it"
    )
