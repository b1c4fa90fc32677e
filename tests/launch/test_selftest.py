"""`dovetail selftest`: token ids with and without speculation."""

import json
import shlex
import subprocess
from collections.abc import Callable

import pytest

from dovetail.launch.checks.agreement import EXACT, REPLY
from dovetail.launch.commands.selftest import drafting_tree, refuse_lossy
from dovetail.launch.processes.stack import Stack
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Finished, Result
from dovetail.runtime.session.comparison import Difference, first_difference

Run = Callable[..., subprocess.CompletedProcess[str]]


def finished(tokens: list[int], margins: list[float]) -> Finished:
    required = (name for name, info in Result.model_fields.items() if info.is_required())
    nothing = dict.fromkeys(required, 0)
    lists = {
        "token_ids": tuple(tokens),
        "completion_tokens": len(tokens),
        "accepted_per_position": (),
    }
    result = Result.model_validate(
        {**nothing, **lists, "text": "", "finish_reason": "length", "fingerprint": ""}
    )
    return Finished(epoch=0, request=1, result=result, margins=tuple(margins))


def test_the_embedded_pair_passes_and_its_target_agrees_with_transformers(
    run: Run, stack: Stack
) -> None:
    done = run(
        "selftest",
        "--connect",
        stack.address,
        *shlex.split("--limit 1 --max-tokens 10 --text-tokens 40 --json"),
    )
    assert done.returncode == 0, done.stderr
    assert "comparing the target's log-probabilities of a text" in done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert len(report["checks"]) == 12
    assert all(
        list(check) == ["case", "ok", "tokens", "margin", "draft_failure"] and check["tokens"] > 0
        for check in report["checks"]
    )
    found = report["transformers"]
    assert (found["ok"], found["tokens"], found["first"]) == (True, 40 + REPLY - 1, None)
    assert 0 < found["largest"] < EXACT


def test_the_table_names_the_cases(invoke: Run, stack: Stack) -> None:
    done = invoke(
        "selftest",
        "--connect",
        stack.address,
        *shlex.split("--limit 1 --max-tokens 4 --text-tokens 0"),
    )
    assert "temperature 1 top_p 0.9 · gamma 15 depth 8 width 10" in done.stdout
    assert "temperature 0 repetition_penalty 1.2 min_tokens 4 · " in done.stdout
    assert "logit_bias 2 · " in done.stdout
    assert "the target was not compared with transformers: --text-tokens is 0" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == "the target and its draft are ready"
    assert [line for line in lines if line.startswith("case 12 of 12: temperature 1 · gamma 59")]


def test_a_target_that_is_not_lossless_is_refused_with_the_remedy(stack: Stack) -> None:
    with stack.connect() as client:
        target, draft = (
            next(worker for worker in client.status().workers if worker.roles == (role,))
            for role in ("target", "draft")
        )
    refuse_lossy([target, draft])
    lossy = target.model_copy(
        update={"fingerprint": target.fingerprint.replace("/fp32/", "/int8-per-tensor/")}
    )
    with pytest.raises(UserError, match=r"not lossless.* use --weights int8, half or fp32"):
        refuse_lossy([draft, lossy])


@pytest.mark.slow
def test_processes_whose_target_is_not_lossless_are_not_tested(run: Run) -> None:
    done = run("selftest", "--weights", "int8-per-tensor", "--limit", "1")
    assert done.returncode == 2
    assert "not lossless" in done.stderr
    assert "use --weights int8, half or fp32" in done.stderr


def test_what_is_compared_is_drafted_whether_that_pays_or_not_unless_a_policy_is_named() -> None:
    for flags, policy in (
        ({}, "dynamic"),
        ({"tree.policy": "budget"}, "budget"),
        ({"tree.policy": "goodput"}, "goodput"),
    ):
        assert drafting_tree(configure(flags=flags, environment={})).policy == policy


def test_equal_tokens_do_not_differ() -> None:
    assert first_difference(finished([1, 2], [1.0, 1.0]), finished([1, 2], [1.0, 0.5])) is None


@pytest.mark.parametrize(
    ("tokens", "margins", "difference"),
    [
        ([1, 9, 3], [1.0, 0.5, 1.0], Difference(1, 0.5)),
        ([1, 9, 9], [1.0, 1e-5, 1.0], Difference(1, 2e-5)),
        ([1, 2], [1.0, 1.0], Difference(2, 3.0)),
        ([1, 2, 3, 4], [1.0, 1.0, 1.0, 0.25], Difference(3, 0.25)),
    ],
)
def test_the_first_difference_is_reported_with_the_larger_margin(
    tokens: list[int], margins: list[float], difference: Difference
) -> None:
    assert (
        first_difference(finished([1, 2, 3], [1.0, 2e-5, 3.0]), finished(tokens, margins))
        == difference
    )


def test_only_what_rounding_can_decide_is_a_near_tie() -> None:
    assert Difference(0, 9e-5).near_tie
    assert not Difference(0, 1e-4).near_tie
