"""Two public models, and what the service does with them: `python tests/real --help`."""
