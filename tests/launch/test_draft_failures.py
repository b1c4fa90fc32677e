"""A draft that fails is said wherever a person looks, and changes no token: real processes."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest

from dovetail.launch.processes.stack import POLL_S, Stack
from dovetail.protocol.messages import Finished, Reported
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.stacks import PROMPTS, complete_all, started
from support.web import api

Run = Callable[..., CompletedProcess[str]]
SCRIPT = Path(__file__).parent.parent / "support" / "failing_draft.py"
TREE = TreeSettings(policy="dynamic", gamma=15, depth=8, width=10, insist=True)
TOKENS = 16
WAYS = {
    "only_below_the_root": "IndexError: the index is on another device",
    "only_sampled": "IndexError: the index is on another device",
    "only_ahead": "IndexError: the index is on another device",
    "in_open": "IndexError: the index is on another device",
    "in_feed": "IndexError: the index is on another device",
    "out_of_memory": "the worker is out of memory: CUDA out of memory",
    "no_numbers": "FloatingPointError: the draft's logits are not numbers",
    "dies": "it disconnected",
}
"""Ways in which a draft fails, each with what is said of it."""


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[Stack, Client]]:
    with started({"draft.kind": "none"}) as (stack, client):
        yield stack, client


@contextmanager
def failing(target: tuple[Stack, Client], how: str) -> Iterator[None]:
    """A draft worker that fails so is there for a while."""
    stack, client = target
    command = [
        sys.executable,
        str(SCRIPT),
        how,
        "worker",
        "--role=draft",
        f"--connect={stack.address}",
        "--draft.kind=dovetail",
        "--draft.device=cpu",
    ]
    with Popen(command) as process:
        try:
            while not has_draft(client):
                assert process.poll() is None
                time.sleep(POLL_S)
            yield
        finally:
            process.kill()
    while has_draft(client):
        time.sleep(POLL_S)


def has_draft(client: Client) -> bool:
    return any("draft" in worker.roles for worker in client.status().workers)


def ask(client: Client, tree: TreeSettings | None) -> list[Finished]:
    """A greedy request, then a sampled one, then both again; the draft goes on growing while the
    target verifies."""
    found = []
    for temperature in (0.0, 1.0, 0.0, 1.0):
        sampling = Sampling(temperature=temperature, min_tokens=TOKENS)
        how = (
            {"tree": TreeSettings(), "speculate": False}
            if tree is None
            else {"tree": tree, "ahead": True}
        )
        request = client.submit(
            turns=PROMPTS[0], sampling=sampling, max_tokens=TOKENS, seed=3, **how
        )
        found += complete_all(client, [request])
    return found


def faults(state: Reported) -> list[str]:
    return [fault.why for fault in state.faults if fault.part == "draft worker"]


@pytest.mark.parametrize(
    "how",
    [
        way if way == "only_below_the_root" else pytest.param(way, marks=pytest.mark.slow)
        for way in WAYS
    ],
)
def test_a_draft_that_fails_is_said_and_changes_no_token(
    target: tuple[Stack, Client], how: str
) -> None:
    client = target[1]
    alone = ask(client, None)
    before = client.status().totals.draft_failures
    with failing(target, how):
        found = ask(client, TREE)
        state = client.status()
    assert [reply.result.token_ids for reply in found] == [
        reply.result.token_ids for reply in alone
    ]
    said = [reply.result.draft_failure for reply in found]
    first = next(failure for failure in said if failure is not None)
    assert WAYS[how] in first.error
    assert first.draft == "draft"
    assert first.round <= found[0].result.rounds
    assert {
        "only_sampled": [False, True] * 2,
        "dies": [True, False, False, False],
    }.get(how, [True] * 4) == [failure is not None for failure in said]
    assert state.degraded
    assert WAYS[how].removeprefix("it ") in faults(state)[0]
    assert any(WAYS[how].removeprefix("it ") in reason for reason in state.reasons)
    assert how == "dies" or state.totals.draft_failures > before


@pytest.mark.slow
def test_every_command_says_it(target: tuple[Stack, Client], run: Run) -> None:
    address, words = target[0].address, "the index is on another device than the states"
    whole = ("--policy=dynamic", "--tree.insist=true")
    flags = ("--connect", address, "--max-tokens", "16", *whole)
    with failing(target, "only_below_the_root"):
        told = run("generate", "Why is the sky blue?", *flags, "--json", "--seed", "1")
        assert told.returncode == 0
        result = json.loads(told.stdout)
        assert words in result["draft_failure"]["error"]
        when = f"in round {result['draft_failure']['round']}"
        assert result["draft_failure"]["after_s"] > 0
        assert f"draft failed {when} · " in told.stderr
        assert (
            f"warning: the draft worker draft failed {when}, "
            f"{result['draft_failure']['after_s']:.2f} s after the request arrived" in told.stderr
        )
        chatted = run("chat", *flags, "--seed", "1", input="Tell me a story about an owl.\n")
        assert words in chatted.stderr, chatted.stdout
        status = run("status", "--connect", address).stdout
        assert "degraded    the draft worker has not been working for " in status
        assert f" s: IndexError: {words}, {when} of session " in status
        assert (
            words
            in json.loads(run("status", "--connect", address, "--json").stdout)["faults"][0]["why"]
        )
        picture = json.loads(run("top", "--connect", address, "--once", "--json").stdout)
        assert words in picture["faults"][0]["why"]
        assert words in " ".join(run("top", "--connect", address, "--once").stdout.split())
        tested = run(
            "selftest", "--connect", address, "--limit", "1", "--max-tokens", "6", "--json"
        )
        assert tested.returncode == 1, tested.stderr
        checks = json.loads(tested.stdout)["checks"]
        assert not any(check["ok"] for check in checks)
        assert words in checks[0]["draft_failure"]["error"]


@pytest.mark.slow
def test_a_server_says_it_to_who_asks_about_the_draft_and_in_no_openai_body(
    target: tuple[Stack, Client], run: Run
) -> None:
    address, words = target[0].address, "the index is on another device than the states"
    with (
        failing(target, "only_below_the_root"),
        api(address, "--policy=dynamic", "--tree.insist=true") as server,
    ):
        body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert words not in answer.text
        assert server.client.get("/readyz").json()["degraded"] is True
        assert words in server.client.get("/readyz").json()["faults"][0]["why"]
        assert "dovetail_draft_failures_total" in server.client.get("/metrics").text
        told = run(
            "generate",
            "Why is the sky blue?",
            "--connect",
            server.url,
            "--max-tokens",
            "16",
            "--json",
        )
        assert told.returncode == 0
        assert words in json.loads(told.stdout)["draft_failure"]["error"]
        assert f"IndexError: {words}; the tokens are unaffected" in told.stderr


@pytest.mark.slow
def test_a_draft_that_works_again_is_not_said_to_fail(target: tuple[Stack, Client]) -> None:
    """The fault stands until a request that began after it has been drafted for to its end."""
    client = target[1]
    with failing(target, "only_sampled"):
        ask(client, TREE)
        assert faults(client.status())
        greedy = client.submit(
            turns=PROMPTS[0],
            sampling=Sampling(min_tokens=TOKENS),
            max_tokens=TOKENS,
            seed=3,
            tree=TREE,
        )
        assert complete_all(client, [greedy])[0].result.draft_failure is None
        assert not faults(client.status())
        assert client.status().totals.draft_failures >= 2
