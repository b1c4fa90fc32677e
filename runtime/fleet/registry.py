"""The state of the service, the registry of workers and clients, and the checks of a Hello that
only the coordinator can make: protocol versions, the role of a key, whether a draft fits its
target. Without sockets; a refusal is a `RequestError` that is sent to the peer."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import VERSION, Hello, LoadingState, Role, Supervised
from dovetail.protocol.vocabulary import TokenTable
from dovetail.runtime.control.pairs import share_cores
from dovetail.runtime.costs.passes import RowCosts
from dovetail.runtime.fleet.block_index import BlockIndex
from dovetail.runtime.fleet.peers import ClientPeer, Language, Worker
from dovetail.runtime.fleet.prefix_cache import PrefixCache
from dovetail.runtime.fleet.scheduler import Turns
from dovetail.runtime.telemetry.picture import cores_in_words
from dovetail.runtime.text.tokenizer import Spelling


def check_fit(draft: Worker, target: Worker) -> None:
    """Raise `RequestError` with the difference, unless a draft can draft for this target."""
    if draft.language is not None and target.language is not None:
        table = target.language.table
        if why_not := table.against(draft.language.table, draft.model, target.model):
            raise RequestError("vocabulary", why_not)
    reads, states = draft.hello.reads, target.hello.states
    if reads is None:
        return
    if (
        states is None
        or (reads.width, reads.vocabulary_size) != (states.width, target.facts.size)
        or max(reads.taps, default=0) > states.layers
    ):
        before = f" before layers {', '.join(map(str, reads.taps))}" if reads.taps else ""
        wanted = (
            f"hidden states of width {reads.width}{before} and a vocabulary of "
            f"{reads.vocabulary_size}"
        )
        has = (
            "shows none"
            if states is None
            else f"has width {states.width}, {states.layers} layers and a vocabulary of "
            f"{target.facts.size}"
        )
        text = (
            f"the draft head {draft.model} reads {wanted}; the target {target.model} {has}. "
            "Choose a head that was made for this target."
        )
        raise RequestError("settings", text)


def is_stranger(draft: Worker, target: Worker) -> bool:
    """Return whether a draft head was trained for a checkpoint other than this target's."""
    reads, states = draft.hello.reads, target.hello.states
    return (
        reads is not None
        and states is not None
        and bool(reads.trained_for and states.checkpoint)
        and reads.trained_for != states.checkpoint
    )


def other_checkpoint(draft: Worker, target: Worker) -> str:
    """Return the warning that a draft head was trained for another checkpoint."""
    assert draft.hello.reads is not None
    assert target.hello.states is not None
    return (
        f"the draft head {draft.model} was trained for the checkpoint "
        f"{draft.hello.reads.trained_for[:16]}, but the target {target.model} is "
        f"{target.hello.states.checkpoint[:16]}: the output is the same, but fewer of its "
        "guesses may be right"
    )


def shared_cores(worker: Worker, other: Worker) -> str:
    """Return the warning that two workers of one host compute on the same cores."""
    cores = sorted(set(worker.hello.cores).intersection(other.hello.cores))
    return (
        f"the workers {worker.name} and {other.name} on {worker.hello.host} both compute on cores "
        f"{cores_in_words(cores)} and slow each other down: give each its own with `--cores`, or "
        "end one of them"
    )


def read_language(hello: Hello, known: Iterable[Worker] = ()) -> Language | None:
    """Return a Hello's vocabulary, with its tokenizer unless it is a draft's; None without one. A
    table that one of the `known` workers sent, too, is not read again."""
    drafts = hello.roles == ("draft",)
    if drafts and not (hello.vocabulary or hello.tokenizer or hello.table):
        return None
    tokenizer = b"" if hello.tokenizer is None else hello.tokenizer.data
    if hello.vocabulary is None or not (tokenizer or (drafts and hello.table is not None)):
        raise RequestError(
            "protocol",
            f"the worker {hello.name} registered without vocabulary and tokenizer",
        )
    same = (
        worker.language.table
        for worker in known
        if worker.language and hello.table is not None and hello.table == worker.hello.table
    )
    try:
        table = next(same, None) or (
            TokenTable.read(tokenizer)
            if hello.table is None
            else TokenTable.unpacked(hello.table.data)
        )
        if hello.table is not None and table.digest != hello.vocabulary.digest:
            raise RequestError(
                "protocol", "its token table is of another vocabulary than it reports"
            )
        own = b"" if drafts else tokenizer
        return Language(hello.vocabulary, table, Spelling(table), own)
    except CheckpointError as error:
        raise RequestError("vocabulary", f"{hello.model or hello.name}: {error}") from None
    except RequestError as error:
        raise RequestError(error.code, f"{hello.model or hello.name}: {error}") from None


@dataclass
class ServiceState:
    """State that concerns all sessions of one coordinator."""

    epoch: int
    ending: bool = False  # True if nothing new begins
    given_up: str = ""
    """Why the supervisor ends the service: a part is lost for good. Empty if it does not."""
    drained: set[Role] = field(default_factory=set)
    """Roles of which an operator drained a worker, until the next one registers."""
    supervised: Supervised = field(default_factory=Supervised)
    """The last report of the supervisor; `supervised_ns`: its time."""
    supervised_ns: int = 0

    def refusal(self) -> RequestError:
        """Return why nothing new begins."""
        why = self.given_up
        return RequestError(
            "ending", f"the service is ending: {why}" if why else "the coordinator is ending"
        )


MAX_WORKERS = 64
LOADING_NS = 15 * 10**9
"""A worker that is silent for this long while its model loads is no longer listed."""
MAX_CLIENTS = 960  # the most clients: even then a lost worker can register again


class Registry:
    """The present peers, by their address on the hub."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.workers: dict[bytes, Worker] = {}
        self.clients: dict[bytes, ClientPeer] = {}
        self.engaged: set[tuple[str, int]] = set()
        """Workers promoted from standby, even if they have not received the message yet."""
        self._loading: dict[bytes, tuple[LoadingState, int]] = {}
        """The last progress of each loading worker, and when it arrived."""

    def hear_loading(
        self, peer: bytes, state: LoadingState, key: PeerKey | None, now_ns: int
    ) -> None:
        """Record the progress of a loading worker, if its key allows it and not too many load."""
        if "client" in state.roles or (key is not None and not key.may_be(state.roles)):
            return
        self._loading = {
            other: told
            for other, told in self._loading.items()
            if (told[0].host, told[0].name) != (state.host, state.name)
        }
        if len(self._loading) < MAX_WORKERS:
            self._loading[peer] = (state, now_ns)

    def loading(self, now_ns: int) -> tuple[LoadingState, ...]:
        """Return the progress of loading workers, except silent and registered ones."""
        here = {worker.process for worker in self.workers.values()}
        told = [state for state, at_ns in self._loading.values() if now_ns - at_ns < LOADING_NS]
        return tuple(state for state in told if (state.host, state.pid) not in here)

    def admit(
        self, peer: bytes, hello: Hello, key: PeerKey | None, now_ns: int
    ) -> Worker | ClientPeer:
        """Register a newcomer; raise `RequestError` with the reason of a refusal."""
        # No sender leaves out fields that an older minor version lacks.
        if hello.version != VERSION:
            raise RequestError(
                "version",
                f"{hello.name} speaks protocol {_dotted(hello.version)}, this coordinator "
                f"{_dotted(VERSION)}: run the same release of dovetail on both",
            )
        if key is not None and not key.may_be(hello.roles):
            raise RequestError(
                "role",
                f"the key {key.name!r} may be {', '.join(key.roles)}, not "
                f"{', '.join(hello.roles)}: use the key made for that role",
            )
        mates, most = (
            (self.clients, MAX_CLIENTS)
            if hello.roles == ("client",)
            else (self.workers, MAX_WORKERS)
        )
        if len(mates) >= most:
            raise RequestError(
                "capacity",
                f"{len(self.workers)} workers and {len(self.clients)} clients are registered, "
                "which is the limit: end some",
            )
        if hello.roles == ("client",):
            self.clients[peer] = ClientPeer(peer, hello)
            return self.clients[peer]
        worker = self._worker(peer, hello, now_ns)
        for target in self._others(worker, "target"):
            check_fit(worker, target)
        if worker.standby or (
            worker.plays("target")
            and any(other.plays("target") and other.serves for other in self.workers.values())
        ):
            self.check_place(worker)  # the registered drafts keep their target
        self.workers[peer] = worker
        self._loading.pop(peer, None)
        return worker

    def of_epoch(self, epoch: int) -> Worker | None:
        """Return the worker of this incarnation."""
        return next(
            (worker for worker in self.workers.values() if worker.hello.epoch == epoch), None
        )

    def check_place(self, newcomer: Worker) -> None:
        """Raise `RequestError` with the difference if a worker does not fit the registered ones."""
        for target in self._others(newcomer, "target"):
            check_fit(newcomer, target)
        for draft in self._others(newcomer, "draft"):
            check_fit(draft, newcomer)

    def misfits(self, target: Worker) -> list[tuple[Worker, RequestError]]:
        """Return the draft workers that registered before this target and do not fit it."""
        misfits = []
        for worker in self._others(target, "draft"):
            try:
                check_fit(worker, target)
            except RequestError as refusal:
                misfits.append((worker, refusal))
        return misfits

    def warnings(self, worker: Worker) -> list[str]:
        """Return warnings: a head for another checkpoint guesses badly, and workers with the same
        cores slow each other down."""
        pairs = [(worker, target) for target in self._others(worker, "target")] + [
            (draft, worker) for draft in self._others(worker, "draft")
        ]
        told = [
            other_checkpoint(draft, target) for draft, target in pairs if is_stranger(draft, target)
        ]
        return [
            *told,
            *(shared_cores(worker, other) for other in self._beside(worker)),
            *filter(None, [self.medley() if worker.plays("target") and worker.serves else ""]),
        ]

    def _beside(self, worker: Worker) -> list[Worker]:
        """Return other active workers of its role on its cores; draft and target take turns."""
        return [
            other
            for other in self.workers.values()
            if other is not worker
            and not (worker.standby or other.standby)
            and not set(worker.hello.roles).isdisjoint(other.hello.roles)
            and share_cores(worker.hello, other.hello)
        ]

    def medley(self) -> str:
        """Return a warning if targets of different checkpoints serve; else empty."""
        serving = [
            worker for worker in self.workers.values() if worker.plays("target") and worker.serves
        ]
        if (
            len(
                {
                    worker.hello.fingerprint.checkpoint
                    for worker in serving
                    if worker.hello.fingerprint is not None
                }
            )
            < 2
        ):
            return ""
        return (
            "targets of different models serve, and each request goes to any of them: "
            f"{'; '.join(f'{worker.name} has {worker.model}' for worker in serving)}"
        )

    def pick(self, role: str) -> Worker | None:
        """Return the available worker of a role that holds the fewest sessions."""
        return min(
            (w for w in self.workers.values() if w.plays(role) and w.available),
            key=lambda w: w.sessions,
            default=None,
        )

    def _worker(self, peer: bytes, hello: Hello, now_ns: int) -> Worker:
        if "client" in hello.roles:
            raise RequestError("role", "a client cannot be a worker as well")
        if hello.limits is None:
            raise RequestError("protocol", f"the worker {hello.name} registered without limits")
        if "target" in hello.roles and hello.fingerprint is None:
            raise RequestError(
                "protocol",
                f"the target worker {hello.name} registered without a fingerprint",
            )
        language = read_language(hello, self.workers.values())
        if hello.roles == ("draft",):  # never requested of a draft
            hello = hello.model_copy(update={"tokenizer": None, "table": None})
        assert hello.limits is not None
        worker = Worker(
            peer,
            hello,
            hello.limits,
            language,
            Turns(self._epoch, together=hello.limits.together, parts=hello.limits.prompt_rows > 0),
            now_ns,
            standby=hello.standby and (hello.host, hello.pid) not in self.engaged,
            shelf=PrefixCache(hello.limits.kept, hello.limits.shares),
            blocks=BlockIndex(hello.blocks, int(hello.reads is not None), hello.snapshots),
        )
        if "target" in hello.roles:
            worker.verifying = RowCosts(hello.curves, hello.experts)
        else:
            worker.drafting = RowCosts(hello.curves)
        return worker

    def _others(self, worker: Worker, role: Role) -> list[Worker]:
        """Return the serving workers of a role that this one must fit."""
        partner = "draft" if role == "target" else "target"
        return [
            other
            for other in self.workers.values()
            if other.plays(role) and other.serves and worker.plays(partner)
        ]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
