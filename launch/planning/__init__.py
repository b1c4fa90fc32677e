"""Collects the inputs of the planner of `dovetail plan`: sizes, costs with their origins,
acceptance of drafts; and turns its plan into words and settings."""
