"""`python -m support.trials DEVICE SECONDS` makes trials as
`dovetail.workers.models.backends.device.trial` does, with functions that the CPU computes in place
of a GPU, of small products; that of bf16 ends its process."""

import os
import sys

from dovetail.workers.models.backends.device import choice, trial
from pretended import device as pretended
from support.emulated import Emulated, emulated

FATAL = "bf16"


def program(_: object, source: str) -> Emulated:
    return emulated(source)


def main(device: str, name: str) -> str:
    if name == FATAL:
        os.abort()
    return REAL(device, name)


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)
    REAL = trial.main
    trial.main = main
    choice.TIMED_SHAPE, choice.TIMED_BYTES = (64, 128), 1
    pretended.PRETENDED.program = program  # type: ignore[method-assign, assignment]
    with os.fdopen(said, "w", encoding="utf-8") as stdout:
        trial.answer(sys.argv[1], float(sys.argv[2]), stdout)
