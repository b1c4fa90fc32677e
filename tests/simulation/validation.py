"""The recorded replies, decoded for real: what a simulation is judged by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dovetail.launch.console.terminal import progress_bar, spinner
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.planning.acceptance import Library, Recording
from dovetail.launch.processes.stack import begin_stack, layout_of, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import Failed, Finished, Recorded, Result, RoundRecord
from dovetail.runtime.client import Client
from simulation.methods import Method

AHEAD = ("ahead", "draft.ahead")  # the names that a method may write `draft.ahead` by


@dataclass(frozen=True)
class Reply:
    """One that was decoded."""

    result: Result
    rounds: tuple[RoundRecord, ...]


def decode_all(
    configuration: Configuration, library: Library, methods: Sequence[Method]
) -> Iterator[tuple[Method, list[Reply]]]:
    """All replies with each method, on one stack of processes; one more before them, which warms
    up.

    `UserError` if the pair writes other tokens than were recorded, so that it is another, and where
    a method drafts ahead on a core of the target.
    """
    with Supervisor() as supervisor:
        with spinner() as say:
            say("starting")
            stack = begin_stack(supervisor, configuration, measures=True)()
            state = wait_until_ready(supervisor, stack, say)
        if any("draft" in worker.roles and worker.device == "cpu" for worker in state.workers):
            methods = as_on(layout_of(configuration.settings), methods)
        with (
            stack.connect() as client,
            progress_bar(len(methods) * len(library.recordings), "replies") as step,
        ):
            for method in methods:
                decode(client, library, library.recordings[0], method)
                replies = []
                for recording in library.recordings:
                    replies.append(decode(client, library, recording, method))
                    step(f"{method.name} {recording.id}")
                if losses := stack.losses():
                    raise losses[0]
                yield method, replies


def as_on(layout: CoreLayout, methods: Sequence[Method]) -> Sequence[Method]:
    """Return the methods as they are decoded with this layout: where the draft has a core of the
    target, they do not draft ahead. `UserError` for one that insists: what that takes from the
    target's passes no record tells."""
    if not layout.shared:
        return methods
    if ahead := next((method for method in methods if method.ahead), None):
        raise UserError(
            f"target and draft share core {format_numbers(layout.shared)} here, and no recorded "
            "cost tells what drafting ahead takes from the target there, so a simulation cannot "
            f"be compared with it: write --method {_waiting(ahead.name)}"
        )
    return [method.with_ahead(False) for method in methods]


def _waiting(name: str) -> str:
    """Return how a method is written where the draft waits for the target."""
    parts = [part for part in name.split(",") if part.partition("=")[0] not in AHEAD]
    return ",".join([*parts, "ahead=false"])


def most_tokens(library: Library, recording: Recording) -> int:
    """Return what was allowed when a reply was recorded."""
    about = library.about
    return min(about.max_tokens, about.context - len(recording.prompt))


def decode(client: Client, library: Library, recording: Recording, method: Method) -> Reply:
    """One recorded reply, for real."""
    about = library.about
    request = client.submit(
        tokens=recording.prompt,
        sampling=about.sampling,
        max_tokens=most_tokens(library, recording),
        seed=about.seed,
        tree=method.tree,
        record=True,
        ahead=method.ahead,
    )
    rounds: list[RoundRecord] = []
    for reply in client.replies():
        match reply:
            case Recorded(request=number) if number == request:
                rounds.append(reply.record)
            case Finished(request=number) if number == request:
                if reply.result.token_ids != recording.tokens:
                    raise UserError(
                        f"this pair answers {recording.id!r} with other tokens than were "
                        "recorded: name the models and weights of the recording"
                    )
                return Reply(reply.result, tuple(rounds))
            case Failed():
                raise DovetailError(f"the coordinator refused {recording.id!r}: {reply.text}")
    raise DovetailError("the coordinator does not answer")
