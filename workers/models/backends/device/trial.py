"""Tries our functions on a device in a process of its own: `python -m
dovetail.workers.models.backends.device.trial DEVICE SECONDS` reads names from stdin, proves and
measures each, and answers with a line of JSON. It ends with stdin, after SECONDS without a name, or
after an error of the device. `trying.py` starts it."""

import json
import os
import select
import sys
from typing import IO

from dovetail.workers.devices.memory import HELD
from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.device import attention, choice, own_blocks, parts
from dovetail.workers.models.substitutes import coded

CONTESTS = (
    *(*choice.CONTESTS.values(), *choice.ROUNDED.values(), *coded.CONTESTS.values()),
    *(attention.CONTEST, parts.CONTEST, *own_blocks.CONTESTS.values()),
)
"""Every comparison between our functions and torch's."""
LONGEST = 4096  # bytes of a question; one is asked at a time


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


def answer(device: str, linger_s: float, answers: IO[str]) -> None:
    """Make the trials that are asked for on stdin."""
    while select.select([0], [], [], linger_s)[0] and (asked := os.read(0, LONGEST)):
        spoilt = False
        try:
            found = {"measured": main(device, asked.decode().strip())}
        except SystemExit as refusal:
            found = {"refused": str(refusal)}
        except RuntimeError as error:
            found, spoilt = {"refused": f"its trial ended: {error}"}, True
        answers.write(f"{json.dumps(found)}\n")
        answers.flush()
        if spoilt:
            return
        HELD.give_back()  # the worker needs it for weights


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # the output of libraries must not reach the reader of the result
    with os.fdopen(said, "w", encoding="utf-8") as stdout:
        answer(sys.argv[1], float(sys.argv[2]), stdout)
