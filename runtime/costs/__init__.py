"""The cost model: what passes of a target and a draft take, and what rounds of them take.

Goodput asks the `PairCosts` of a running pair, the planner and the simulator the `PlacedCosts` of a
machine, the profiler the prices of its run's rounds: all are `RoundCosts`. A draft worker, which
decides about its next pass itself, goes by the passes that it tells the coordinator of.
"""
