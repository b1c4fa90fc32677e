"""Proofs of correctness on this machine: the target against transformers."""
