"""A service: its parts, what is decided about them, and where they run."""
