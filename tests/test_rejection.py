"""Acceptance by rejection, and every tree policy, over real processes and the embedded pair."""

import itertools
import json

import pytest

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.settings.tree import POLICIES
from dovetail.runtime.client import Client
from support.cases import everyday
from support.inflated import inflated
from support.losslessness import difference
from support.patience import PATIENCE_S
from support.stacks import running

PROMPTS = [
    json.loads(line)["turns"]
    for line in (DEMO_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
EAGLE_1 = TreeSettings(policy="static", insist=True, gamma=25, depth=5)
REJECTED = Sampling(temperature=1.0, acceptance="rejection")
TOKENS = 40


def ask(
    client: Client, prompt: int, *, sampling: Sampling, tree: TreeSettings | None, seed: int = 0
) -> Finished:
    request = client.submit(
        turns=PROMPTS[prompt][:1],
        sampling=sampling,
        max_tokens=TOKENS,
        seed=seed,
        tree=tree or TreeSettings(),
        speculate=tree is not None,
    )
    return client.complete(request)


@pytest.fixture(scope="module")
def alone(client: Client) -> dict[tuple[float, int], tuple[int, ...]]:
    """Return what the target alone says at each temperature to the first prompts."""
    places = itertools.product((0.0, 1.0), range(2))
    return {
        (t, prompt): ask(
            client, prompt, sampling=Sampling(temperature=t), tree=None
        ).result.token_ids
        for t, prompt in places
    }


def check_policy(
    client: Client, policy: str, alone: dict[tuple[float, int], tuple[int, ...]], accepts: int
) -> None:
    """Check that with trees of this policy the target says what it says alone, and that more than
    `accepts` nodes are accepted."""
    drafted = accepted = 0
    for (temperature, prompt), tokens in alone.items():
        for gamma, depth, width in ((25, 5, 10), (24, 8, 3)):
            tree = TreeSettings(
                policy=policy, gamma=gamma, depth=depth, width=width, insist=policy != "goodput"
            )
            finished = ask(client, prompt, sampling=Sampling(temperature=temperature), tree=tree)
            wrong = difference(finished, tokens)
            assert wrong is None, wrong
            drafted, accepted = (
                drafted + finished.result.drafted_tokens,
                accepted + finished.result.accepted_tokens,
            )
    assert drafted > 0
    assert accepted > accepts


@pytest.mark.parametrize(
    "policy", everyday((policy for policy in POLICIES if policy != "goodput"), "heterospec")
)
def test_output_is_the_same_with_every_policy_that_is_told_to_draft(
    client: Client, policy: str, alone: dict[tuple[float, int], tuple[int, ...]]
) -> None:
    check_policy(client, policy, alone, 40)


@pytest.mark.slow
def test_output_is_the_same_with_goodput_where_drafting_pays(
    alone: dict[tuple[float, int], tuple[int, ...]],
) -> None:
    """The target is inflated and writes the same."""
    with running({**inflated("96MiB"), "draft.device": "cpu"}) as larger:
        check_policy(larger, "goodput", alone, 0)


def test_interleaved_requests_of_both_rules_go_each_its_own_way(client: Client) -> None:
    alone = ask(client, 1, sampling=Sampling(temperature=1.0), tree=None, seed=3).result.token_ids
    samplings = [REJECTED, Sampling(temperature=1.0), REJECTED, Sampling(temperature=1.0)]
    requests = [
        client.submit(turns=PROMPTS[1][:1], sampling=s, max_tokens=TOKENS, seed=3, tree=EAGLE_1)
        for s in samplings
    ]
    finished: dict[int, Finished] = {}
    while len(finished) < len(requests):
        if isinstance(reply := client.receive(PATIENCE_S), Finished):
            finished[reply.request] = reply
    rejected, coupled, rejected_too, coupled_too = (finished[request] for request in requests)
    assert rejected.result.token_ids == rejected_too.result.token_ids
    for reply in (coupled, coupled_too):
        wrong = difference(reply, alone)
        assert wrong is None, wrong


def test_a_request_whose_rule_and_policy_do_not_go_together_is_refused(client: Client) -> None:
    with pytest.raises(RequestError, match=r"set tree\.policy to 'static', not 'budget'"):
        ask(client, 0, sampling=REJECTED, tree=TreeSettings(policy="budget", insist=True))
