"""What a peer, a checkpoint or a client that means harm might send, thrown at what has to bear it:
`python tests/hostile --help`."""
