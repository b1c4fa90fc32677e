"""The cost model: the time of target passes, draft passes and rounds. Goodput uses the `PairCosts`
of a running pair. A draft worker decides on its next pass itself, by the passes that it reports to
the coordinator."""
