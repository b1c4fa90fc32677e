"""Everything that a person starts: argv, settings, processes, signals. The only folder that reads
them, and the only one that knows all the others."""
