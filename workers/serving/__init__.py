"""Workers opened from settings, their answers to failures, and reports of their loading."""
