"""Model folders on disk: where they lie, what is in them, and how they are loaded."""
