"""Collects the inputs of the planner of `dovetail plan`: sizes, costs with their origins,
acceptance of drafts; and describes its plan in words and settings."""
