"""One request's life as a state machine, and its values. Pure."""
