"""The HTTP API, which is OpenAI-compatible: a client of the coordinator in a separate process."""
