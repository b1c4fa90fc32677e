"""Everything that touches a model or a device. Workers use only the protocol, so they can be
started by hand and work with any coordinator."""
