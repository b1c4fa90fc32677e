"""The registered workers, which of them serve a session, and the order of commands on each."""
