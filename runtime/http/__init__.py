"""The HTTP API: an OpenAI-shaped face for a client of the coordinator, in a process of its own."""
