"""Running sessions change their workers: lost ones, replaced ones, and better ones."""
