"""The agreement between two processes: messages, trees, noise, settings, links and keys. Knows
nobody else, and never torch."""
