"""Measurements of this machine for its profile file, and look-ups in that file."""
