"""The listening socket, its connections, and the checks before every route."""
