"""Model folders on disk: where they are, what they contain, and how they are loaded."""
