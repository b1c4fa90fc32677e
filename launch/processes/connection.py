"""The coordinator of a command: the given one, the only one of this user, or one that the command
starts."""

import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dovetail.launch.console.terminal import note, spinner
from dovetail.launch.extras import extra, installed
from dovetail.launch.files.directory import announcements, only_announcement
from dovetail.launch.processes.preflight import check_target
from dovetail.launch.processes.stack import Stack, begin_stack, wait_until_ready
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.launch.settings.generation import by_folder, fitting, with_generation_config
from dovetail.launch.settings.models import DEMO_FOLDER, blocks_in_words
from dovetail.protocol.errors import (
    CheckpointError,
    DovetailError,
    LinkClosed,
    RequestError,
    UserError,
    printable,
)
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import (
    Failed,
    Finished,
    Recorded,
    Reported,
    Role,
    RoundRecord,
    WorkerState,
)
from dovetail.protocol.settings import DraftSettings
from dovetail.runtime.client import Client
from dovetail.runtime.telemetry.picture import folder_name
from dovetail.workers.models.checkpoints.gguf.names import is_gguf
from dovetail.workers.models.checkpoints.gguf.view import spelled

MISTAKES = ("settings", "prompt_too_long", "vocabulary", "version", "role")
"""The codes of `messages.Failed` that are user errors."""
LOSSY = "int8-per-tensor"
GLANCE_S = 0.1


@dataclass(frozen=True)
class Connection:
    """A registered client, its coordinator, and the coordinator's processes if they are ours."""

    client: Client
    state: Reported
    stack: Stack | None = None
    address: str = ""  # the address at which it was reached; empty: the one that it reports

    def models(self, *, draft: bool = True) -> str:
        """Describe the models; `draft`: including the draft's."""
        return models_of(self.state, draft=draft)

    def decode(
        self,
        turns: Sequence[str],
        *,
        record: Callable[[RoundRecord], None] | None = None,
        glance: Callable[[], None] | None = None,
        **wishes: Any,
    ) -> Finished:
        """Decode one request with these further arguments of `Client.submit`; `record` is called
        with every round, `glance` at least every `GLANCE_S`. Errors are those of `failure`,
        including the loss of one of our processes."""
        request = self.client.submit(turns=turns, record=record is not None, **wishes)
        while True:
            reply = self.client.receive(None if glance is None else GLANCE_S)
            if glance is not None:
                glance()
            if isinstance(reply, Recorded) and reply.request == request and record is not None:
                record(reply.record)
            if isinstance(reply, Finished) and reply.request == request:
                if losses := self.stack.losses() if self.stack is not None else []:
                    raise losses[0]
                return reply
            if isinstance(reply, Failed):
                raise self.failure(reply)

    def peak_rss_mb(self) -> float:
        """The peak memory of our stack's workers, summed, in 10^6 bytes."""
        if self.stack is not None:
            return sum(child.peak_rss_bytes() for child in self.stack.workers) / 1e6
        return 0.0

    def failure(self, reply: Failed) -> DovetailError:
        """Why a request failed; if one of our processes caused this, its last output."""
        losses = self.stack.losses() if self.stack is not None else []
        if losses and reply.code in ("worker_lost", "no_target"):
            return losses[0]
        if reply.code in MISTAKES:
            return RequestError(reply.code, reply.text)
        return DovetailError(reply.text)


@contextmanager
def connected(configuration: Configuration, address: str | None) -> Iterator[Connection]:
    """A connection to the coordinator at `address`, or to the only one of this user, or to one that
    is started."""
    check_no_url(address)
    keys = configuration.settings.coordinator.keys
    models_named = names_models(configuration)
    if address is not None and models_named:
        raise UserError(f"{models_named} has no effect with --connect: leave out one of the two")
    if address is None and not models_named and (found := only_announcement()) is not None:
        address, keys = found.address, keys or found.keys
        note(f"using the coordinator at {address} ({found.process})")
    if address is not None:
        with open_client(
            address, keys, "client", configuration.settings.coordinator.answer_s
        ) as client:
            state = client.status()
            _tell_of_losses(state.workers)
            yield Connection(client, state, address=address)
        return
    if models_named and announcements():
        note(f"starting separate processes: {models_named} changes no running worker")
    configuration = with_choices(configuration)
    if said := blocks_in_words(configuration.settings.target):
        note(said)
    with ExitStack() as owned:
        supervisor = owned.enter_context(Supervisor())
        begun = begin_stack(supervisor, configuration)
        with spinner() as say:
            say("starting")
            stack = begun()
            state = wait_until_ready(supervisor, stack, say)
        _tell_of_losses(state.workers)
        client = owned.enter_context(stack.connect())
        yield Connection(client, state, stack)
        if configuration.settings.coordinator.record:
            _tell_of_recordings(supervisor, stack.coordinator)


def with_choices(configuration: Configuration) -> Configuration:
    """Return settings with weights and a draft chosen where the user gave none; the choice is
    reported."""
    weights = configuration.origins["target.model"] == POSITIONAL
    own = configuration.settings.draft
    draft = own.kind == "auto" and not own.model
    if not configuration.settings.target.model or not (weights or draft):
        return configuration
    with spinner() as say:
        say(f"reading {spelled(configuration.settings.target.model)}")
        check_target(configuration.settings)
        planner = "launch.planning.choice"
        if not installed(planner):
            note("launch/planning is not installed: weights and draft are the defaults")
            return configuration
        configuration, said = extra(planner).with_choices(configuration, say)
    for line in said:
        note(line)
    return configuration


def _tell_of_recordings(supervisor: Supervisor, coordinator: Child) -> None:
    """End our coordinator, which completes its recordings, and report those that it could not
    write."""
    supervisor.end([coordinator])
    for line in coordinator.listen():
        if "recording" in line:
            note(line.partition(" WARNING ")[2] or line)


def models_of(state: Reported, *, draft: bool = True) -> str:
    """Describe the models of a coordinator: "target demo (fp32) · draft demo"; `draft`: the draft's
    as well."""
    roles: tuple[Role, ...] = ("target", "draft") if draft else ("target",)
    firsts = [(role, all_serving(state.workers, role)[:1]) for role in roles]
    return " · ".join(describe(role, worker) for role, found in firsts for worker in found)


def all_serving(workers: Sequence[WorkerState], role: Role) -> list[WorkerState]:
    """Return the workers of a role that are neither on standby nor leaving."""
    in_role = [worker for worker in workers if role in worker.roles]
    return [worker for worker in in_role if not (worker.standby or worker.leaving)]


def kernels_of(state: Reported) -> str:
    """Describe the kernels of a coordinator's workers: "kernels AVX-512 (target), AVX2 (draft)";
    empty if none reports any."""
    by_title: dict[str, list[str]] = {}
    for worker in state.workers:
        if worker.kernels:
            by_title.setdefault(worker.kernels.partition(":")[0], []).append(worker.name)
    titles = [f"{title} ({', '.join(names)})" for title, names in by_title.items()]
    return f"kernels {', '.join(titles)}" if titles else ""


def slow_kernels(state: Reported) -> list[str]:
    """Return a warning for each worker whose kernels are slow or missing, with the reason."""
    slow = (worker for worker in state.workers if ":" in worker.kernels)
    return [printable(f"kernels of {worker.name}: {worker.kernels}") for worker in slow]


def ends_of(state: Reported) -> str:
    """Describe the end tokens of a coordinator's target; empty without a target."""
    for target in all_serving(state.workers, "target")[:1]:
        ends = ", ".join(map(printable, target.ends))
        return f"replies end at {ends}" if ends else "no token ends a reply; only max_tokens does"
    return ""


def ahead_of(draft: DraftSettings) -> bool | None:
    """Return the value of `draft.ahead` for a request; None leaves it to the coordinator."""
    return None if draft.ahead == "auto" else draft.ahead


def is_url(address: str) -> bool:
    """True if this is the address of a server over HTTP, not of a coordinator."""
    return address.startswith(("http://", "https://"))


def speaks_http(address: str | None) -> bool:
    """True if a command should use a server over HTTP, not a coordinator; `UserError` for an
    address without a scheme."""
    if address is None or is_url(address):
        return address is not None
    if address != "ipc" and not address.startswith(("ipc://", "tcp://")):
        named = re.fullmatch(r"[\w.-]+:\d+|\[[\da-fA-F:.]+\]:\d+", address)
        url = f"http://{address if named else 'HOST:PORT'}"
        raise UserError(
            f"{address!r} is not an address: write {url} for a server over HTTP; ipc://PATH or "
            "tcp://HOST:PORT for a coordinator"
        )
    return False


ON_ITS_MACHINE = "on the server's machine, leave out --connect"


def check_no_url(address: str | None, what: str = "this command") -> None:
    """`UserError` if the address is a URL: `what` needs a coordinator."""
    if address is not None and is_url(address):
        raise UserError(
            f"{what} does not work with the URL {address}: {ON_ITS_MACHINE}; on another machine, "
            "connect to the tcp:// address of its coordinator (--coordinator.listen)"
        )


def is_lossy(worker: WorkerState) -> bool:
    """True if the tokens of a target depend on the rest of the batch."""
    return weights_of(worker) == LOSSY


def weights_of(worker: WorkerState) -> str:
    """The type of a target's weights, from its fingerprint; empty for a draft."""
    return worker.fingerprint.split("/")[1] if worker.fingerprint else ""


def cache_of(worker: WorkerState) -> str:
    """The type of a target's keys and values, from its fingerprint; empty for a draft."""
    return worker.fingerprint.rpartition("/")[2]


def _tell_of_losses(workers: Iterable[WorkerState]) -> None:
    """Report that a target is not lossless; its worker's warning went to a log file."""
    if any(is_lossy(worker) for worker in workers):
        note(
            f"{LOSSY} is not lossless: one scale for all rows of a pass makes a token depend "
            "on the other rows"
        )


def find_coordinator(
    configuration: Configuration,
    address: str | None,
    *,
    role: Literal["client", "operator"] = "client",
) -> Client:
    """A client of the coordinator at `address`, or of the only one of this user; `UserError` if
    there is none. `role`: of its key over tcp."""
    check_no_url(address)
    if address is None:
        address, configuration = only_coordinator(configuration, "serve")
    coordinator = configuration.settings.coordinator
    return open_client(address, coordinator.keys, role, coordinator.answer_s)


def only_coordinator(
    configuration: Configuration, command: str = "coordinator"
) -> tuple[str, Configuration]:
    """Return the address of this user's only coordinator, and the settings with its keys;
    `UserError` if there is none, with the command that starts one."""
    if (found := only_announcement()) is None:
        raise UserError(
            f"you have no coordinator on this machine: run `dovetail {command}`, or use --connect "
            "ADDRESS"
        )
    keys = configuration.settings.coordinator.keys or found.keys
    return found.address, configuration.over("the coordinator's", {"coordinator.keys": keys})


def open_client(
    address: str, keys: str, role: Literal["client", "operator"], answer_s: float
) -> Client:
    """Return a client of the coordinator at an address; `LinkClosed` without an answer."""
    link = open_link(address, keys=Path(keys) if keys else None, role=role)
    try:
        return Client(link, answer_s)
    except (LinkClosed, RequestError):
        link.close()
        raise


def names_models(configuration: Configuration) -> str:
    """The first flag about the workers; `--draft none` and `--draft.ahead`, which any coordinator
    supports, are not."""
    wishes = ["draft.ahead"]
    wishes += ["draft.kind"] if configuration.value("draft.kind") == "none" else []
    for name, origin in configuration.origins.items():
        ours = name.startswith(("target.", "draft.")) and name not in wishes
        if ours and origin.startswith(("--", POSITIONAL)):
            return f"--{name}"
    return ""


def describe(role: str, worker: WorkerState) -> str:
    """Describe the model of a worker: "target demo (int8)"."""
    cache = f"cache {cache_of(worker)}" if cache_of(worker) in ("half", "q8") else ""
    details = ", ".join(filter(None, (weights_of(worker), cache, worker.placement)))
    return f"{role} {shorten_model(worker.model)}" + (f" ({details})" if details else "")


def shorten_model(model: str) -> str:
    """Return a model's short name: "demo", "demo dovetail" (an embedded head), a GGUF file's name,
    "demo (int4 substitute)"."""
    path = Path(model)
    name, bracket, which = path.name.partition(" (")
    if is_gguf(name) or is_gguf(path):
        return path.name
    if not path.is_relative_to(DEMO_FOLDER):
        return model
    return f"demo {path.name}" if path.parent.name == "heads" else f"demo{bracket}{which}"


def call_model(model: str) -> str:
    """Return the name of a model in a live view: that of `shorten_model`, without its folder."""
    return folder_name(shorten_model(model))


@contextmanager
def connected_by_target(
    configuration: Configuration, address: str | None
) -> Iterator[tuple[Connection, Configuration]]:
    """A connection from `connected`, and the settings with the target's sampling defaults; the
    changes are reported. A target on another machine has none, since its folder is not here."""
    if names_models(configuration):  # a damaged file is reported before a model is loaded
        with suppress(CheckpointError):  # a missing model, by the place that looks for it
            with_generation_config(configuration)
    with connected(configuration, address) as connection:
        if connection.stack is not None:
            configuration, taken = with_generation_config(configuration)
            note(ends_of(connection.state))
        else:
            configuration, taken = by_folder(configuration, _folder(connection.state.workers))
        if taken:
            note(taken)
        yield connection, fitting(configuration)


def _folder(workers: tuple[WorkerState, ...]) -> Path | None:
    """The folder of the serving target; None if it is on another machine, or not found."""
    for worker in all_serving(workers, "target"):
        if worker.host != socket.gethostname():
            return None
        with suppress(OSError):
            if (folder := Path(f"/proc/{worker.pid}/cwd", worker.model)).is_dir():
                return folder
        from dovetail.workers.models.checkpoints.hub import local_folder

        with suppress(CheckpointError):
            return local_folder(worker.model)
    return None
