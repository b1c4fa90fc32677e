"""Tools and reasoning: how models write them, how replies are read, and what a grammar allows."""
