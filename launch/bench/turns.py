"""Runs methods in turn, prompt by prompt, so that other load affects all of them equally; the
processes of the others sleep. A reply is measured up to the first repeated 20-gram in the reply of
`none`, since any draft predicts a model that loops. The untimed first reply of `none` is also the
warm-up.

The file of `bench --out`, a JSON object a line: `bench` (settings, prompts, machine), `contenders`,
`task` (a prompt, and the length of its reply), each `reply`, and at the end the result as --json
prints it. A run continues where it stopped; an incomplete last line is dropped, and a file of
another run is refused."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from dovetail.launch.bench.contenders import Contender, Ours, Run, Task, Theirs, sampling_of
from dovetail.launch.bench.methods import NONE, Method, PromptSet
from dovetail.launch.cli import installed_version
from dovetail.launch.console.terminal import counted, note, progress_bar
from dovetail.launch.files.outputs import continued
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.connection import Connection
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.files import append
from dovetail.protocol.messages import Finished
from dovetail.protocol.profile import machine_key
from dovetail.runtime.session.comparison import Difference, first_difference

FIRST = b'{"bench": '  # the beginning of every such file
Where = tuple[str, float, str]  # set of prompts, temperature, id of the prompt


@dataclass(frozen=True)
class Remembered:
    """A contender whose replies are all in the file, so that it needs no process."""

    method: Method
    peak_mb: float
    told: str

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        raise AssertionError(f"{self.method.label} has already been measured")

    def peak_rss_mb(self) -> float:
        return self.peak_mb

    def identity(self) -> str:
        return self.told


@dataclass
class Journal:
    """The measurements so far; without a file, only for this run."""

    file: IO[bytes] | None = None
    known: dict[str, Any] = field(default_factory=dict)
    """Label -> method, threads and identity, as of the start of the run."""
    tasks: dict[Where, tuple[str, int, Finished]] = field(default_factory=dict)
    """Place -> prompt, tokens of its reply, and the reply of `none`, which sets the length."""
    replies: dict[tuple[str, Where, int], tuple[Finished, int]] = field(default_factory=dict)
    """Label, where, number -> the reply, and the tokens that came with its first round."""
    peaks: dict[str, float] = field(default_factory=dict)
    whole: bool = False  # true if the result is in the file
    headed: bool = False  # true if the file has its first line
    begun: bool = False  # true if this run has measured anything

    def task(self, where: Where, prompt: Prompt) -> Task | None:
        kept = self.tasks.get(where)
        return Task(prompt, *kept) if kept is not None else None

    def keep_task(self, where: Where, task: Task) -> None:
        self.begun = True
        self.tasks[where] = (task.turn, task.max_tokens, task.reference)
        told = {"at": where, "turn": task.turn, "max_tokens": task.max_tokens}
        self._write({"task": {**told, "reference": _reply_told(task.reference)}})

    def has(self, label: str, where: Where, number: int) -> bool:
        return (label, where, number) in self.replies

    def complete(self, labels: Iterable[str], where: Where, repeat: int) -> bool:
        return all(self.has(label, where, number) for label in labels for number in range(repeat))

    def reply(self, label: str, where: Where, number: int, task: Task) -> Run | None:
        kept = self.replies.get((label, where, number))
        return Run(task, *kept) if kept is not None else None

    def keep_reply(self, label: str, where: Where, number: int, run: Run, peak_mb: float) -> None:
        self.begun = True
        self.replies[label, where, number] = (run.finished, run.together)
        self.peaks[label] = max(peak_mb, self.peaks.get(label, 0.0))
        told = {"method": label, "at": where, "number": number, "together": run.together}
        self._write({"reply": {**told, "peak_rss_mb": peak_mb, **_reply_told(run.finished)}})

    def agree(self, found: Mapping[str, Contender]) -> dict[str, Contender]:
        """Return the contenders of the run in the file; `UserError` if those started now differ. A
        peer keeps its numbers of threads."""
        if not self.known:
            for label, one in found.items():
                told = {"name": one.method.name, "threads": one.method.threads}
                self.known[label] = {**told, "identity": one.identity()}
            self._write({"contenders": self.known})
            return dict(found)
        by_name = {contender.method.name: contender for contender in found.values()}
        agreed: dict[str, Contender] = {}
        for label, told in self.known.items():
            contender = by_name[told["name"]]
            if (identity := contender.identity()) != told["identity"]:
                what = f"the models or engines of {told['name']}"
                raise _other_run(what, told["identity"], identity)
            if isinstance(contender, Theirs):
                method = replace(contender.method, threads=told["threads"])
                contender = replace(contender, method=method)
            agreed[label] = contender
        return agreed

    def remembered(self, methods: Sequence[Method]) -> dict[str, Contender]:
        """The contenders of a complete run; nothing is started."""
        by_name = {method.name: method for method in methods}
        return {
            label: Remembered(
                replace(by_name[told["name"]], threads=told["threads"]),
                self.peaks.get(label, 0.0),
                told["identity"],
            )
            for label, told in self.known.items()
        }

    def end(self, result: Mapping[str, Any]) -> None:
        if not self.whole:
            self._write(result)
        self.whole = True

    def _write(self, told: Mapping[str, Any]) -> None:
        if self.file is not None:
            line = json.dumps(told).encode() + b"\n"
            append(self.file, Path(self.file.name), "what is measured", line)


@contextmanager
def open_journal(path: Path | None, heading: Mapping[str, Any]) -> Iterator[Journal]:
    """Open the journal at `path`, locked; in memory without a path. `heading` describes the run. If
    it is interrupted, the command that continues it is printed."""
    if path is None:
        yield Journal()
        return
    journal, plain = Journal(), json.loads(json.dumps(heading))

    def take(line: bytes) -> None:
        if not (journal.headed or line.startswith(FIRST)):
            raise ValueError
        _take(journal, json.loads(line), plain)

    def torn(line: bytes) -> bool:
        return journal.headed or line.startswith(FIRST) or FIRST.startswith(line)

    with continued(path, "measurements", take, torn) as file:
        if journal.whole and not (journal.known and journal.tasks and journal.replies):
            raise UserError(f"{path} ends with a result but lacks replies: choose another --out")
        journal.file = file
        if not journal.headed:
            journal._write({"bench": plain})
        try:
            yield journal
        except UserError:
            raise
        except BaseException:
            note(
                f"{counted(len(journal.replies), 'measured reply', 'measured replies')} saved "
                f"in {path}: the same command continues from there"
            )
            raise


def heading_of(
    methods: Sequence[Method],
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    repeat: int,
    seed: int,
) -> dict[str, Any]:
    """Return what identifies a run, without the contents of its models' folders."""
    return {
        "version": installed_version(),
        "machine": _machine(),
        "methods": {
            method.name: {
                **method.configuration.settings.model_dump(mode="json", exclude={"http"}),
                "peer": vars(method.options) if method.peer else None,
            }
            for method in methods
        },
        "prompts": {prompts.name: _digest(prompts) for prompts in sets},
        "temperatures": list(temperatures),
        "repeat": repeat,
        "seed": seed,
    }


def _machine() -> dict[str, str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^(?:model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    cores = format_numbers(sorted(os.sched_getaffinity(0)))
    return {"processor": model[1] if model else "unknown", "key": machine_key(), "cores": cores}


def _digest(prompts: PromptSet) -> str:
    told = [(prompt.id, prompt.turns) for prompt in prompts.prompts]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _take(journal: Journal, told: Mapping[str, Any], heading: Mapping[str, Any]) -> None:
    if "bench" in told:
        _compare_heading(told["bench"], heading)
        journal.headed = True
    elif "contenders" in told:
        journal.known = {
            str(label): {name: known[name] for name in ("name", "threads", "identity")}
            for label, known in told["contenders"].items()
        }
    elif "task" in told:
        task = told["task"]
        kept = (str(task["turn"]), int(task["max_tokens"]), _finished(task["reference"]))
        journal.tasks[_where(task["at"])] = kept
    elif "reply" in told:
        reply = told["reply"]
        label, where = str(reply["method"]), _where(reply["at"])
        finished = (_finished(reply), int(reply["together"]))
        journal.replies[label, where, int(reply["number"])] = finished
        journal.peaks[label] = max(float(reply["peak_rss_mb"]), journal.peaks.get(label, 0.0))
    else:
        journal.whole = bool(told["rows"])


def _where(told: Sequence[Any]) -> Where:
    name, temperature, id = told
    return str(name), float(temperature), str(id)


def _reply_told(finished: Finished) -> dict[str, Any]:
    return {"result": finished.result.model_dump(mode="json"), "margins": finished.margins}


def _finished(told: Mapping[str, Any]) -> Finished:
    return Finished.model_validate_json(
        json.dumps({"epoch": 0, "request": 0, "result": told["result"], "margins": told["margins"]})
    )


def _compare_heading(there: Any, here: Any, name: str = "") -> None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (*here, *(key for key in there if key not in here)):
            _compare_heading(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        raise _other_run(name, there, here)


def _other_run(name: str, there: object, here: object) -> UserError:
    told = "was not in that run" if there is None else f"was {there!r} and is {here!r}"
    told = "is not in this run" if here is None else told
    remedy = "choose another --out, or repeat the same command"
    return UserError(f"--out is the file of another run: {name} {told}; {remedy}")


T = TypeVar("T")
LOOP_TOKENS = 20
SHORTER = 0.8  # a prompt that does not fit is cut to this share of its characters


@dataclass
class Cell:
    """All runs of one method on one set of prompts at one temperature."""

    method: Method
    prompts: PromptSet
    temperature: float
    runs: list[Run] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)
    """Prompt id -> the first position where its tokens differ from those of `none`."""

    def beside(self, other: "Cell") -> bool:
        """Return whether it has the same prompts at the same temperature."""
        return self.prompts is other.prompts and self.temperature == other.temperature

    def decoding(self) -> tuple[Any, Any]:
        """(seconds, tokens) of decoding for each prompt, over all repeats, in the order of the
        prompts."""
        ids = list(dict.fromkeys(run.task.prompt.id for run in self.runs))
        seconds, tokens = np.zeros(len(ids)), np.zeros(len(ids))
        for run in self.runs:
            seconds[ids.index(run.task.prompt.id)] += run.decode_s
            tokens[ids.index(run.task.prompt.id)] += run.decoded_tokens
        return seconds, tokens

    @property
    def tokens_per_s(self) -> float:
        seconds, tokens = self.decoding()
        return float(tokens.sum() / seconds.sum()) if seconds.sum() else 0.0


def measure(
    found: Mapping[str, Contender],
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    repeat: int,
    seed: int,
    journal: Journal | None = None,
) -> Iterator[Cell]:
    """The cells of every set and temperature, filled prompt by prompt with the methods in turn;
    replies in the journal are not measured again."""
    journal = journal or Journal()
    left = replies_left(found, sets, temperatures, repeat, journal)
    saved = counted(len(journal.replies), "reply", "replies")
    if not left:
        note(f"all {saved} are already in the file of --out: nothing was measured")
    elif journal.replies:
        note(f"{saved} from an earlier run: {left} to go")
    with progress_bar(left, "replies") as step:
        turns = _Turns(found, repeat, seed, journal, step)
        for prompts in sets:
            for temperature in temperatures:
                cells = [
                    Cell(contender.method, prompts, temperature) for contender in found.values()
                ]
                for number, prompt in enumerate(prompts.prompts):
                    task = turns.take(cells, prompt, number)
                    _compare(cells, task)
                yield from cells


def replies_left(
    found: Mapping[str, Contender],
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    repeat: int,
    journal: Journal,
) -> int:
    """Return how many replies are still to be decoded, including those that determine lengths."""
    pairs = [(prompts, heat) for prompts in sets for heat in temperatures]
    everywhere = [(set_.name, heat, prompt.id) for set_, heat in pairs for prompt in set_.prompts]
    left = [where for where in everywhere if not journal.complete(found, where, repeat)]
    return (
        sum(not journal.has(label, at, n) for label in found for at in left for n in range(repeat))
        + sum(where not in journal.tasks for where in everywhere)
        + any(where in journal.tasks for where in left[:1])
    )


@dataclass(frozen=True)
class _Turns:
    """The turns of a run: from the journal if it has them, else measured now."""

    found: Mapping[str, Contender]
    repeat: int
    seed: int
    journal: Journal
    step: Callable[[str], None]

    def take(self, cells: Sequence[Cell], prompt: Prompt, number: int) -> Task:
        where = (cells[0].prompts.name, cells[0].temperature, prompt.id)
        task = self._task(prompt, where)
        for turn in range(self.repeat):
            for cell in rotated(cells, number + turn):
                cell.runs.append(self._run(cell.method.label, where, turn, task))
        return task

    def _task(self, prompt: Prompt, where: Where) -> Task:
        """The measured prompt. A run that continues within a prompt first decodes it once, to be as
        warm as the original run."""
        task = self.journal.task(where, prompt)
        if task is None or not (
            self.journal.begun or self.journal.complete(self.found, where, self.repeat)
        ):
            alone = self.found[NONE]
            assert isinstance(alone, Ours)
            self.step(f"{where[0]} {where[2]}: its length")
            task = prepare(alone.connection, alone.method, prompt, where[1], self.seed)
            self.journal.keep_task(where, task)
        return task

    def _run(self, label: str, where: Where, turn: int, task: Task) -> Run:
        run = self.journal.reply(label, where, turn, task)
        if run is None:
            contender = self.found[label]
            self.step(f"{where[0]} {where[2]}: {label}")
            run = contender.decode(task, where[1], self.seed)
            self.journal.keep_reply(label, where, turn, run, contender.peak_rss_mb())
        return run


def rotated(those: Sequence[T], by: int) -> list[T]:
    """Rotate the methods, so that each is first equally often."""
    by %= len(those)
    return [*those[by:], *those[:by]]


def prepare(
    connection: Connection, alone: Method, prompt: Prompt, temperature: float, seed: int
) -> Task:
    """Cut a prompt until it fits the context together with its reply, keeping its beginning, and
    find where the reply begins to loop."""
    tree, most = alone.configuration.settings.tree, alone.configuration.settings.sampling.max_tokens
    sampling = sampling_of(alone, temperature, most)
    turn = prompt.turns[0]
    while True:
        try:
            finished = connection.decode(
                [turn], sampling=sampling, tree=tree, max_tokens=most, seed=seed, speculate=False
            )
        except RequestError as error:
            if error.code != "prompt_too_long" or not turn:
                raise
        else:
            result = finished.result
            if result.finish_reason != "length" or result.completion_tokens == most or not turn:
                return Task(prompt, turn, max(1, loop_begins(result.token_ids)), finished)
        turn = turn[: int(len(turn) * SHORTER)]


def loop_begins(tokens: Sequence[int], length: int = LOOP_TOKENS) -> int:
    """Return the number of tokens before the first repeated 20-gram; all of them without one."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            return start
        seen.add(gram)
    return len(tokens)


def _compare(cells: Sequence[Cell], task: Task) -> None:
    """Compare the last replies to a prompt with that of `none`, if they should be equal."""
    alone = cells[0].runs[-1].finished
    for cell in cells[1:]:
        other = cell.runs[-1].finished
        difference = first_difference(alone, other) if _comparable(cell, alone, other) else None
        if difference is not None:
            cell.differences[task.prompt.id] = difference


def _comparable(cell: Cell, alone: Finished, other: Finished) -> bool:
    """Return whether losslessness applies: not to replies of another function (fingerprint), nor to
    a peer's random samples or other weights."""
    if cell.method.ours:
        return other.result.fingerprint == alone.result.fingerprint
    weights = cell.method.configuration.settings.target.weights
    return cell.temperature == 0.0 and weights in ("fp32", "half")
