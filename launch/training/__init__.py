"""Training draft heads: the run, its progress, and the card of the result."""
