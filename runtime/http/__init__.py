"""The OpenAI-compatible HTTP API: a client of the coordinator in a separate process."""
