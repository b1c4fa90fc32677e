"""The engine: sessions, the coordinator that carries them, what workers and clients are told."""
