"""Detokenizers of tokenizers that a test has made."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from dovetail.runtime.text.tokenizer import Detokenizer, open_detokenizer


def detokenizer_of(made: Tokenizer, prompt: Sequence[int] = ()) -> Detokenizer:
    """One that reads the tokenizer's file, for the reply to a prompt."""
    return open_detokenizer(made.to_str().encode(), prompt)
