"""The cost model: what passes of a target and a draft take, and what rounds of them take.

Goodput asks the `PairCosts` of a running pair. A draft worker, which decides about its next pass
itself, goes by the passes that it reports to the coordinator.
"""
