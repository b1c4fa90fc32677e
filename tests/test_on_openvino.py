"""Real processes whose head drafts by OpenVINO, on its CPU, write what the target writes alone, and
much of it is drafted."""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.cases import everyday
from support.losslessness import difference
from support.stacks import PROMPTS, complete_all, running

pytestmark = pytest.mark.skipif(
    find_spec("openvino") is None, reason="pip install 'dovetail[openvino]'"
)
TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=6, width=8)
TOKENS = 20


def replies(client: Client, **how: object) -> Sequence[Finished]:
    """A greedy reply and a sampled one side by side."""
    return complete_all(
        client,
        [
            client.submit(
                turns=PROMPTS[0][:1],
                sampling=Sampling(temperature=temperature, min_tokens=TOKENS),
                max_tokens=TOKENS,
                seed=5,
                **how,  # type: ignore[arg-type]
            )
            for temperature in (0.0, 1.0)
        ],
    )


@pytest.mark.parametrize("kind", everyday(["dovetail", "eagle"], "dovetail"))
def test_a_head_there_drafts_and_changes_nothing(kind: str) -> None:
    with running({"draft.kind": kind, "draft.device": "openvino:CPU"}) as client:
        there = replies(client, tree=TREE)
        alone = replies(client, tree=TreeSettings(), speculate=False)
        workers = [worker for worker in client.status().workers if "draft" in worker.roles]
        assert [worker.device for worker in workers] == ["openvino:CPU"]
        assert not client.status().faults
    for one, reference in zip(there, alone, strict=True):
        assert difference(one, reference.result.token_ids) is None
        assert one.result.draft_failure is None
        assert one.result.tau is not None
        assert one.result.tau > 1.5
