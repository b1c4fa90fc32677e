"""One file for each command: its options, and the steps it takes."""
