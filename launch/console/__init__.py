"""What a person sees on a terminal: progress, tables, log lines, notes."""
