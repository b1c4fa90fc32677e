"""Everything that a person sees on a terminal: help, progress, tables, log lines, the live view of
`top`."""
