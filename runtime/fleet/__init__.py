"""The workers that are here, which of them serve a session, and whose turn it is on each."""
