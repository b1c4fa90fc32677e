"""The parts of `dovetail bench`: the methods compared, how they take turns, the figures, and how a
result is kept and shown."""
