"""`assisted` in `dovetail bench`: transformers' assisted generation with the same two models, on
the cores of our target and our draft together.

One process holds both models, as transformers has it, and is asked reply by reply over a link;
while another method has its turn it sleeps. It is measured with a thread on each of these cores,
and with a single thread too, which is the faster one for small models: `bench` reports the better.
A trial leaves out what is far from it, such as threads that wait for each other because something
else is running.

`python -m peers.assisted` is that process; nothing but it imports torch.
"""

import importlib.metadata
import json
import os
import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dovetail.launch.bench.methods import PeerReply
from dovetail.launch.cli import run
from dovetail.launch.console.help import HelpCommand
from dovetail.launch.machine.cores import CoreLayout, parse_cores
from dovetail.launch.machine.topology import Place, bind, format_numbers
from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from dovetail.launch.processes.nursery import THREAD_VARIABLES
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import DovetailError, LinkClosed, UserError
from dovetail.protocol.links import Hub, Link, open_hub, open_link
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import Sampling, Settings
from peers.generated import Generated

if TYPE_CHECKING:
    from dovetail.runtime.text.tokenizer import TextCodec

ASSISTED = "assisted"
MODULE = "peers.assisted"
MOST_CORES_FOR_ONE_THREAD = 8
"""The most cores with which a single thread is tried: with more it is not the faster choice, and
trying it would take as long as all else."""
TRIAL_TOKENS = 16
HOPELESS = 3.0
"""A number of threads that takes so many times as long as another is not measured."""
POLL_MS = 1000


@dataclass(frozen=True)
class Options:
    """It has none."""


class Engine(ABC):
    """Another engine in a process of its own."""

    identity: str
    """The engine that decodes; the models are those of the settings."""
    cores: tuple[int, ...]
    thread_counts: tuple[int, ...]
    """The numbers of threads that it is measured with."""
    _child: Child

    @abstractmethod
    def decode(
        self, turns: Sequence[str], *, sampling: Sampling, max_tokens: int, seed: int, threads: int
    ) -> PeerReply:
        """Decode one reply to its end."""

    def peak_rss_mb(self) -> float:
        """The most memory that it ever held, in 10^6 bytes."""
        return self._child.peak_rss_bytes() / 1e6

    @abstractmethod
    def close(self) -> None:
        """End the connection; the process ends with its supervisor."""

    def _try(self, threads: int) -> float:
        """Seconds of the second of two short replies."""
        for _ in range(2):
            reply = self.decode(
                ("Hello.",), sampling=Sampling(), max_tokens=TRIAL_TOKENS, seed=0, threads=threads
            )
        return reply.result.wall_s


class AssistedPeer(Engine):
    """The process of transformers, and a link to it."""

    def __init__(
        self, supervisor: Supervisor, configuration: Configuration, layout: CoreLayout
    ) -> None:
        """Returns when both models are loaded; what the process has to say if they cannot be is
        raised."""
        check(configuration.settings)
        self.cores = tuple(sorted({*layout.target.cores, *layout.draft.cores}))
        arguments = (
            f"--cores={format_numbers(self.cores)}",
            *configuration.arguments("target", "draft"),
        )
        self._child = supervisor.start(
            f"{ASSISTED}: transformers", arguments, module=MODULE, reads=True
        )
        address = supervisor.await_address(self._child)
        self._link: Link = open_link(address, role="client")
        self.identity = f"transformers {importlib.metadata.version('transformers')}"
        self.thread_counts = near_the_fastest(
            {threads: self._try(threads) for threads in thread_counts_of(len(self.cores))}
        )

    def decode(
        self, turns: Sequence[str], *, sampling: Sampling, max_tokens: int, seed: int, threads: int
    ) -> PeerReply:
        told = self._asked(
            turns=list(turns),
            sampling=sampling.model_dump(mode="json", include=set(Sampling.model_fields)),
            max_tokens=max_tokens,
            seed=seed,
            threads=threads,
        )
        return PeerReply(Result.model_validate_json(json.dumps(told["result"])), told["together"])

    def close(self) -> None:
        self._link.close()

    def _asked(self, **question: Any) -> dict[str, Any]:
        try:
            self._link.send([json.dumps(question).encode()])
            frames = self._link.receive(None)
        except LinkClosed:
            self._child.process.wait()
            raise self._child.failure() from None
        assert frames is not None
        told: dict[str, Any] = json.loads(frames[0])
        if "error" in told:
            raise DovetailError(f"{ASSISTED}: {told['error']}")
        return told


def thread_counts_of(cores: int) -> tuple[int, ...]:
    """Return what is tried on so many cores: a thread on each, and one."""
    return (cores, 1) if 1 < cores <= MOST_CORES_FOR_ONE_THREAD else (cores,)


def near_the_fastest(trials: Mapping[int, float]) -> tuple[int, ...]:
    """The numbers of threads whose trial took no more than `HOPELESS` times as long as the
    fastest."""
    return tuple(
        threads for threads, seconds in trials.items() if seconds <= HOPELESS * min(trials.values())
    )


def check(settings: Settings, method: str = ASSISTED) -> None:
    """`UserError` for what another engine, the method of this name, would not do as we do it."""
    if settings.sampling.looks_back:
        raise UserError(
            f"--method {method} takes temperature, top-k, top-p and min-p: leave penalties, "
            "biases and min_tokens out"
        )
    if settings.target.device != "cpu":
        raise UserError(
            f"--method {method} runs on the CPU, and target.device is "
            f"{settings.target.device!r}: leave one of the two out"
        )


def result_of(
    generated: Generated, codec: "TextCodec", prompt: Sequence[int], seed: int, ends: Sequence[int]
) -> Result:
    """Return what a reply of the peer is in our terms. Its first round, which computes the prompt,
    is none of decoding; what is not the target's is drafting."""
    first, *later = generated.rounds
    tokens, accepted = generated.tokens, sum(r.committed - 1 for r in later)
    drafted = sum(r.rows - 1 for r in later)
    wall_ns, first_ns = (
        (generated.rounds[-1].ended_ns - generated.began_ns),
        first.ended_ns - generated.began_ns,
    )
    verify_s = sum(r.pass_ns for r in later) / 1e9
    decode_s = (wall_ns - first_ns) / 1e9
    detokenizer = codec.detokenizer(prompt)
    shown = tokens[:-1] if tokens[-1] in ends else tokens
    return Result(
        text="".join(map(detokenizer.push, shown)) + detokenizer.flush(),
        token_ids=tokens,
        prompt_tokens=len(prompt),
        completion_tokens=len(tokens),
        finish_reason="stop" if tokens[-1] in ends else "length",
        seed=seed,
        fingerprint="",
        rounds=len(later),
        tau=sum(r.committed for r in later) / len(later) if later else None,
        accepted_tokens=accepted,
        drafted_tokens=drafted,
        grown_nodes=drafted,
        acceptance_rate=accepted / drafted if drafted else None,
        accepted_per_position=(),
        hit_rate=None,
        wall_s=wall_ns / 1e9,
        time_to_first_token_s=first_ns / 1e9,
        tokens_per_s=sum(r.committed for r in later) / decode_s if later else 0.0,
        prefill_s=first_ns / 1e9,
        draft_exposed_s=decode_s - verify_s,
        verify_s=verify_s,
        transport_s=0.0,
        queue_s=0.0,
        coordinator_s=0.0,
        unaccounted_s=0.0,
        bytes_per_round=0.0,
        verified_rows=sum(r.rows for r in later),
    )


# -- the process -----------------------------------------------------------------------------------


@click.command(cls=HelpCommand)
@click.option("--cores", required=True)
@click.option("--parent", type=int, required=True)
@settings_flags("target", "draft")
def process(configuration: Configuration, cores: str, parent: int) -> None:
    """Load both models, and decode what is asked for until nobody is there to ask."""
    end_with(parent)
    end_when_told()
    said = claim_stdout()
    place = Place(parse_cores(cores))
    bind(place)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(len(place.cores))))
    peer = _Assisted(configuration.settings)
    hub = open_hub("ipc")
    try:
        print(hub.address, file=said, flush=True)
        _answer(hub, peer)
    finally:
        hub.close()


def _answer(hub: Hub, peer: "_Assisted") -> None:
    """Answer the questions that arrive, one after the other."""
    poller = select.poll()
    poller.register(hub.fileno(), select.POLLIN)
    while True:
        while (arrived := hub.receive()) is not None:
            asker, frames = arrived
            hub.send(asker, [json.dumps(_attempt(peer, json.loads(frames[0]))).encode()])
        poller.poll(POLL_MS)


def _attempt(peer: "_Assisted", question: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return peer.decode(question)
    except Exception as error:  # told to whoever asked
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


class _Assisted:
    """Both models and the tokenizer."""

    def __init__(self, settings: Settings) -> None:
        from dovetail.runtime.text.tokenizer import TextCodec
        from peers.model import AssistedModel  # torch comes in here, after the binding

        source = settings.target.model or str(DEMO_FOLDER / "target")
        self._model: AssistedModel = AssistedModel(
            source, assistant_of(settings), weights=settings.target.weights
        )
        self._codec = TextCodec(self._model.tokenizer, self._model.vocabulary)

    def decode(self, question: Mapping[str, Any]) -> dict[str, Any]:
        prompt = self._codec.encode_turns(question["turns"])
        sampling = Sampling.model_validate_json(json.dumps(question["sampling"]))
        asked = {name: question[name] for name in ("max_tokens", "seed", "threads")}
        generated = self._model.generate(prompt, sampling=sampling, **asked)
        result = result_of(
            generated, self._codec, prompt, question["seed"], self._model.vocabulary.end
        )
        return {"result": result.model_dump(mode="json"), "together": generated.rounds[0].committed}


def assistant_of(settings: Settings) -> str:
    """The whole model that assists: the draft if it is one; of the embedded target the embedded
    draft, where another draft or none is named."""
    from dovetail.workers.heads.head import classify

    draft = settings.draft
    if draft.model and classify(draft.model, allow_bin=draft.pickled) is None:
        return draft.model
    if settings.target.model:
        raise UserError(
            f"--method {ASSISTED} needs a whole model for the assistant: name one with "
            f"--method {ASSISTED},draft.model=FOLDER"
        )
    return str(DEMO_FOLDER / "draft")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], process))
