"""The account that real processes give of their time: a round's spans add up to it, and to what the
workers say that they were busy."""

from pathlib import Path

import psutil
import pytest

from benchmarks.figures import ADDS_UP
from benchmarks.observed import WORK, everything, overlap, sums, watched
from dovetail.protocol.messages import Seen
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import NAMES
from dovetail.runtime.client import Client
from support.inflated import inflated
from support.stacks import PROMPTS, running

TREE = TreeSettings(policy="dynamic", insist=True, gamma=8, depth=5, width=6)
PASS = {"linears", "attention", "other", "head"}


def busy(seen: Seen) -> dict[str, tuple[int, int]]:
    return {worker.name: (worker.at_ns, worker.busy_ns) for worker in seen.workers}


def waiting_ns() -> int:
    """Return how long the threads of this process and its children have waited for a core."""
    return sum(
        int(file.read_text().split()[1])
        for process in (psutil.Process(), *psutil.Process().children(recursive=True))
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    )


def probed_again(client: Client, before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return what the workers say once each has been asked anew."""
    while any(now[0] <= before[name][0] for name, now in busy(client.look(spans=False)).items()):
        pass
    return busy(client.look())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "library"])
def test_a_rounds_spans_add_up_to_it_and_to_what_the_workers_were_busy(backend: str) -> None:
    with running(
        {
            **inflated("64MiB"),
            "draft.ahead": "true",
            "target.backend": backend,
        }
    ) as client:
        turns = PROMPTS[0][:1]
        client.complete(client.submit(turns=turns, sampling=Sampling(), max_tokens=16, tree=TREE))
        before = probed_again(client, busy(client.look(spans=True)))
        waited = -waiting_ns()
        rounds, spans = watched(
            client,
            lambda: client.submit(
                turns=turns, sampling=Sampling(), max_tokens=96, tree=TREE, ahead=True
            ),  # by itself nothing grows ahead on cores that both share
        )
        waited += waiting_ns()
        after = probed_again(client, busy(client.look(spans=True)))
        _, late, _ = everything(client)

    found = sums(rounds, spans)
    assert len(found) > 8
    assert all(one.explained <= 1.0 + ADDS_UP for one in found), "nothing is counted twice"
    # on a busy machine rounds are interrupted between two spans, while a process waits for a core
    whole = (1 - ADDS_UP) * sum(one.wall_ns for one in found) - waited
    assert sum(sum(one.parts.values()) for one in found) >= whole
    assert sum(one.covered_ns for one in found) >= whole
    assert {seen.span[0] for seen in spans} <= set(NAMES)
    assert {seen.span[0] for seen in spans} >= {
        "draft",
        "root",
        "level",
        "move",
        "grow",
        "decode",
        "encode",
        "send",
        "choose",
        "commit",
        *PASS,
    }

    for process, names in (
        ("target", (*WORK["target"], "prepare")),
        ("draft", (*WORK["draft"], "grow", "prepare")),
    ):
        (from_ns, busy_then), (to_ns, busy_now) = before[process], after[process]
        own = [
            seen for seen in late if seen.process == process and seen.span[0] in (*names, "prefill")
        ]
        share = (busy_now - busy_then) / (to_ns - from_ns)
        assert overlap(own, from_ns, to_ns) / (to_ns - from_ns) == pytest.approx(share, abs=0.05)
    passes = [seen for seen in spans if seen.span[0] == "verify"]
    parts = [
        [
            s.span[2]
            for s in spans
            if (s.process, s.round) == (one.process, one.round) and s.span[0] in (*PASS, "choose")
        ]
        for one in passes
    ]
    assert all(sum(its) <= one.span[2] for one, its in zip(passes, parts, strict=True))
    assert sum(map(sum, parts)) >= 0.9 * sum(one.span[2] for one in passes) - waited
