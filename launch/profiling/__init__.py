"""The parts of `dovetail profile`: samplers, the time line of a run, bounds, advice, and the
report.

The command itself is `launch/commands/profile.py`.
"""
