"""The parts of `dovetail profile`: samplers, the time line of a run, its figures, and the planner's
advice on what was measured.

The command itself is `launch/commands/profile.py`.
"""
