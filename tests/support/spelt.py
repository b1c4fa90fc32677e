"""Detokenizers for tokenizers made by a test."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from dovetail.runtime.text.tokenizer import Detokenizer, open_detokenizer


def detokenizer_of(made: Tokenizer, prompt: Sequence[int] = ()) -> Detokenizer:
    """Return a detokenizer for the reply to a prompt, from the tokenizer's file."""
    return open_detokenizer(made.to_str().encode(), prompt)
