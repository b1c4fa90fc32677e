"""The account that real processes give of their time: a round's spans add up to it, and to what the
workers say that they were busy."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from dovetail.protocol.messages import Seen, SeenRound, SeenSpan
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import NAMES
from dovetail.runtime.client import Client
from dovetail.runtime.telemetry.event_log import OURS
from support.inflated import inflated
from support.stacks import PROMPTS, running

TREE = TreeSettings(policy="dynamic", insist=True, gamma=8, depth=5, width=6)
PASS = {"linears", "attention", "other", "head"}

ADDS_UP = 0.02
"""By how much the parts of a round may miss it."""
BETWEEN = ("handle", "queue", "link", "lost")
"""The parts of a round beside the work that it waits for."""
WORK = {"draft": ("draft",), "target": ("verify", "commit")}
"""The spans of a worker that a round waits for, by the role in which it does them; others lie
within them or beside them."""


@dataclass(frozen=True)
class Sum:
    """A round: nanoseconds from the verdict before it to its own, and of each kind of span
    within."""

    wall_ns: int
    parts: Mapping[str, int]
    covered_ns: int
    """Nanoseconds of the round that these spans cover, as far as the clocks of all processes are
    one."""
    spans: int
    """The number of spans of any kind that were recorded of the round."""

    @property
    def explained(self) -> float:
        """The sum of the parts over the round."""
        return sum(self.parts.values()) / self.wall_ns


def sums(rounds: Sequence[SeenRound], spans: Sequence[SeenSpan]) -> list[Sum]:
    """Every round that follows another one of its session; spans of passes that several sessions
    share belong to none, and so does such a round."""
    about: dict[tuple[int | None, int | None], list[SeenSpan]] = {}
    for seen in spans:
        about.setdefault((seen.session, seen.round), []).append(seen)
    found = []
    for number in dict.fromkeys(seen.session for seen in rounds):
        for before, this in pairwise(seen for seen in rounds if seen.session == number):
            its = about.get((number, this.record.round), [])
            told = [
                seen
                for seen in its
                if seen.span[0]
                in (BETWEEN if seen.process == OURS else (*WORK["draft"], *WORK["target"]))
            ]
            parts = Counter[str]()
            for seen in told:
                parts[seen.span[0]] += seen.span[2]
            if parts["verify"] and this.record.round == before.record.round + 1:
                found.append(
                    Sum(
                        this.at_ns - before.at_ns,
                        parts,
                        overlap(told, before.at_ns, this.at_ns),
                        len(its),
                    )
                )
    return found


def overlap(spans: Iterable[SeenSpan], start_ns: int, end_ns: int) -> int:
    """Nanoseconds of an interval that spans cover, overlapping ones once."""
    covered, until = 0, start_ns
    for begin, end in sorted(
        (max(s.span[1], start_ns), min(s.span[1] + s.span[2], end_ns)) for s in spans
    ):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def everything(client: Client, after: int = 0) -> tuple[list[SeenRound], list[SeenSpan], int]:
    """All that there is to be seen behind a number, and what to ask with next."""
    rounds, spans, more = list[SeenRound](), list[SeenSpan](), True
    while more:
        seen = client.look(after, spans=True)
        rounds += seen.rounds
        spans += seen.spans
        after, more = seen.next, seen.more
    return rounds, spans, after


def watched(client: Client, submit: Callable[[], int]) -> tuple[list[SeenRound], list[SeenSpan]]:
    """The rounds and the spans of one request, while all of them are recorded."""
    *_, after = everything(client)
    client.complete(submit())
    rounds, spans, _ = everything(client, after)
    return rounds, spans


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
    with running({**inflated("64MiB"), "draft.ahead": "true", "target.backend": backend}) as client:
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
