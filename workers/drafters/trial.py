"""The trial of a draft with `draft.device = auto`. Before anything is served, the GPU has to hold
its weights, a session and the graphs that are captured for it, and to compute a proposal; else the
CPU drafts, and a line says why."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import MAX_SPANS, Draft, Feed, Hello, Open
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.workers.devices import first_device
from dovetail.workers.devices.memory import HELD
from dovetail.workers.draft import DraftWorker
from dovetail.workers.sessions.wire import narrowed, to_array

TOKENS = 2048
"""Tokens of the session that has to fit."""
PROMPT = 512
"""Tokens of its prompt: a pass over a part of it needs more memory at once than any other."""
CPU = "cpu"
Opened = DraftWorker[Any]


def open_where_it_fits(name: str, opened: Callable[[str], Opened]) -> Opened:
    """Return the draft worker that `opened` opens on the device of a name: the first GPU if it can
    draft there, else the CPU. `UserError` where it cannot be opened there either."""
    if (device := first_device()) == CPU:
        return opened(CPU)
    try:
        worker = opened(device)
        with HELD.trial():
            try_out(worker)
        return worker
    except (UserError, RuntimeError) as error:  # torch's own errors of devices are RuntimeErrors
        why = " ".join(str(error).split())[:300]
    HELD.let_go()
    worker = opened(CPU)
    print(f"{name}: drafts on the CPU, because on {device}: {why}", file=sys.stderr)
    return worker


def try_out(worker: Opened) -> None:
    """Draft once for a session of the usual length; any exception means that the draft cannot run
    on its device."""
    hello, tree = worker.hello(0), TreeSettings()
    reads, limits = hello.reads, hello.limits
    assert limits is not None
    tokens = min(TOKENS, limits.context)
    prompt = (0,) * min(PROMPT, tokens // 2)
    session: dict[str, Any] = {"epoch": 0, "session": 0}
    order = Open(
        **session,
        key=bytes(16),
        prompt=prompt,
        capacity=tokens,
        vocabulary_size=_vocabulary_size(hello),
        sampling=Sampling(),
        tree=tree,
        features=reads,
    )
    worker.handle(order)
    if reads is not None:
        features = torch.zeros(len(prompt), reads.row)
        worker.handle(Feed(**session, start=0, features=to_array(narrowed(features, reads.dtype))))
    draft = Draft(
        **session,
        round=1,
        prefix=len(prompt) + 1,
        accepted=(),
        bonus=0,
        max_nodes=tree.most_nodes,
        max_depth=tree.most_levels,
        max_width=tree.width,
    )
    worker.handle(draft)
    worker.forget()
    worker.spans.take(MAX_SPANS)


def _vocabulary_size(hello: Hello) -> int:
    if hello.reads is not None:
        return hello.reads.vocabulary_size
    assert hello.vocabulary is not None
    return hello.vocabulary.size
