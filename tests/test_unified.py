"""One process with both roles among others: it dies at work, is started again, let go and replaced,
over tcp too, and no request fails or reads otherwise."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.processes.stack import Stack
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import Emitted, Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.inflated import as_flags, inflated, models_at
from support.losslessness import difference
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, complete_all, growing, started, submit, wait_for

pytestmark = pytest.mark.slow

TREE = TreeSettings(policy="dynamic", insist=True, gamma=8, depth=4, width=3)
TOKENS = 120


def unified() -> dict[str, str]:
    """A target of some size and its substitute, in one process."""
    own = {"draft.share": "true", "coordinator.recovery_s": "60"}
    return {**inflated("32MiB", "substitute"), **own}


@pytest.fixture(scope="module", autouse=True)
def _kept_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Quantise once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def ask(client: Client, tree: TreeSettings | None = TREE) -> list[int]:
    """Two requests side by side, a greedy one and a sampled one."""
    samplings = [Sampling(temperature=temperature, min_tokens=TOKENS) for temperature in (0.0, 1.0)]
    return [
        submit(client, turns, sampling=sampling, tokens=TOKENS, seed=3, tree=tree)
        for turns, sampling in zip(PROMPTS, samplings, strict=False)
    ]


def interrupted(
    client: Client, interrupt: Callable[[], object], *, once: Callable[[Iterable[bool]], bool] = all
) -> list[Finished]:
    """The replies to two requests during which something happens, once there are drafted tokens in
    both, or in one."""
    drafted, ends, done = dict.fromkeys(ask(client), False), dict[int, Finished](), False
    while len(ends) < len(drafted):
        reply = client.receive(PATIENCE_S)
        assert isinstance(reply, Emitted | Finished), (
            reply.text if isinstance(reply, Failed) else reply
        )
        if isinstance(reply, Finished):
            ends[reply.request] = reply
            continue
        drafted[reply.request] |= any(reply.drafted)
        if not done and once(drafted.values()):
            assert not ends
            interrupt()
            done = True
    assert done
    return [ends[request] for request in drafted]


def check(found: Sequence[Finished], alone: Sequence[Finished]) -> None:
    for finished, reference in zip(found, alone, strict=True):
        assert difference(finished, reference.result.token_ids) is None


def check_drafts(client: Client, alone: Sequence[Finished]) -> None:
    """It decodes and drafts as if nothing had been."""
    found = complete_all(client, ask(client))
    check(found, alone)
    assert all(finished.result.accepted_tokens > 0 for finished in found)


def dovetail(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "dovetail.launch.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def names(client: Client) -> list[str]:
    return sorted(worker.name for worker in client.status().workers)


def kill(stack: Stack) -> None:
    stack.workers[0].process.kill()
    stack.workers[0].process.wait()


def test_two_sessions_at_once_and_what_is_said_of_the_process() -> None:
    with started(unified()) as (stack, client):
        alone = complete_all(client, ask(client, None))
        check_drafts(client, alone)
        pid = stack.workers[0].process.pid
        assert {(worker.name, worker.roles, worker.pid) for worker in client.status().workers} == {
            ("unified-target", ("target",), pid),
            ("unified-draft", ("draft",), pid),
        }
        shown = dovetail("status", f"--connect={stack.address}")
        assert shown.returncode == 0, shown.stderr
        assert all(
            word in shown.stdout
            for word in ("unified-target", "unified-draft", "int4 substitute", str(pid))
        )
        live = dovetail("top", "--once", f"--connect={stack.address}")
        assert live.returncode == 0, live.stderr
        assert "unified-target" in live.stdout
        assert "unified-draft" in live.stdout


@pytest.mark.parametrize("stopped", [False, True], ids=["at-work", "while-it-owes-an-answer"])
def test_a_process_with_both_roles_is_killed_at_work_and_replaced(stopped: bool) -> None:
    with growing(unified()) as (stack, client, another):
        alone = complete_all(client, ask(client, None))

        def strike() -> None:
            if stopped:
                stack.workers[0].process.send_signal(signal.SIGSTOP)
                while client.receive(0.3) is not None:
                    pass
            kill(stack)
            another("unified")

        found = interrupted(client, strike) if not stopped else _unheard(client, strike)
        check(found, alone)
        assert [finished.result.moves for finished in found] == [1, 1]
        check_drafts(client, alone)


def _unheard(client: Client, strike: Callable[[], object]) -> list[Finished]:
    """Strike once all replies have begun, without listening meanwhile to what is said; return the
    replies."""
    requests = ask(client)
    begun = set[int]()
    while len(begun) < len(requests):
        reply = client.receive(PATIENCE_S)
        assert isinstance(reply, Emitted), reply
        begun.add(reply.request)
    strike()
    return complete_all(client, requests)


def test_a_plain_target_takes_over_from_a_process_with_both_roles_and_nothing_is_drafted_by_what_is_gone() -> (  # noqa: E501
    None
):
    with growing(unified()) as (stack, client, another):
        alone = complete_all(client, ask(client, None))
        wait_for(client, another("target"))
        check(interrupted(client, lambda: kill(stack), once=any), alone)
        assert names(client) == ["target"]
        check(complete_all(client, ask(client)), alone)


def test_a_draft_that_shares_drafts_for_no_other_target() -> None:
    """Half of the sessions are on a plain target beside it, and go without."""
    with growing(unified()) as (_, client, another):
        alone = complete_all(client, ask(client, None))
        wait_for(client, another("target"))
        check(
            complete_all(client, [request for _ in range(3) for request in ask(client)]), alone * 3
        )
        status = client.status()
        assert (status.stale, status.reasons) == (0, ())


def swapped(stack: Stack, role: str, *flags: str) -> dict[str, Any]:
    done = dovetail("swap", f"--role={role}", "--json", f"--connect={stack.address}", *flags)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_process_with_both_roles_is_swapped_for_a_plain_pair_and_back() -> None:
    with started(unified()) as (stack, client):
        alone = complete_all(client, ask(client, None))
        pids = []

        def to_a_pair() -> None:
            pids.append(swapped(stack, "draft", "--draft=small", "--draft.device=cpu")["pid"])
            pids.append(swapped(stack, "target")["pid"])

        try:
            check(interrupted(client, to_a_pair), alone)
            assert names(client) == ["draft", "target"]
            assert stack.workers[0].process.wait(PATIENCE_S) is not None
            check_drafts(client, alone)
            back = interrupted(
                client,
                lambda: pids.append(
                    swapped(stack, "unified", "--draft.kind=substitute", "--draft.share=true")[
                        "pid"
                    ]
                ),
            )
            check(back, alone)
            assert names(client) == ["unified-draft", "unified-target"]
            check_drafts(client, alone)
        finally:
            for pid in pids[-1:]:
                os.kill(pid, signal.SIGTERM)


def test_a_process_with_both_roles_is_drained_role_by_role() -> None:
    with growing(unified()) as (stack, client, another):
        alone = complete_all(client, ask(client, None))

        def without_its_draft() -> None:
            assert dovetail("drain", "unified-draft", f"--connect={stack.address}").returncode == 0

        check(interrupted(client, without_its_draft), alone)
        assert names(client) == ["unified-target"]
        check(complete_all(client, ask(client)), alone)
        wait_for(client, another("target"))
        drained = dovetail("drain", "unified-target", f"--connect={stack.address}")
        assert drained.returncode == 0, drained.stderr
        assert stack.workers[0].process.wait(PATIENCE_S) is not None
        assert names(client) == ["target"]
        check(complete_all(client, ask(client)), alone)


def test_over_tcp_it_has_the_keys_of_both_roles(tmp_path: Path) -> None:
    keys, own = tmp_path / "keys", tmp_path / "own"
    assert dovetail("keygen", f"--out={keys}").returncode == 0
    own.mkdir(mode=0o700)
    for name in ("target.key", "draft.key", "coordinator.pub"):
        shutil.copy2(keys / name, own / name)
    with Supervisor() as supervisor:
        address = supervisor.await_address(
            supervisor.start(
                "coordinator",
                ["coordinator", "--listen=tcp://127.0.0.1:*", f"--keys={keys}"],
                reads=True,
            )
        )
        flags = as_flags({**models_at("32MiB", "substitute"), "draft.share": "true"})
        child = supervisor.start(
            "unified worker",
            ["worker", "--role=unified", f"--connect={address}", f"--keys={own}", *flags],
        )
        with Client(open_link(address, keys=keys, role="client")) as client:
            while len(client.status().workers) < 2:
                assert not child.ended, child.last_words()
                time.sleep(0.1)
            alone = complete_all(client, ask(client, None))
            check_drafts(client, alone)
        child.process.terminate()
        child.process.wait(PATIENCE_S)
        assert not any("Traceback" in line for line in child.last_words()), child.last_words()
        (own / "draft.key").unlink()
        without = dovetail(
            "worker", "--role=unified", f"--connect={address}", f"--keys={own}", *flags
        )
        assert (without.returncode, without.stderr.count("\n")) == (2, 1), without.stderr
        assert "draft.key" in without.stderr
