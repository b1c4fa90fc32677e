"""Coding agents against `dovetail serve`: recorded, replayed and live, each in an environment of
its own."""
