"""Everything that a person starts: argv, settings, processes, signals. The only folder that reads
these, and the only one that imports all others."""
