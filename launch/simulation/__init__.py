"""The simulator: the coordinator and the draft worker as they are, on a clock that stands still
while they compute and moves by what the simulated machine would take.

What is replaced is what costs: the draft's passes, whose outcome is looked up in a recording
(`recording.py`, made by `python tests/simulation record`), the target's, whose choices are the
recorded reply, and the messages' way. Growth, prices, draft-ahead, the cut, switching off and the
cost model are the real code.
"""
