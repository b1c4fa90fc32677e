"""This machine: its cores, memory and GPUs, what fits into them, and their assignment to
processes."""
