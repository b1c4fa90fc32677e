"""The parts of `dovetail bench`: methods, their turns, the figures, and saving and showing a
result."""
