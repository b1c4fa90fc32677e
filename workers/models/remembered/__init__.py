"""Models that are loaded by a proof that is remembered."""
