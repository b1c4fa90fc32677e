"""Draft heads: their kinds, checkpoints and computation."""
