"""Tests our functions in another process, since a failing one breaks its device context."""

import subprocess
import sys
import time
from contextlib import suppress

from dovetail.workers.progress import beat

MODULE = "dovetail.workers.models.backends.device.trial"
LIMIT_S = 120.0  # a trial with compiling and torch's start takes about ten seconds
BEAT_S = 0.5
REFUSED = 1  # the exit code of a trial that ends with its reason


def tried(device: str, name: str, module: str = MODULE, limit_s: float = LIMIT_S) -> bytes | str:
    """Return the result of a trial of the functions `name` on a device; or how it failed. `module`:
    the program that makes it."""
    command = [sys.executable, "-P", "-m", module, device, name]
    end = time.monotonic() + limit_s
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            while time.monotonic() < end:
                beat()
                with suppress(subprocess.TimeoutExpired):
                    answer, errors = child.communicate(timeout=BEAT_S)
                    break
            else:
                return f"its trial did not end within {limit_s:.0f} s"
        finally:
            child.kill()  # has no effect once it has ended
    if answer and child.returncode == REFUSED:
        return answer.decode()
    lines = errors.decode(errors="replace").strip().splitlines() or ["it wrote nothing to stderr"]
    code = child.returncode
    return f"its trial ended with code {code}: {lines[-1]}" if code else answer
