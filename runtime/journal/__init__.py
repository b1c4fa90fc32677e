"""The journal: requests and the tokens committed for them, on disk, for the coordinator that comes
after this one."""
