"""`python -m support.trials DEVICE NAME` makes a trial as
`dovetail.workers.models.backends.device.trial` does, with functions that the CPU computes in place
of a GPU, of small products; that of bf16 ends its process."""

import os
import sys

from dovetail.workers.models.backends.device import choice, trial
from pretended import device as pretended
from support.emulated import Emulated, emulated


def program(_: object, source: str) -> Emulated:
    return emulated(source)


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)
    choice.TIMED_SHAPE, choice.TIMED_BYTES = (64, 128), 1
    pretended.PRETENDED.program = program  # type: ignore[method-assign, assignment]
    if sys.argv[2] == "bf16":
        os.abort()
    os.write(said, trial.main(*sys.argv[1:]).encode())
