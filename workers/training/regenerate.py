"""Lets the target answer chats, many at a time, and stores the answers as chats.

A draft learns from its target's texts, not from others. The users' turns are sent one after the
other, each after the target's own answers to the earlier ones. The file has OpenAI's form, a line
for each chat and temperature in the order in which they end, with "id", "finish_reason",
"temperature", "target", "weights", "seed" and "new_tokens"; an interrupted run resumes with the
missing ones. Noise depends on seed, chat and temperature alone, so an answer does not depend on how
many are written at once."""

import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dovetail.protocol import files as disk
from dovetail.protocol.errors import UserError
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling
from dovetail.workers.models.checkpoints.choices import suppressed_in
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.speculation.noise import gumbel_noise
from dovetail.workers.speculation.sampling import MASKED, choose, process_logits
from dovetail.workers.training.data.chats import Chat, Message, RefusedError, Renderer, read_chats
from dovetail.workers.training.run import Callback, Progress, silent

PASS_ROWS = 512  # tokens of a pass, including those of prompts
NO_ROOM = "whose question does not fit into the context, or is refused by the chat template"


@dataclass(frozen=True)
class Writing:
    """How a target writes: every chat once at each temperature."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 1024  # tokens of the longest answer
    sessions: int = 64  # answers that are written at a time
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The content of a finished file."""

    chats: int
    left_out: Mapping[str, int]  # why a chat has no answer, and how many


@dataclass(eq=False)
class _Session:
    """One prompt and the answer to it so far."""

    cache: Cache
    temperature: float
    key: bytes
    most: int  # the most tokens of prompt and answer
    log: list[int]
    prompt: int  # tokens of the prompt

    @property
    def due(self) -> Sequence[int]:
        """The tokens that have no row in the cache yet."""
        return self.log[self.cache.length :]


class AnswerWriter:
    """Writes answers to prompts, several in a pass over the weights."""

    def __init__(self, model: LanguageModel) -> None:
        self.written = 0  # the number of answer tokens so far
        self._model = model
        self._sessions: list[_Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return self._model.context

    def ended(self, answer: Sequence[int]) -> bool:
        """Return whether an answer ended by itself."""
        return answer[-1] in self._model.end

    def ask(
        self, prompt: Sequence[int], *, temperature: float, key: bytes, new_tokens: int
    ) -> _Session:
        """Start answering a prompt, shorter than the context, with at most this many tokens."""
        most = min(self._model.context, len(prompt) + new_tokens)
        session = _Session(
            self._model.new_cache(most), temperature, key, most, list(prompt), len(prompt)
        )
        self._sessions.append(session)
        return session

    def step(self) -> list[tuple[_Session, list[int]]]:
        """Make one pass; return the answers that it has finished, each with the id that ends it
        unless it grew too long."""
        taken = self._take()
        positions = torch.cat(
            [torch.arange(s.cache.length, s.cache.length + len(due)) for s, due in taken]
        )
        segments = [Segment(s.cache, s.cache.length, len(due)) for s, due in taken]
        last = torch.tensor([len(due) for _, due in taken]).cumsum(0) - 1
        logits = self._model.forward(
            torch.tensor([token for _, due in taken for token in due]),
            positions,
            segments,
            rows=last,
        )
        for session, due in taken:
            session.cache.keep(
                range(session.cache.length, session.cache.length + len(due)), len(due)
            )
        read = [row for row, (session, _) in enumerate(taken) if not session.due]
        sessions = [taken[row][0] for row in read]
        for session, token in zip(sessions, self._choose(sessions, logits[read]), strict=True):
            session.log.append(token)
        self.written += len(sessions)
        finished = [
            session
            for session in sessions
            if self.ended(session.log) or len(session.log) == session.most
        ]
        self._sessions = [session for session in self._sessions if session not in finished]
        return [(session, session.log[session.prompt :]) for session in finished]

    def _take(self) -> list[tuple[_Session, Sequence[int]]]:
        """Return the sessions of a pass, with the tokens to compute for each: at least one of every
        session, and as much of the prompts as fits."""
        room, taken = (
            max(PASS_ROWS - len(self._sessions), 0),
            list[tuple[_Session, Sequence[int]]](),
        )
        for session in self._sessions:
            due = session.due[: 1 + room]
            room -= len(due) - 1
            taken.append((session, due))
        return taken

    def _choose(self, sessions: Sequence[_Session], logits: Tensor) -> list[int]:
        """Choose a token for each row of logits [N, V], at its session's temperature."""
        chosen = [0] * len(sessions)
        never = [token for token in self._model.suppressed if 0 <= token < logits.shape[1]]
        index = torch.tensor(never, dtype=torch.long, device=logits.device)
        logits = logits.index_fill(1, index, MASKED)
        for temperature in {session.temperature for session in sessions}:
            rows = [
                row for row, session in enumerate(sessions) if session.temperature == temperature
            ]
            noise = None
            if temperature > 0:
                noise = torch.stack(
                    [
                        gumbel_noise(
                            sessions[r].key, len(sessions[r].log), logits.shape[1], logits.device
                        )
                        for r in rows
                    ]
                )
            ids, _ = choose(process_logits(logits[rows], Sampling(temperature=temperature)), noise)
            for row, token in zip(rows, ids.tolist(), strict=True):
                chosen[row] = token
        return chosen


@dataclass
class _Job:
    """A chat at one temperature: the remaining questions, and the turns so far."""

    id: str
    number: int
    temperature: float
    asks: deque[Sequence[Message]]  # the messages before each answer and after the last one
    turns: list[Message] = field(default_factory=list)
    cut: bool = False  # the last answer grew too long


def regenerate_files(
    files: Sequence[Path],
    target: str,
    renderer: Renderer,
    out: Path,
    writing: Writing,
    *,
    weights: str = "fp32",
    device: str = "cpu",
    progress: Callback = silent,
) -> Outcome:
    """Write the target's answers to the chats of files, see `regenerate`."""
    chats = [chat for file in files for chat in read_chats(file)]
    model = load_language_model(target, weights=weights, device=device, proof="auto")
    model.suppressed = suppressed_in(model.checkpoint.folder, model.end)
    return regenerate(chats, model, renderer, out, writing, progress=progress)


def regenerate(
    chats: Sequence[Chat],
    model: LanguageModel,
    renderer: Renderer,
    out: Path,
    writing: Writing,
    *,
    progress: Callback = silent,
) -> Outcome:
    """Write the target's answers to chats into the file `out`, except those that it holds already.
    Raises `UserError` if it holds something else."""
    left_out = Counter[str]()
    jobs = [
        job
        for number, chat in enumerate(chats, 1)
        for job in _jobs(chat, number, writing, left_out)
    ]
    made: dict[str, Any] = {"target": model.checkpoint_digest, "weights": model.weights}
    made |= {"seed": writing.seed, "new_tokens": writing.new_tokens}
    done = _read_done(out, {job.id: job for job in jobs}, made)
    with disk.writing(out, "the answers"):
        file = out.open("ab")
    with file:
        writer, answered, begin = AnswerWriter(model), len(done), time.monotonic()
        for job in _write(
            writer, deque(job for job in jobs if job.id not in done), renderer, writing
        ):
            if job.turns:
                answered += 1
                _append(file, out, job, made)
            else:
                left_out[NO_ROOM] += 1
            ended = answered + left_out[NO_ROOM]
            note = f"{answered:,} of {len(jobs):,} chats"
            progress(
                Progress(
                    "writing",
                    ended / len(jobs),
                    ended,
                    writer.written,
                    spent_s=time.monotonic() - begin,
                    note=note,
                )
            )
    return Outcome(answered, left_out)


def _jobs(chat: Chat, number: int, writing: Writing, left_out: "Counter[str]") -> Iterator[_Job]:
    asks = list[Sequence[Message]]()
    pending = list[Message]()
    for message in chat.messages:
        if message.role != "assistant":
            pending.append(message)
        elif pending:
            asks.append(pending)
            pending = []
    if pending:
        asks.append(pending)
    if not asks:
        left_out["without a question"] += 1
        return
    for temperature in dict.fromkeys(writing.temperatures):
        yield _Job(f"{number}@{temperature:g}", number, temperature, deque(asks))


def _write(
    writer: AnswerWriter, jobs: deque[_Job], renderer: Renderer, writing: Writing
) -> Iterator[_Job]:
    """Yield every job as it ends, answered as far as there is room."""
    asked = dict[_Session, _Job]()
    while jobs or asked:
        while jobs and len(writer) < writing.sessions:
            job = jobs.popleft()
            if not _ask(writer, asked, job, renderer, writing):
                yield job
        for session, answer in writer.step() if asked else ():
            job = asked.pop(session)
            job.cut = not writer.ended(answer)
            job.turns.append(Message("assistant", renderer.decode(answer)))
            if job.cut or not job.asks or not _ask(writer, asked, job, renderer, writing):
                yield job


def _ask(
    writer: AnswerWriter,
    asked: dict[_Session, _Job],
    job: _Job,
    renderer: Renderer,
    writing: Writing,
) -> bool:
    """Ask the next question of a chat. Return False, ending the chat with its last answer, if it
    has no room in the context or the template refuses it."""
    messages = [*job.turns, *job.asks[0]]
    try:
        prompt = renderer.prompt(messages)
    except RefusedError:
        return False
    if len(prompt) >= writer.context:
        return False
    job.asks.popleft()
    job.turns = messages
    key = session_key(writing.seed, job.number, prompt)
    asked[
        writer.ask(prompt, temperature=job.temperature, key=key, new_tokens=writing.new_tokens)
    ] = job
    return True


def _append(file: IO[bytes], out: Path, job: _Job, made: Mapping[str, Any]) -> None:
    line = {
        "id": job.id,
        "messages": [{"role": message.role, "content": message.content} for message in job.turns],
        "finish_reason": "length" if job.cut else "stop",
        "temperature": job.temperature,
        **made,
    }
    disk.append(file, out, "the answers", json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _read_done(out: Path, jobs: Mapping[str, _Job], made: Mapping[str, Any]) -> set[str]:
    """Return the ids that a file holds; an incomplete last line is removed. Raises `UserError` if
    the file does not belong to these chats and this target, or differs from `made`."""
    if not out.is_file():
        with disk.writing(out, "the answers"):
            out.parent.mkdir(parents=True, exist_ok=True)
        return set()
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    done = set[str]()
    for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
        try:
            row: dict[str, Any] = json.loads(line)
            first = [message["content"] for message in row["messages"]][
                : len(jobs[row["id"]].asks[0])
            ]
            fits = (
                first == [message.content for message in jobs[row["id"]].asks[0]]
                and row["target"] == made["target"]
            )
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise UserError(
                f"{out}, line {number}, is not an answer of this target to these chats at these "
                "temperatures: give another file, or remove this one"
            )
        for name in made:
            if (was := row.get(name, "unknown")) != made[name]:
                raise UserError(
                    f"{out}, line {number}, was written with {name} {was}, not {made[name]}: give "
                    "another file, or remove this one"
                )
        done.add(row["id"])
    if whole < len(content):
        with out.open("rb+") as file:
            file.truncate(whole)
    return done
