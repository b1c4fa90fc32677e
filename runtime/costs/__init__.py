"""The cost model: the time of passes of a target and a draft, and of rounds.

Goodput uses the `PairCosts` of a running pair. A draft worker, which decides on its next pass
itself, uses the passes that it reports to the coordinator."""
