"""Everything that touches a model or a device. Speaks only the protocol: a worker can be started by
hand and does not know who coordinates it."""
