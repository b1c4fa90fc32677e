"""What `dovetail plan` puts together for the planner: sizes, costs with their origins, what drafts
bring, and what comes of it in words and settings."""
