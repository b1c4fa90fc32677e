"""The memory of a coordinator's process under large requests with short replies."""

import random
import string
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.served import QUESTION, ask, ready

MIB = 1 << 20
BOUND_MIB, REQUESTS, SIZE = 32, 60, 1_900_000


@pytest.mark.slow
def test_ended_replies_do_not_fill_the_process_of_a_coordinator(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """Each request has 1.9 MB of incompressible template values."""
    folder = tmp_path / "journal"
    server = start(
        *("serve", "--http.port", "0", "--json", "--coordinator.journal", str(folder)),
        *("--coordinator.memory", f"{BOUND_MIB}MiB"),
    )
    told = ready(server)
    process = psutil.Process(told["pids"]["coordinator"])
    before = process.memory_info().rss
    for number in range(REQUESTS):
        junk = "".join(random.Random(number).choices(string.ascii_letters, k=SIZE))
        body = {**QUESTION, "max_tokens": 1, "chat_template_kwargs": {"junk": junk}}
        status, _ = ask(told["url"], body=body)
        assert status == 200
    assert process.memory_info().rss - before < 2.5 * BOUND_MIB * MIB < REQUESTS * SIZE
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2 * BOUND_MIB * MIB
