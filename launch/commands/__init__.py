"""One file a command: its options, and the steps it takes. What several commands need is in the
folders beside this one."""
