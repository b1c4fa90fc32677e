"""Model folders on disk: finding, reading and loading them."""
