"""`dovetail swap` and `dovetail drain` on real processes, while eight streams run: no request
fails, and every text is the undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.launch.commands.swap import free_name
from dovetail.launch.files.directory import runtime_directory
from dovetail.launch.processes.child import LET_GO
from dovetail.launch.processes.replacement import named
from dovetail.launch.processes.stack import Stack, layout_of, worker_arguments
from dovetail.launch.processes.supervise import USER_ERROR
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.messages import Emitted, Failed, Finished, SeenRound
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from dovetail.workers import kernels
from support.golden import a_worker
from support.inflated import inflated
from support.kernels import needs_kernels
from support.losslessness import difference
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, complete_all, growing, started, submit

SIZE = "64MiB"
"""Weights of a size at which replies take their time."""
TREE = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2)
STREAMS, TOKENS = 8, 160


def dovetail(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dovetail.launch.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Streams:
    """Eight requests, greedy and sampled, that are asked for again as they end, until something
    else is over."""

    def __init__(self, client: Client) -> None:
        self._client = client
        alone = complete_all(client, [self._ask(number, None) for number in range(STREAMS)])
        self._expected = [finished.result.token_ids for finished in alone]
        self.kinds: set[tuple[int, tuple[str, ...]]] = set()
        """Moves and fingerprints of the replies."""

    def _ask(self, number: int, tree: TreeSettings | None) -> int:
        sampling = Sampling(temperature=float(number % 2), min_tokens=TOKENS)
        return submit(
            self._client,
            PROMPTS[number % len(PROMPTS)],
            sampling=sampling,
            tokens=TOKENS,
            seed=number,
            tree=tree,
        )

    def run_beside(
        self,
        arguments: Sequence[str] | Callable[[], Sequence[str]],
        look: Callable[[], None] = lambda: None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command once every stream has begun, and the streams until it has ended; `look` is
        called again and again."""
        flying = {self._ask(number, TREE): number for number in range(STREAMS)}
        begun: set[int] = set()
        process: subprocess.Popen[str] | None = None
        while flying:
            reply = self._client.receive(PATIENCE_S)
            assert isinstance(reply, Emitted | Finished), (
                reply.text if isinstance(reply, Failed) else reply
            )
            if process is None and len(begun := begun | {reply.request}) >= STREAMS:
                process = dovetail(*(arguments() if callable(arguments) else arguments))
            look()
            if isinstance(reply, Finished):
                number = flying.pop(reply.request)
                self._check(reply, number)
                if process is None or process.poll() is None:
                    flying[self._ask(number, TREE)] = number
        assert process is not None
        said, complained = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, said, complained)

    def _check(self, finished: Finished, number: int) -> None:
        self.kinds.add((finished.result.moves, finished.result.fingerprints))
        if "/int8/" not in finished.result.fingerprint:
            assert difference(finished, self._expected[number]) is None


@contextmanager
def under_streams(flags: dict[str, str]) -> Iterator[tuple[Stack, Client, Streams]]:
    with started({**inflated(SIZE), "draft.device": "cpu", **flags}) as (stack, client):
        yield stack, client, Streams(client)


def swap(stack: Stack, role: str, *flags: str) -> list[str]:
    return ["swap", f"--role={role}", "--json", f"--connect={stack.address}", *flags]


def check_swapped(done: "subprocess.CompletedProcess[str]", case: str) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert "starting " in done.stderr or case.startswith("drain")
    print(
        f"{case}: {result['moved']} moved, {result['stayed']} stayed, longest pause "
        f"{1e3 * result['longest_pause_s']:.0f} ms"
    )
    assert result["moved"] + result["stayed"] > 0
    return result


def check_left_at_once(client: Client, moved: int, stayed: int) -> None:
    """No session has another round with the old draft once the new one is in place: those that
    stayed ended in the round that was under way."""
    rounds, seen = list[SeenRound](), client.look()
    while rounds.extend(seen.rounds) or seen.more:
        seen = client.look(seen.next)
    drafted = dropwhile(lambda found: found.draft != "draft", rounds)
    after = dropwhile(lambda found: found.draft == "draft", drafted)
    late = Counter(found.session for found in after if found.draft == "draft")
    assert moved > 0
    assert max(late.values(), default=0) <= 1
    last = {found.session: found.number for found in rounds}
    old = [found for found in rounds if found.draft == "draft"][-(moved + stayed) :]
    assert stayed <= sum(last[found.session] == found.number for found in old)


def names(client: Client) -> list[str]:
    return sorted(worker.name for worker in client.status().workers)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "later"), [("small", "dovetail"), ("dovetail", "small"), ("small", "small")]
)
def test_a_draft_is_swapped_under_eight_streams(
    kind: str, later: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    with under_streams({"draft.kind": kind}) as (stack, client, streams):
        result = check_swapped(
            streams.run_beside(swap(stack, "draft", f"--draft={later}")), f"draft {kind} -> {later}"
        )
        assert (result["worker"], result["replaced"]) == ("draft-2", "draft")
        check_left_at_once(client, result["moved"], result["stayed"])
        assert stack.workers[1].process.wait(PATIENCE_S) is not None
        assert names(client) == ["draft-2", "target"]
        client.stop()
        wait_until_gone(result["pid"])
        assert not [*runtime_directory().glob("worker-*.log")]


@needs_kernels
def test_a_stream_moves_to_a_target_of_another_instruction_set_and_its_text_stays() -> None:
    isas = kernels.isas()
    old = isas[min(1, len(isas) - 1)]
    with started({"target.isa": old.name, "draft.kind": "none"}) as (stack, client):
        (target,) = client.status().workers
        assert target.kernels == kernels.TITLES[old]
        sampling = Sampling(temperature=1.0, min_tokens=400)
        ask = partial(submit, client, PROMPTS[0], sampling=sampling, tokens=400, seed=3)
        replies = complete_all(client, [ask(), ask()])
        flying = {ask(), ask()}  # one of them runs at any time
        swapping = dovetail(*swap(stack, "target", "--target.isa=auto"))
        while flying:
            reply = client.receive(PATIENCE_S)
            assert isinstance(reply, Emitted | Finished)
            if isinstance(reply, Finished):
                replies.append(reply)
                flying.remove(reply.request)
                flying |= {ask()} if swapping.poll() is None else set()
        said, complained = swapping.communicate()
        assert swapping.returncode == 0, complained
        assert sum(reply.result.moves for reply in replies) == json.loads(said)["moved"] > 0
        assert len({reply.result.token_ids for reply in replies}) == 1
        (target,) = client.status().workers
        assert target.kernels == kernels.TITLES[isas[-1]]


def test_an_instruction_set_that_this_cpu_lacks_is_refused_in_one_line() -> None:
    lacking = next(isa.name.lower() for isa in kernels.Isa if isa not in kernels.isas())
    asked = (("target", "generate hello"), ("draft", "generate hello"), ("target", "plan"))
    for role, command in asked:
        refused = dovetail(*command.split(), f"--{role}.isa={lacking}")
        (line,) = refused.communicate()[1].splitlines()
        assert refused.returncode == USER_ERROR
        assert line.startswith(f"dovetail: {role}.isa = '{lacking}': this CPU or this build has no")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["--weights=fp32", "--weights=int8", "--target.isa=plain"])
def test_a_target_is_swapped_under_eight_streams(change: str) -> None:
    weights = "int8" if change == "--weights=int8" else "fp32"
    with under_streams({"draft.kind": "small"}) as (stack, client, streams):
        result = check_swapped(
            streams.run_beside(swap(stack, "target", change)), f"target fp32 -> {change}"
        )
        if weights == "fp32":
            assert {kind for kind in streams.kinds if kind[0]} == {(1, ())}
        else:
            assert result["moved"] == 0
            assert {moves for moves, _ in streams.kinds} == {0}
        (target,) = (worker for worker in client.status().workers if "target" in worker.roles)
        assert (target.name, target.fingerprint.split("/")[1]) == ("target-2", weights)
        client.stop()
        wait_until_gone(result["pid"])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_worker_is_drained_under_eight_streams(role: str) -> None:
    with under_streams({"draft.kind": "small"}) as (stack, client, streams):
        leaver = ["drain", role, f"--connect={stack.address}"]
        if role == "target":
            refused = streams.run_beside(leaver)
            assert refused.returncode == 1
            assert "target is the only target" in refused.stderr
            joined = streams.run_beside(swap(stack, "target", "--beside"))
            assert joined.returncode == 0, joined.stderr
        with stack.connect() as onlooker:

            def busiest() -> list[str]:
                worker = max(
                    (worker for worker in onlooker.status().workers if role in worker.roles),
                    key=lambda worker: worker.sessions,
                )
                return ["drain", worker.name, f"--connect={stack.address}", "--json"]

            result = check_swapped(streams.run_beside(busiest), f"drain of the {role}")
        assert result["worker"] not in names(client)


@pytest.mark.slow
def test_a_newcomer_that_cannot_be_loaded_or_dies_leaves_everything_as_it_was() -> None:
    with (
        under_streams({"draft.kind": "small"}) as (stack, client, streams),
        stack.connect() as onlooker,
    ):
        missing = streams.run_beside(swap(stack, "draft", "--draft=/nowhere"))
        assert missing.returncode == 2
        assert "/nowhere is not there" in missing.stderr

        def kill_newcomer() -> None:
            for worker in onlooker.status().workers:
                if worker.standby:
                    with suppress(ProcessLookupError):  # it is shown until its link is gone
                        os.kill(worker.pid, signal.SIGKILL)

        killed = streams.run_beside(swap(stack, "target"), kill_newcomer)
        assert killed.returncode == 1
        assert (
            "target-2 was not put in place" in killed.stderr
            or "was killed by SIGKILL" in killed.stderr
            or "no longer on standby" in killed.stderr
        )
        assert names(client) == ["draft", "target"]


CROOKED = """
import sys
from dovetail.launch import cli
from dovetail.workers import target
Opened = target.Opened
target.Opened = lambda **fields: Opened(**{**fields, "bonus": fields["bonus"] + 1})
sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_target_that_decides_otherwise_than_its_fingerprint_says_fails_its_trial() -> None:
    with under_streams({"draft.kind": "small"}) as (stack, client, _), stack.connect() as admin:
        old = next(worker for worker in client.status().workers if "target" in worker.roles)
        flags = [
            *worker_arguments(
                stack.configuration,
                "target",
                stack.address,
                layout_of(stack.configuration.settings),
            ),
            "--name=crooked",
            "--standby",
        ]
        crooked = subprocess.Popen(
            [sys.executable, "-P", "-c", CROOKED, *flags], stderr=subprocess.DEVNULL
        )
        try:
            newcomer = None
            while newcomer is None:
                assert crooked.poll() is None
                newcomer = next(
                    (worker for worker in admin.status().workers if worker.standby), None
                )
                time.sleep(0.05)
            assert newcomer.fingerprint == old.fingerprint
            with pytest.raises(
                RequestError,
                match="crooked was not put in place: it has the fingerprint of a registered "
                "target, but chooses different",
            ):
                admin.changed(admin.swap(newcomer.worker_epoch, old.worker_epoch))
            assert crooked.wait(PATIENCE_S) == LET_GO
        finally:
            crooked.kill()
            crooked.wait()
        assert names(client) == ["draft", "target"]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["nobody", "lost"])
def test_a_worker_that_comes_back_while_its_successor_loads_leaves_for_it(first: str) -> None:
    with growing(
        {"draft.kind": "ngram", **({} if first == "lost" else {"draft.kind": "none"})}
    ) as (stack, client, _):
        flags = [
            *worker_arguments(
                stack.configuration, "draft", stack.address, layout_of(stack.configuration.settings)
            ),
            "--draft.kind=ngram",
        ]
        former = [sys.executable, "-P", "-m", "dovetail.launch.cli", *flags, "--name=draft"]
        swapping = dovetail(*swap(stack, "draft", "--draft=small"))
        while not (children := psutil.Process(swapping.pid).children()):
            assert swapping.poll() is None
        children[0].suspend()
        if first == "lost":
            os.kill(stack.workers[1].process.pid, signal.SIGKILL)
            stack.workers[1].process.wait()
        back = subprocess.Popen(former)
        try:
            while not any(worker.pid == back.pid for worker in client.status().workers):
                assert back.poll() is None
                time.sleep(0.05)
            children[0].resume()
            said, complained = swapping.communicate(timeout=PATIENCE_S)
            assert swapping.returncode == 0, complained
            assert json.loads(said)["replaced"] == "draft"
            assert back.wait(PATIENCE_S) == LET_GO
            assert len(names(client)) == 2
        finally:
            back.kill()
            os.kill(children[0].pid, signal.SIGTERM)
            wait_until_gone(children[0].pid)


@pytest.mark.slow
def test_an_interrupted_swap_takes_its_worker_along() -> None:
    with started({"draft.kind": "small", "draft.device": "cpu"}) as (stack, client):
        process = dovetail(*swap(stack, "draft", "--draft=dovetail"))
        while not (children := psutil.Process(process.pid).children()):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        wait_until_gone(children[0].pid)
        assert names(client) == ["draft", "target"]


@pytest.mark.slow
def test_a_swap_that_is_interrupted_once_its_worker_has_sessions_leaves_it_to_them() -> None:
    """The old target ends what it has, since the new one decides otherwise: that takes longer than
    whoever asked has patience."""
    interrupted: list[int] = []
    with (
        under_streams({"draft.kind": "small"}) as (stack, client, streams),
        stack.connect() as admin,
    ):

        def interrupt() -> None:
            placed = [
                worker
                for worker in admin.status().workers
                if worker.name == "target-2" and not worker.standby
            ]
            if placed and not interrupted:
                (process,) = [
                    child for child in psutil.Process().children() if "swap" in child.cmdline()
                ]
                process.send_signal(signal.SIGINT)
                interrupted.append(placed[0].pid)

        done = streams.run_beside(swap(stack, "target", "--target.weights=int8"), interrupt)
        assert (done.returncode, len(interrupted)) == (130, 1), done.stderr
        assert "target-2 is in place and stays" in done.stderr
        try:
            assert stack.workers[0].process.wait(PATIENCE_S) is not None
            assert names(client) == ["draft", "target-2"]
            complete_all(client, [streams._ask(0, TREE)])
        finally:
            os.kill(interrupted[0], signal.SIGTERM)
            wait_until_gone(interrupted[0])


def test_a_worker_is_named_by_its_name_or_its_pid() -> None:
    workers = [
        a_worker(n, p, host="here") for n, p in (("draft", 11), ("draft", 12), ("draft-2", 13))
    ]
    assert named(workers, "draft-2").pid == 13
    assert named(workers, "12").pid == 12
    with pytest.raises(
        UserError,
        match=r"2 workers are called 'draft': choose by pid from draft \(pid 11 on here\), ",
    ):
        named(workers, "draft")
    with pytest.raises(
        UserError, match=r"there is no worker 'target': choose one of draft \(pid 11"
    ):
        named(workers, "target")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--role=draft", "--draft=ngram", "--weights=int8"],
            "--target.weights is a setting of a target, not of a draft",
        ),
        (
            ["--role=target", "--draft.device=cpu"],
            "--draft.device is a setting of a draft, not of a target",
        ),
    ],
)
def test_a_setting_of_the_other_role_is_refused(flags: list[str], words: str) -> None:
    process = dovetail("swap", *flags)
    _, complained = process.communicate()
    assert (process.returncode, complained.count("\n")) == (2, 1)
    assert words in complained


def test_a_newcomer_gets_a_name_that_is_free() -> None:
    assert free_name([], "draft") == "draft"
    assert free_name([a_worker("draft", 1), a_worker("draft-2", 2)], "draft") == "draft-3"


def test_the_command_for_another_machine_has_the_given_address(
    start: Callable[..., "subprocess.Popen[str]"], invoke: Callable[..., Any], tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    assert invoke("keygen", "--out", keys).returncode == 0
    lead = start("coordinator", "--listen", "tcp://0.0.0.0:*", "--keys", keys)
    assert lead.stdout is not None
    given = "tcp://127.0.0.1:" + lead.stdout.readline().strip().rpartition(":")[2]
    asked = ("--role=draft", "--draft=ngram", "--beside", "--print", "--connect", given)
    waits = start("swap", *asked, "--keys", keys)
    assert waits.stdout is not None
    line = waits.stdout.readline()
    assert f"--connect={given} " in line
    waits.send_signal(signal.SIGINT)
    waits.wait()
