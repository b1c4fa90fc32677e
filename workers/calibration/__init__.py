"""Measurements of this machine for its profile file, and the look-ups in that file."""
