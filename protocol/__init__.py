"""What two processes must agree on: messages, trees, noise, settings, links and keys. Knows nobody
else, and never torch."""
