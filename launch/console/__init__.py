"""Terminal output: help, progress, tables, log lines, the live view of `top`."""
