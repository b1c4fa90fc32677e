"""A draft worker that is stuck in its first draft, and the messages that have it draft."""

import sys

from dovetail.protocol.messages import Command, Draft, Open
from dovetail.protocol.settings import Sampling, TreeSettings

SCRIPT = """
from dovetail.launch import cli
from dovetail.workers.drafters.ngram import Lookup

def propose_for_ever(*arguments, **named):
    print("stuck", flush=True)
    while True:
        pass

Lookup.draft = propose_for_ever
cli.main()
"""
COMMAND = (sys.executable, "-P", "-c", SCRIPT)
"""A command line whose worker, a look-up, prints a line and then never proposes anything."""
HASTE = """
import builtins, threading, types
from dovetail.workers import progress

begun = threading.Event()

def print(*arguments, **named):
    builtins.print(*arguments, **named)
    begun.set()

progress.time = types.SimpleNamespace(sleep=lambda seconds: begun.wait())
"""
HASTENED = (sys.executable, "-P", "-c", HASTE + SCRIPT)
"""The command with a watchdog whose time stands still until the worker is stuck, and then flies."""


def opening() -> tuple[Command, Command]:
    """Return what opens a session and asks for its first draft, of a coordinator of epoch 1."""
    session = Open(
        epoch=1,
        session=1,
        key=bytes(16),
        prompt=(5, 6, 7),
        capacity=20,
        vocabulary_size=9,
        sampling=Sampling(),
        tree=TreeSettings(),
    )
    draft = Draft(
        epoch=1,
        session=1,
        round=1,
        prefix=4,
        accepted=(),
        bonus=5,
        max_nodes=4,
        max_depth=2,
        max_width=2,
    )
    return session, draft
