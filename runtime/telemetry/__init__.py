"""What the coordinator tells of its work: counts, recent rounds and spans, traces."""
