"""The journal: requests and their tokens on disk, for the next coordinator."""
