"""Draft engines: a small model, a draft head, n-gram lookup, and the target's own quantised
substitute."""
