"""Recordings of sessions: writing, reading and replaying them."""
