"""The engine: the coordinator, its sessions, and the messages to workers and clients."""
