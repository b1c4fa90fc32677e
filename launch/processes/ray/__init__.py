"""The parts of services on the nodes of a Ray cluster, which places and watches them."""
