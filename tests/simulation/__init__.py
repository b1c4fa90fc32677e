"""Rounds and fleets on machines that are not at hand: `python tests/simulation --help`."""
