"""Targets of one fingerprint: which of them gets the next session. They compute the same, so the
passes of one predict those of another up to a constant factor. Passes over more rows than any
target has had are not predicted: a guess from a few passes would send all sessions to the target
with the lower guess. The time of a pass is assumed to be proportional to its sessions, so that
equally fast targets get equally many. Pure."""

from collections.abc import Sequence

from dovetail.runtime.costs.pooled import slowness
from dovetail.runtime.fleet.peers import Worker

NOISE = 1.25  # ratio of pass times of targets that count as equally fast: noise is as large


def are_alike(targets: Sequence[Worker]) -> bool:
    """Return whether targets compute the same, and have no profiles of their passes."""
    return len({str(target.hello.fingerprint) for target in targets}) == 1 and not any(
        target.verifying.profiled for target in targets
    )


def next_of(targets: Sequence[Worker], context: int) -> Worker:
    """Return the target with the shortest rounds for one more session; of equals an unknown one."""
    known = [target for target in targets if target.verifying.known]
    if not known:
        return min(targets, key=lambda target: target.sessions)
    first = known[0].verifying.curve(context, usual=True)
    row_s = known[0].verifying.at(1, context)

    def round_s(target: Worker) -> tuple[float, bool]:
        factor = slowness(target.verifying.curve(context, usual=True), first)
        if 1.0 / NOISE < factor < NOISE:
            factor = 1.0
        return factor * row_s * (target.sessions + 1) + target.hop_s, target.verifying.known

    return min(targets, key=round_s)
