"""Puts together what the planner of `dovetail plan` needs: sizes, costs with their origins, what
drafts bring, and what comes of it in words and settings."""
