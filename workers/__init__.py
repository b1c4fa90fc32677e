"""Everything that touches a model or a device. Workers use only the protocol: one can be started by
hand, and does not know which program coordinates it."""
