"""Tokens are the same wherever the target's layers are: split, resident, streamed, and with prompts
that a device reads; over real processes and the embedded pair.

The CPU stands for the device here, and computes the same bytes: fingerprints are equal, and so is
every token.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.kernels import needs_kernels
from support.stacks import PROMPTS, running, started, submit

pytestmark = needs_kernels

LAYERS = 8
"""The number of the embedded target's layers."""
TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=10)
TOKENS = 40
CPU = {"draft.device": "cpu"}
SPLITS = {
    f"split after {LAYERS - n}": {"target.split.device": "cpu", "target.split.layers": str(n)}
    for n in (1, 4, LAYERS - 1)
}
STREAMED = {f"{n} of {LAYERS} resident": {"target.resident": str(n)} for n in (0, 4, LAYERS)}
MIXED = {
    "mixed": {"target.split.device": "cpu", "target.split.layers": "5", "target.resident": "2"},
    "within a limit": {"target.split.device": "cpu", "memory.vram": "29MiB"},
    "streamed within a limit": {
        "target.split.device": "cpu",
        "target.split.layers": str(LAYERS),
        "memory.vram": "31MiB",
    },
    "prompts read": {"target.prefill": "cpu"},
    "all at once": {
        "target.split.device": "cpu",
        "target.split.layers": "4",
        "target.resident": "1",
        "target.prefill": "cpu",
    },
}
PLACEMENTS = {**SPLITS, **STREAMED, **MIXED}
CASES = [("fp32", placement) for placement in PLACEMENTS]
CASES += [
    (weights, placement)
    for weights in ("half", "int8")
    for placement in ("0 of 8 resident", "mixed")
]


def complete(
    client: Client, turns: Sequence[str], *, temperature: float, tree: TreeSettings | None = TREE
) -> Finished:
    sampling = Sampling(temperature=temperature)
    return client.complete(
        submit(client, turns, sampling=sampling, tokens=TOKENS, seed=9, tree=tree)
    )


Told = dict[tuple[int, float], tuple[str, tuple[int, ...]]]


def told_by(client: Client, tree: TreeSettings | None, prompts: int = 2) -> Told:
    """Fingerprint and tokens by prompt and temperature."""
    results = {
        (n, t): complete(client, PROMPTS[n], temperature=t, tree=tree).result
        for n in range(prompts)
        for t in (0.0, 1.0)
    }
    return {place: (result.fingerprint, result.token_ids) for place, result in results.items()}


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Iterator[tuple[str, Told]]:
    """Yield what the target says as a whole and alone, by type of weights."""
    with running({**CPU, "target.weights": request.param}) as client:
        yield request.param, told_by(client, None)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "placement"), CASES, indirect=["whole"])
def test_every_placement_writes_the_same_as_the_whole(
    whole: tuple[str, Told], placement: str
) -> None:
    weights, expected = whole
    with running({**CPU, "target.weights": weights, **PLACEMENTS[placement]}) as client:
        assert told_by(client, TREE) == expected
        assert [
            worker.placement != "" for worker in client.status().workers if "target" in worker.roles
        ] == [True]


@pytest.mark.slow
def test_a_target_is_swapped_for_one_that_is_placed_otherwise(client: Client) -> None:
    expected = told_by(client, None)
    with started({**CPU, **PLACEMENTS["mixed"]}) as (stack, spread):
        before = told_by(spread, TREE)
        flags = ["--target.split.device=cpu", "--target.split.layers=2", "--target.resident=auto"]
        command = ["swap", "--role=target", "--json", f"--connect={stack.address}", *flags]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dovetail.launch.cli", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)
        (target,) = [worker for worker in spread.status().workers if "target" in worker.roles]
        assert target.placement == "cpu 0-5, cpu 6-7 (2 resident) and head"
        assert before == told_by(spread, TREE) == expected
