"""Everything that touches a request: sessions, scheduling, text. Never imports torch, and knows
workers only by their messages."""
