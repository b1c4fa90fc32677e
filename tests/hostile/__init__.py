"""Messages, checkpoints and requests that mean harm, thrown at the processes that bear them:
`python tests/hostile --help`."""
