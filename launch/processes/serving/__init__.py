"""A service: its parts, the decisions about them, and where they run."""
