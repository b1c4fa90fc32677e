"""Proofs of correctness on this machine: against transformers, and against a recorded session."""
