"""The parts of `dovetail profile` (`launch/commands/profile.py`)."""
