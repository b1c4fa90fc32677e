"""The APIs that are served: bodies translated into completions, and writers of responses."""
