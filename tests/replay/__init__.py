"""Plays a recorded session to a real worker, and compares its answers with the recorded ones."""
