"""A target worker that dies while it is at work on replies: another one reads their logs and writes
on, and nobody who reads them can tell."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from dovetail.launch.processes.stack import Stack
from dovetail.launch.processes.supervise import Child
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Emitted, Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.inflated import inflated
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, complete_all, growing, submit, wait_for

TREE = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2)
TOKENS, MORE = 56, 240
"""Of a reply: of an inflated target, and of the embedded one as it is, which is faster."""
TEMPERATURES = (0.0, 1.0)
QUIET_S = 0.3
"""A target from which nothing has come for so long, while it is stopped, owes something."""
DRAFTS = ("dovetail", "small")
SETTINGS = {"draft.device": "cpu", "coordinator.recovery_s": "60"}


@dataclass
class Heard:
    """The messages that a client got of a reply."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | None = None


def ask(client: Client, tokens: int = TOKENS) -> list[int]:
    """A greedy request and a sampled one, with processors that look at the reply alone."""
    shaped = {
        "min_tokens": tokens,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.05,
    }
    samplings = [Sampling(temperature=temperature, **shaped) for temperature in TEMPERATURES]  # type: ignore[arg-type]
    return [
        submit(client, PROMPTS[1], sampling=sampling, tokens=tokens, seed=3, tree=TREE)
        for sampling in samplings
    ]


def listen(client: Client, heard: dict[int, Heard], timeout_s: float) -> bool:
    """Take in one thing that is said; False: nothing was."""
    reply = client.receive(timeout_s)
    if isinstance(reply, Failed):
        raise RequestError(reply.code, reply.text)
    if isinstance(reply, Emitted):
        heard[reply.request].tokens += reply.tokens
        heard[reply.request].text += reply.text
    if isinstance(reply, Finished):
        heard[reply.request].end = reply
    return reply is not None


def until_all_have_begun(client: Client, heard: dict[int, Heard]) -> None:
    while not all(len(one.tokens) > 10 for one in heard.values()):
        assert listen(client, heard, PATIENCE_S)
    assert not any(one.end for one in heard.values())


def at_once(client: Client, stack: Stack, targets: Sequence[Child]) -> dict[int, Heard]:
    """It dies after a token, whatever it is about."""
    heard = {request: Heard() for request in ask(client)}
    until_all_have_begun(client, heard)
    kill(busiest(stack, targets))
    return heard


def while_it_owes_a_verdict(
    client: Client, stack: Stack, targets: Sequence[Child], tokens: int = TOKENS
) -> dict[int, Heard]:
    heard = {request: Heard() for request in ask(client, tokens)}
    until_all_have_begun(client, heard)
    target = busiest(stack, targets)
    target.process.send_signal(signal.SIGSTOP)
    while listen(client, heard, QUIET_S):
        pass
    kill(target)
    return heard


def while_it_reads_the_prompt(
    client: Client, stack: Stack, targets: Sequence[Child]
) -> dict[int, Heard]:
    """All stand still until it is known which of them are to read."""
    for target in targets:
        target.process.send_signal(signal.SIGSTOP)
    heard = {request: Heard() for request in ask(client)}
    assert not listen(client, heard, QUIET_S)
    lost = busiest(stack, targets)
    kill(lost)
    for target in targets:
        if target is not lost:
            target.process.send_signal(signal.SIGCONT)
    return heard


def kill(worker: Child) -> None:
    worker.process.kill()
    worker.process.wait()


def busiest(stack: Stack, targets: Sequence[Child]) -> Child:
    """The one with most sessions; what the coordinator tells others is not disturbed by the
    question."""
    with stack.connect() as client:
        sessions = {worker.pid: worker.sessions for worker in client.status().workers}
    return max(targets, key=lambda target: sessions[target.process.pid])


Moment = Callable[[Client, Stack, Sequence[Child]], dict[int, Heard]]
MOMENTS: Sequence[Moment] = (at_once, while_it_owes_a_verdict, while_it_reads_the_prompt)


def check_goes_on(client: Client, heard: dict[int, Heard], whole: Sequence[Finished]) -> int:
    """Check that the replies are what they are when no target dies; return how often they moved."""
    while not all(one.end for one in heard.values()):
        assert listen(client, heard, PATIENCE_S), "nothing more was said"
    moves = 0
    for one, reference in zip(heard.values(), whole, strict=True):
        assert one.end is not None
        assert one.tokens == list(one.end.result.token_ids) == list(reference.result.token_ids)
        assert one.text == one.end.result.text == reference.result.text
        assert one.end.margins == reference.margins
        assert (one.end.result.fingerprint, one.end.result.fingerprints) == (
            reference.result.fingerprint,
            (),
        )
        assert one.end.result.accepted_tokens > 0
        moves += one.end.result.moves
    return moves


def test_replies_whose_target_is_killed_while_it_owes_a_verdict_go_on_on_a_spare_one_as_if_nothing_had_been() -> (  # noqa: E501
    None
):
    with growing({"draft.kind": "dovetail", **SETTINGS}) as (stack, client, another):
        whole = complete_all(client, ask(client, MORE))
        targets = [stack.workers[0], wait_for(client, another("target"))]
        heard = while_it_owes_a_verdict(client, stack, targets, MORE)
        assert check_goes_on(client, heard, whole) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_target_may_be_killed_at_any_moment_and_started_again(draft: str) -> None:
    with growing({**inflated("64MiB", draft), **SETTINGS}) as (stack, client, another):
        whole, target = complete_all(client, ask(client)), stack.workers[0]
        for moment in MOMENTS:
            heard = moment(client, stack, [target])
            target = another("target")
            assert check_goes_on(client, heard, whole) == len(TEMPERATURES)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_target_may_be_killed_at_any_moment_where_another_is_there(draft: str) -> None:
    with growing({**inflated("64MiB", draft), **SETTINGS}) as (stack, client, another):
        whole, targets = complete_all(client, ask(client)), [stack.workers[0]]
        for moment in MOMENTS:
            targets = [
                *(target for target in targets if not target.ended),
                wait_for(client, another("target")),
            ]
            moves = check_goes_on(client, moment(client, stack, targets), whole)
            assert moves >= (moment is not while_it_reads_the_prompt)
