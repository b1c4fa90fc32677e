"""Figures of speed, bytes and accuracy on this machine, each printed by one command: `python
tests/benchmarks --help`."""
