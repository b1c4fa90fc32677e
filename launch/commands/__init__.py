"""One file for each command, with its options and steps."""
