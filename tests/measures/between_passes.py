"""Measures the time between the passes of a target: messages and the coordinator.

    python tests/measures/between_passes.py SETTING=VALUE...

Real processes with these settings, such as target.model=FILE draft.kind=none, decode the shipped
prompts one after the other. It prints the rates, and microseconds per round at some percentiles:
`between` is everything except passes and drafting. It can be 0, since a pass that was requested
early begins before the last verdict has reached the coordinator.
"""

import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if str(TESTS) not in sys.path:
    sys.path[0] = str(TESTS)
if importlib.util.find_spec("dovetail") is None:
    importlib.import_module("conftest")  # gives a bare checkout its import name

from dovetail.protocol.messages import Finished, Recorded, RoundRecord  # noqa: E402
from dovetail.protocol.settings import Sampling  # noqa: E402
from support.patience import PATIENCE_S  # noqa: E402
from support.stacks import PROMPTS, started  # noqa: E402

PERCENTILES = 10, 25, 50, 75, 90
TOKENS = 100


def main(flags: dict[str, str]) -> None:
    rounds, rates = list[RoundRecord](), list[str]()
    with started(flags) as (_, client):
        for turn, prompt in enumerate([*PROMPTS[:1], *PROMPTS[:5]]):
            client.submit(turns=prompt, sampling=Sampling(), max_tokens=TOKENS, seed=1, record=True)
            own = list[RoundRecord]()
            while not isinstance(reply := client.receive(PATIENCE_S), Finished):
                own += [reply.record] if isinstance(reply, Recorded) else []
            if turn:  # the first one warms up
                rounds += own
                rates.append(f"{reply.result.tokens_per_s:.1f}")
    sys.stdout.write(f"tokens/s {' '.join(rates)}\n{len(rounds)} rounds, at % {PERCENTILES}\n")
    for name, ns in (
        ("between", [one.transport_ns + one.coordinator_ns for one in rounds]),
        ("coordinator", [one.coordinator_ns for one in rounds]),
        ("pass", [one.verify_ns for one in rounds]),
    ):
        at = [sorted(ns)[len(ns) * percent // 100] for percent in PERCENTILES]
        sys.stdout.write(f"{name:12}{''.join(f'{value / 1000:8.0f}' for value in at)}\n")


if __name__ == "__main__":
    main(dict(setting.split("=", 1) for setting in sys.argv[1:]))
