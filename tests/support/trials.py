"""`python -m support.trials DEVICE NAME` makes a trial as
`dovetail.workers.models.backends.device.trial` does, with functions that the CPU computes in place
of a GPU, of small products; that of bf16 ends its process, and that of fp16 fails."""

import os
import sys

from dovetail.workers.models.backends.device import choice, trial
from pretended import device as pretended
from support.emulated import Emulated, emulated


def program(_: object, source: str) -> Emulated:
    if sys.argv[2] == "fp16":
        raise RuntimeError("an illegal access\nwas found")
    return emulated(source)


if __name__ == "__main__":
    choice.TIMED_SHAPE, choice.TIMED_BYTES = (64, 128), 1
    pretended.PRETENDED.program = program  # type: ignore[method-assign, assignment]
    if sys.argv[2] == "bf16":
        os.abort()
    sys.exit(trial.answer(*sys.argv[1:]))
