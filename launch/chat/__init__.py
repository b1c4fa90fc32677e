"""A conversation, and those who can answer in one: a coordinator, or a server over HTTP."""
