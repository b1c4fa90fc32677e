"""Models that are loaded with a remembered proof."""
