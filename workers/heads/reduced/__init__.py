"""Output heads with the rows of frequent tokens only."""
