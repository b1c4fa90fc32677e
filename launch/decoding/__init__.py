"""Decoding for `dovetail generate`: one prompt streamed, or a file of prompts, and the summary."""
