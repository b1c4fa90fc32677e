"""Comparisons with transformers' own forward pass."""
