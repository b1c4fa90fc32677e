"""Tests our functions on a device in a separate process: `python -m
dovetail.workers.models.backends.device.trial DEVICE NAME` proves and measures the functions NAME.
It prints the times as JSON, or the reason with exit code 1 if they fail. `trying.py` starts it."""

import json
import os
import sys

from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.device import attention, choice, own_blocks, parts
from dovetail.workers.models.backends.device.trying import REFUSED
from dovetail.workers.models.substitutes import coded

CONTESTS = (
    *(*choice.CONTESTS.values(), *choice.ROUNDED.values(), *coded.CONTESTS.values()),
    *(attention.CONTEST, parts.CONTEST, *own_blocks.CONTESTS.values()),
)
"""Every comparison between our functions and torch's."""


def here(device: str, name: str) -> bytes | str:
    """Prove and measure a comparison's functions in this process; as `trying.tried`."""
    contest = next(one for one in CONTESTS if one.name == name)
    try:
        opened = open_device(device, 1)
        place = opened.torch_device
        program = choice.products_on(place).functions(contest.source)
        if isinstance(program, str):
            return program
        wrong = contest.against(program, place)
        return wrong or json.dumps(choice.measured(program, opened, contest)).encode()
    except RuntimeError as error:
        return f"its trial ended: {choice.first_line(error)}"


def answer(device: str, name: str) -> int:
    """Write the result of a trial to stdout; return the exit code."""
    stdout = os.dup(1)
    os.dup2(2, 1)  # the output of libraries must not reach the reader of the result
    found = here(device, name)
    os.write(stdout, found.encode() if isinstance(found, str) else found)
    return REFUSED if isinstance(found, str) else 0


if __name__ == "__main__":
    sys.exit(answer(*sys.argv[1:]))
