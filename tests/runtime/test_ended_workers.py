"""Workers that end over tcp: the coordinator says that they have disconnected, whatever it knows of
their keys."""

import logging
import select
import time
from pathlib import Path

import pytest

from dovetail.protocol.codec import encode
from dovetail.protocol.keys import generate_keys
from dovetail.protocol.links import open_hub, open_link
from dovetail.runtime.engine.coordinator import Coordinator
from support.patience import PATIENCE_S
from support.scripted import hello


def test_a_worker_that_has_gone_has_not_lost_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate_keys(keys := tmp_path / "keys")
    caplog.set_level(logging.INFO)
    hub = open_hub("tcp://127.0.0.1:*", keys=keys)
    link = open_link(hub.address, keys=keys, role="draft")
    try:
        coordinator, end_s = Coordinator(hub), time.monotonic() + PATIENCE_S
        link.send(encode(hello("draft", epoch=1, vocabulary=None)))
        while not coordinator.registry.workers:
            coordinator.pump()
            assert time.monotonic() < end_s
        link.close()
        while coordinator.registry.workers:
            select.select([hub.monitor_fileno()], [], [], 0.1)
            coordinator.look_around()
            assert time.monotonic() < end_s
    finally:
        link.close()
        hub.close()
    assert "disconnected" in caplog.text
    assert "lost its key" not in caplog.text
