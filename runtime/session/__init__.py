"""One request's life as a state machine, and the values that it is about. Pure."""
