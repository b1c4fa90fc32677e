"""The registered workers, the placement of sessions, and the order of commands on each worker."""
