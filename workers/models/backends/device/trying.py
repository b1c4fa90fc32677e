"""Has functions of ours tried in a process of its own: one that fails on a device takes its context
with it, and no worker shall end by that."""

import subprocess
import sys
import time

from dovetail.workers.progress import beat

MODULE = "dovetail.workers.models.backends.device.trial"
LIMIT_S = 120.0
"""Compiling, torch's start and the measurement take about ten seconds."""
BEAT_S = 0.5


def tried(device: str, name: str) -> bytes | str:
    """Return what a trial of the functions `name` has measured; or how it failed."""
    command = [sys.executable, "-P", "-m", MODULE, device, name]
    end = time.monotonic() + LIMIT_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while True:
            beat()
            try:
                found, said = process.communicate(timeout=BEAT_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    process.kill()
                    return f"its trial did not end within {LIMIT_S:.0f} s"
    if process.returncode == 0:
        return found
    lines = said.decode(errors="replace").strip().splitlines()
    return f"its trial ended with code {process.returncode}: {lines[-1] if lines else 'no word'}"
