"""Mixers with a state: their parts in transformers, their proof, and the states of a session."""
