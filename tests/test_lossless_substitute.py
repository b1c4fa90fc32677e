"""The promise with a target's own substitute as the draft: the same tokens from a process of its
own, and from one that shares everything with the target."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.losslessness import difference, given_up
from support.stacks import PROMPTS, complete_all, running, submit

SUBSTITUTE = {"draft.kind": "substitute", "draft.device": "cpu"}
SHARED = {**SUBSTITUTE, "draft.share": "true"}
DYNAMIC = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=4)
BEAM = TreeSettings(policy="beam", insist=True, gamma=288, depth=48, width=6)
"""SubSpec's."""
TREES = {
    "dynamic": DYNAMIC,
    "static": TreeSettings(policy="static", insist=True, gamma=12, depth=4, width=4),
    "budget": TreeSettings(policy="budget", insist=True, gamma=32, depth=8, width=8),
    "goodput": TreeSettings(),
    "beam": BEAM,
    "narrow": TreeSettings(policy="dynamic", insist=True, gamma=1, depth=1, width=1),
}
TOKENS = 48


def complete(
    client: Client,
    turns: list[str],
    *,
    tree: TreeSettings | None = None,
    tokens: int = TOKENS,
    **sampling: object,
) -> Finished:
    return client.complete(
        submit(
            client,
            turns,
            sampling=Sampling.model_validate(sampling),
            tokens=tokens,
            seed=5,
            tree=tree,
        )
    )


SAMPLINGS: Sequence[dict[str, object]] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.9},
)


def check(
    flags: dict[str, str],
    trees: dict[str, TreeSettings],
    *,
    alone: Client,
    tokens: int = TOKENS,
    samplings: Sequence[dict[str, object]] = SAMPLINGS,
) -> float:
    """Every tree gives what the target alone gives, at both temperatures, one request at a time and
    several at once; tau of all of them."""
    committed = rounds = late = 0
    with running(flags) as drafted:
        for options in samplings:
            wanted = {
                str(turns): complete(alone, turns, tokens=tokens, **options).result.token_ids
                for turns in PROMPTS[:2]
            }
            for name, tree in trees.items():
                for turns in PROMPTS[:2]:
                    finished = complete(drafted, turns, tree=tree, tokens=tokens, **options)
                    wrong = difference(finished, wanted[str(turns)])
                    assert wrong is None, f"{flags}, {name}, {options}, {turns}: {wrong}"
                    committed, rounds = (
                        committed + len(finished.result.token_ids) - 1,
                        rounds + finished.result.rounds,
                    )
                    late += given_up(finished, tree)
                together = [
                    submit(
                        drafted,
                        turns,
                        sampling=Sampling.model_validate(options),
                        tokens=tokens,
                        seed=5,
                        tree=tree,
                    )
                    for turns in PROMPTS[:2] * 2
                ]
                for finished, turns in zip(
                    complete_all(drafted, together), PROMPTS[:2] * 2, strict=True
                ):
                    assert difference(finished, wanted[str(turns)]) is None, (
                        f"{flags}, {name}, {options}, side by side"
                    )
                    late += given_up(finished, tree)
        status = drafted.status()
        assert 0 <= status.stale <= late
        assert status.reasons == ()
    return committed / rounds


def test_one_process_with_both_roles_changes_nothing_and_saves_target_passes(
    client: Client,
) -> None:
    assert (
        check(SHARED, {"dynamic": DYNAMIC}, alone=client, tokens=24, samplings=SAMPLINGS[2:]) > 3.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SUBSTITUTE, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("name", TREES)
def test_no_tree_of_a_substitute_changes_a_token(
    client: Client, flags: dict[str, str], name: str
) -> None:
    check(flags, {name: TREES[name]}, alone=client)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [SUBSTITUTE, SHARED], ids=["apart", "shared"])
@pytest.mark.parametrize("weights", ["int8", "int3", "int2"])
def test_no_weights_of_a_substitute_change_a_token(
    client: Client, flags: dict[str, str], weights: str
) -> None:
    check({**flags, "draft.weights": weights}, {"dynamic": DYNAMIC}, alone=client)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["half", "int8"])
def test_a_target_of_other_weights_shares_with_its_substitute(weights: str) -> None:
    with running({"target.weights": weights, "draft.kind": "none"}) as alone:
        check({**SHARED, "target.weights": weights}, {"dynamic": DYNAMIC}, alone=alone)


@pytest.mark.slow
@pytest.mark.parametrize("resident", ["0", "3"])
def test_a_target_that_streams_shares_its_resident_layers_with_its_substitute(
    client: Client, resident: str
) -> None:
    """The CPU stands for the GPU: all layers are its own, so many keep their weights, and the
    others stream."""
    streamed = {
        "target.split.device": "cpu",
        "target.split.layers": "8",
        "target.resident": resident,
    }
    check({**SHARED, **streamed}, {"dynamic": DYNAMIC}, alone=client)


def test_a_draft_that_shares_is_of_a_substitute(tmp_path: Path) -> None:
    from dovetail.protocol.errors import SettingsError

    for flags, words in (
        (
            {"draft.share": "true"},
            "draft.share = true needs draft.kind = 'substitute' or a Gemma 4 assistant, not 'auto'",
        ),
        (
            {**SUBSTITUTE, "draft.model": str(tmp_path)},
            "draft.kind = 'substitute' is made from the target: leave draft.model .* out",
        ),
        (
            {**SUBSTITUTE, "draft.weights": "fp16"},
            "draft.weights = 'fp16': a substitute has int8, int4, int3 or int2",
        ),
        (
            {**SHARED, "target.device": "cuda:0"},
            "draft.device is 'cpu', but a draft in its target's process uses the target's",
        ),
    ):
        with pytest.raises(SettingsError, match=words), running(flags):
            pass
