"""What all processes share: messages, trees, noise, settings, links and keys. Imports no other
folder, and never torch."""
