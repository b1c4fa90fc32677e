"""The parts of a session that both kinds of worker share: rounds, prefix cache, memory, arrays."""
