"""Substitutes of a target: its own linears in a few bits, on the CPU and on a GPU."""
