"""Recordings of sessions: writing them, reading them back, playing them again."""
