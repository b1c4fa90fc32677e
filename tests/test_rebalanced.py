"""Two targets, of which one is killed and comes back while replies are decoded: they go on on the
other one, go back to it, and nobody who reads them can tell."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from dovetail.launch.processes.stack import POLL_S
from dovetail.launch.processes.supervise import Child
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.inflated import inflated
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, complete_all, growing, submit, wait_for

STREAMS, TOKENS = 8, 160
CORES = sorted(os.sched_getaffinity(0))
TREE = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2)


def ask(client: Client, tokens: int) -> list[int]:
    """Greedy requests and sampled ones, drafted for and not."""
    return [
        submit(
            client,
            PROMPTS[number % 4],
            sampling=Sampling(temperature=float(number % 2), min_tokens=tokens),
            tokens=tokens,
            seed=number,
            tree=TREE if number % 4 < 2 else None,
        )
        for number in range(STREAMS)
    ]


def held(client: Client, target: Child) -> int:
    """Return how many sessions a target has; 0: it is not there."""
    workers = client.status().workers
    return sum(worker.sessions for worker in workers if worker.pid == target.process.pid)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="targets on the same core take from each other")
def test_replies_go_back_to_a_target_that_is_there_again_as_if_nothing_had_been(
    client: Client,
) -> None:
    """The target that returns is a process that was stopped until then: loading a model anew would
    take longer than the replies. What they are is known from a target that is alone and not
    inflated."""
    whole = complete_all(client, ask(client, TOKENS))
    flags = {**inflated("64MiB"), "draft.device": "cpu", "target.threads": "1"}
    with growing(flags) as (stack, moved, another), stack.connect() as onlooker:
        targets = [another("target", cores=str(CORES[1])) for _ in range(2)]
        first, again = (wait_for(onlooker, target) for target in targets)
        again.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: len(onlooker.status().workers) == 3, "it is not missed")
        requests = ask(moved, TOKENS)
        wait_until(lambda: held(onlooker, first) > 0, "it gets no sessions")
        first.process.kill()
        first.process.wait()
        again.process.send_signal(signal.SIGCONT)
        ends = complete_all(moved, requests)
        assert onlooker.status().totals.rebalanced > 0
    assert [(end.result.token_ids, end.result.text, end.margins) for end in ends] == [
        (end.result.token_ids, end.result.text, end.margins) for end in whole
    ]
