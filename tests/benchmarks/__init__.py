"""Figures of speed, bytes and accuracy on this machine, each printed by one command: `python
tests/benchmarks --help`."""

NEEDED = "is not installed: the benchmarks need what the tests need, pip install -e '.[test]'"
"""The end of the sentence about a library that is missing."""
