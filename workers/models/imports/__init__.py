"""A large library is imported here without what no worker needs."""
