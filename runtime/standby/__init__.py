"""A standby: another coordinator, which copies the journal of the first, and takes over when that
has gone."""
