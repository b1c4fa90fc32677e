"""Which token has which id: what a draft and its target must share. Reads a tokenizer.json with
nothing but the standard library."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dovetail.protocol.errors import CheckpointError


def read_vocabulary(tokenizer: bytes) -> dict[int, str]:
    """Id -> token of a tokenizer.json (BPE, WordPiece, WordLevel or Unigram), added tokens
    included; `CheckpointError` if it is none."""
    try:
        content: Mapping[str, Any] = json.loads(tokenizer)
        model = content["model"]["vocab"]
        pairs = (
            {index: token for token, index in model.items()}
            if isinstance(model, dict)
            else {i: piece[0] for i, piece in enumerate(model)}
        )
        pairs.update((added["id"], added["content"]) for added in content.get("added_tokens") or ())
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"tokenizer.json holds no vocabulary ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    if not all(isinstance(i, int) and isinstance(t, str) for i, t in pairs.items()):
        raise CheckpointError("tokenizer.json maps tokens to something other than ids")
    return pairs


def vocabulary_digest(vocabulary: Mapping[int, str]) -> str:
    """SHA-256 over the (id, token) pairs in order of id."""
    digest = hashlib.sha256()
    for index in sorted(vocabulary):
        digest.update(f"{index}\0{vocabulary[index]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def vocabulary_differences(
    target: Mapping[int, str], draft: Mapping[int, str], most: int = 3
) -> list[str]:
    """Return in words the first `most` ids whose tokens differ."""
    differing = (i for i in sorted(target.keys() | draft.keys()) if target.get(i) != draft.get(i))
    return [
        f"id {i} is {_quote(target.get(i))} in the target and {_quote(draft.get(i))} in the draft"
        for i, _ in zip(differing, range(most), strict=False)
    ]


def _quote(token: str | None) -> str:
    return "no token" if token is None else repr(token[:40])
