"""The trial of a draft with `draft.device = auto`: before anything is served, the GPU must hold its
weights, a session and captured graphs, and compute a proposal. Otherwise the CPU drafts, which is
reported and noted in the profile file for `plan`. Every start tries the GPU again."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import MAX_SPANS, Draft, Feed, Hello, Open
from dovetail.protocol.profile import DraftFall, load_profile, rewrite_profile
from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.memory import HELD
from dovetail.workers.devices.opening import first_device
from dovetail.workers.draft import DraftWorker
from dovetail.workers.sessions.wire import narrowed, to_array

TOKENS = 2048  # tokens of the trial session
PROMPT = 512  # tokens of its prompt: prefill needs more memory at once than any other pass
CPU = "cpu"
Opened = DraftWorker[Any]


def open_where_it_fits(
    name: str, opened: Callable[[str], Opened], remember: Callable[[str, str], None]
) -> Opened:
    """Return the draft worker that `opened` makes for the name of a device: the first GPU if it can
    draft there, else the CPU. `remember`: called with the GPU and the reason why it does not draft
    (empty: it does). Raises `UserError` if the CPU cannot draft either."""
    if (device := first_device()) == CPU:
        return opened(CPU)
    try:
        worker = opened(device)
        with HELD.trial():
            try_out(worker)
        remember(device, "")
        return worker
    except (UserError, RuntimeError) as error:  # torch's own errors of devices are RuntimeErrors
        why = " ".join(str(error).split())[:300]
    HELD.let_go()
    remember(device, why)
    worker = opened(CPU)
    print(f"{name}: drafts on the CPU, because on {device}: {why}", file=sys.stderr)
    return worker


def fall_key(settings: DraftSettings, target: str, device: Device) -> tuple[str, ...]:
    """Return the key of a fallback to the CPU: the GPU, and the draft's configuration. `target`:
    the folder or hub id of its target."""
    driver = device.kind.driver(device.torch_device)
    return (device.library, driver, settings.model or settings.kind, target, settings.weights)


def remember_fall(profile: Path | None, key: tuple[str, ...], why: str) -> None:
    """Store why a draft fell back to the CPU; empty: the GPU drafts."""
    if profile is not None and load_profile(profile).fall_of(key) != why:
        rewrite_profile(profile, lambda known: known.holding(DraftFall(key=key, why=why)))


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
    worker.suspend().clear()
    worker.spans.take(MAX_SPANS)


def _vocabulary_size(hello: Hello) -> int:
    if hello.reads is not None:
        return hello.reads.vocabulary_size
    assert hello.vocabulary is not None
    return hello.vocabulary.size
