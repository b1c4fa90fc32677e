"""Fit: whether a draft can draft for a target. It must share the vocabulary, if it has one, and the
target must have the hidden states that it reads. Pure; a `RequestError` names the difference."""

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.messages import Hello
from dovetail.protocol.vocabulary import TokenTable
from dovetail.runtime.fleet.peers import Language, Worker
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
        or max(reads.taps, default=0) >= states.layers
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


def read_language(hello: Hello) -> Language | None:
    """Return a Hello's vocabulary, with its tokenizer unless it is a draft's; None without one."""
    drafts = hello.roles == ("draft",)
    if drafts and not (hello.vocabulary or hello.tokenizer or hello.table):
        return None
    tokenizer = b"" if hello.tokenizer is None else hello.tokenizer.data
    if hello.vocabulary is None or not (tokenizer or (drafts and hello.table is not None)):
        raise RequestError(
            "protocol",
            f"the worker {hello.name} registered without vocabulary and tokenizer",
        )
    try:
        table = (
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
