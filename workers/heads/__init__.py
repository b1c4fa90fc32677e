"""Draft heads: their kinds, their checkpoints, and how a head computes."""
