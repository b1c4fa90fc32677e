"""The kinds of heads that predict several positions in one pass."""
