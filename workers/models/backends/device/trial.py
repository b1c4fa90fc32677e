"""Tests our functions on a device in a separate process: `python -m
dovetail.workers.models.backends.device.trial DEVICE NAME` proves and measures the functions NAME,
and prints the times as JSON; exit code 1 with the reason if they fail. `trying.py` starts it."""

import json
import os
import sys

from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.device import attention, choice, own_blocks, parts
from dovetail.workers.models.substitutes import coded

CONTESTS = (
    *(*choice.CONTESTS.values(), *choice.ROUNDED.values(), *coded.CONTESTS.values()),
    *(attention.CONTEST, parts.CONTEST, *own_blocks.CONTESTS.values()),
)
"""Every comparison between our functions and torch's."""


def main(device: str, name: str) -> str:
    """Prove and measure a comparison's functions; `SystemExit` with the reason if they fail."""
    contest = next(one for one in CONTESTS if one.name == name)
    opened = open_device(device, 1)
    place = opened.torch_device
    program = choice.products_on(place).functions(contest.source)
    if isinstance(program, str):
        raise SystemExit(program)
    if wrong := contest.against(program, place):
        raise SystemExit(wrong)
    return json.dumps(choice.measured(program, opened, contest))


def here(device: str, name: str) -> bytes | str:
    """Make a trial in this process, which serves no requests; as `trying.tried`."""
    try:
        return main(device, name).encode()
    except (RuntimeError, SystemExit) as error:
        return f"its trial ended: {error}"


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # the output of libraries must not reach the reader of the result
    try:
        os.write(said, main(*sys.argv[1:]).encode())
    except RuntimeError as error:
        raise SystemExit(f"its trial ended: {error}") from None
