"""Servers that are started to be measured: ours and others, over HTTP."""

import compileall
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import psutil

import dovetail

PATIENCE_S = 600.0
PROMPT = "The sky is blue because"
TROUBLE = re.compile(r"WARNING|ERROR|alive but|restarted in|not started|giving up")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local URLs without a proxy."""


def own_places(folder: str) -> dict[str, str]:
    """Return the environment of a service whose caches, sockets and state are in a folder, and
    whose code is compiled once, as that of an installed package is."""
    places = {"XDG_RUNTIME_DIR": "run", "XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state"}
    Path(folder, "run").mkdir(mode=0o700)
    given = {**os.environ, **{name: str(Path(folder, at)) for name, at in places.items()}}
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    for part in ("protocol", "runtime", "workers", "launch"):
        compileall.compile_dir(Path(dovetail.__path__[0], part), quiet=2)
    return given


@contextmanager
def served(
    command: Sequence[str], port_option: str, given: Mapping[str, str], *, watched: bool = False
) -> Iterator[tuple[psutil.Process, str, float]]:
    """Run a server on a free port until the block ends; yields its process, its URL and the seconds
    until it was ready. `watched`: what its log says of trouble is printed when it has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, port_option, port], env=given, stdout=log, stderr=log, stdin=log
        )
        try:
            while not is_ready(address):
                if process.poll() is not None or time.monotonic() - began > PATIENCE_S:
                    log.seek(0)
                    text = log.read().decode(errors="replace")[-2000:]
                    raise click.ClickException(f"{' '.join(command)} is not ready: {text}")
                time.sleep(0.01)
            yield psutil.Process(process.pid), address, time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            for line in lines if watched else ():
                if TROUBLE.search(line):
                    click.echo(line, err=True)


def is_ready(address: str) -> bool:
    """Return whether a server answers requests."""
    for path in ("readyz", "health"):  # llama-server has only the second
        try:
            with DIRECT.open(f"{address}/{path}", timeout=5) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


def ask(url: str, body: Mapping[str, Any]) -> Any:
    """Send a POST and return the JSON of its reply."""
    content = json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with DIRECT.open(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def memory(process: psutil.Process) -> dict[str, float]:
    """Return the PSS in MB of a process and all its children, by their names."""
    sizes: dict[str, float] = {}
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a renderer of templates ends by itself
            name, size = one.name(), one.memory_full_info().pss / 1e6
            sizes[name] = sizes.get(name, 0.0) + size
    return sizes
