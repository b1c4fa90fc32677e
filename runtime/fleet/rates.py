"""The predicted rates by which workers are chosen, and which targets are alike. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from dovetail.runtime.control.pairs import Pair
from dovetail.runtime.costs.pooled import slowness
from dovetail.runtime.fleet.peers import Worker

NOISE = 1.25  # ratio of pass times up to which targets count as equally fast: noise is as large


def are_alike(targets: Sequence[Worker]) -> bool:
    """Return whether targets compute the same bytes, and have no profiles of their passes."""
    return len({str(target.hello.fingerprint) for target in targets}) == 1 and not any(
        target.verifying.profiled for target in targets
    )


def next_of(targets: Sequence[Worker], context: int) -> Worker:
    """Return the target whose rounds with one more session are shortest; unmeasured ones win
    ties."""
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


ROWS = 4.0  # rows of a session in a pass, if no pair has measured them

Peers = tuple[bytes, bytes]  # the addresses of a draft and a target


def candidates(workers: Iterable[Worker], role: str) -> list[Worker]:
    """Return the workers of a role that may get one more session."""
    return [
        worker
        for worker in workers
        if worker.plays(role) and worker.available and worker.sessions < worker.limits.sessions
    ]


def best(workers: Sequence[Worker], rates: Sequence[float]) -> Worker | None:
    """Prefer the best rate if all are known, else the fewest sessions, then an unmeasured one."""
    known = all(rates)
    ranked = [
        (-rate if known else 0.0, worker.sessions, rate > 0.0, place)
        for place, (worker, rate) in enumerate(zip(workers, rates, strict=True))
    ]
    return workers[min(ranked)[-1]] if ranked else None


def target_rate(target: Worker, pairs: Mapping[Peers, Pair], context: int) -> float:
    """Return rounds/s with one more session of the usual number of rows; 0: unknown."""
    if not target.verifying.known:
        return 0.0
    gammas = [
        pair.gamma.value
        for (_, peer), pair in pairs.items()
        if peer == target.peer and pair.gamma.known
    ]
    rows = 1.0 + sum(gammas) / len(gammas) if gammas else ROWS
    return 1.0 / (target.verifying.at(round(rows * (target.sessions + 1)), context) + target.hop_s)


def draft_rate(draft: Worker, target: Worker, pair: Pair | None, context: int) -> float:
    """Return tokens/s of one more session; 0: unknown. Unless passes are shared, drafting waits."""
    if pair is None or not (pair.rounds and pair.costs.exposed_s.known and target.verifying.known):
        return 0.0
    verify_s = target.verifying.at(round((1.0 + pair.gamma.value) * (target.sessions + 1)), context)
    level_s = pair.costs.level_s(1)
    longer = pair.costs.level_s(draft.sessions + 1) / level_s if level_s else draft.sessions + 1
    draft_s = pair.costs.exposed_s.value * longer
    return pair.tokens.value / (verify_s + draft_s + draft.hop_s + target.hop_s)
