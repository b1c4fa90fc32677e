"""Clients that people have, against a running `dovetail serve`: each in an environment of its own,
by one command."""
