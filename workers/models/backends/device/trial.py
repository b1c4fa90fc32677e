"""A trial of functions of ours on a device, in a process of its own.

`python -m dovetail.workers.models.backends.device.trial DEVICE NAME` proves and measures those of
one name, and prints what it has measured as JSON; else it ends with the reason on stderr.
`trying.py` runs it, once for a chip, a version of torch and a source; `choice.py` keeps what it
says.
"""

import json
import os
import sys

from dovetail.workers.devices import open_device
from dovetail.workers.models.backends.device import attention, choice, own_blocks, parts
from dovetail.workers.models.substitutes import coded

CONTESTS = (
    *(*choice.CONTESTS.values(), *choice.ROUNDED.values(), *coded.CONTESTS.values()),
    *(attention.CONTEST, parts.CONTEST, own_blocks.CONTEST),
)
"""Every contest between functions of ours and torch's."""


def main(device: str, name: str) -> str:
    """Prove and measure the functions of a contest on a device; `SystemExit` with the reason where
    they are not there or wrong."""
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
    """Make a trial in this process, which serves nobody; as `trying.tried`."""
    try:
        return main(device, name).encode()
    except (RuntimeError, SystemExit) as error:
        return f"its trial ended: {error}"


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not for who reads the result
    with os.fdopen(said, "w", encoding="utf-8") as stdout:
        stdout.write(main(*sys.argv[1:]))
