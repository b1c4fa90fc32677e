"""A `dovetail serve` with the embedded models, for as long as a block runs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_S = 30.0


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Its URL; it has a runtime directory of its own, so that it meets no other server of this
    user."""
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        command = [
            sys.executable,
            "-P",
            "-m",
            "dovetail.launch.cli",
            "serve",
            "--json",
            "--http.port",
            "0",
            "--http.model",
            "dovetail",
            "--draft.device",
            "cpu",
            "--policy",
            "dynamic",
            "--tree.insist",  # a busy machine, where drafting does not pay, is drafted for too
            "true",
            *flags,
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": folder},
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"dovetail serve ended with exit code {process.wait()}")
            yield json.loads(line)["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(ENDING_S)
            process.stdout.close()
