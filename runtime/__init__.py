"""Everything that handles requests: sessions, scheduling, text. Never imports torch; workers are
reached by messages only."""
