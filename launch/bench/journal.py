"""The file of `bench --out`, a JSON object a line: `bench` (settings, prompts, machine),
`contenders`, `task` (a prompt, and how long its reply is), each `reply`, and at the end the result
as --json prints it. A run continues where it stopped; an incomplete last line is dropped, and a
file of another run is refused."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from dovetail.launch.bench.contenders import Contender, Run, Task, Theirs
from dovetail.launch.bench.methods import Method, PromptSet
from dovetail.launch.cli import installed_version
from dovetail.launch.console.terminal import counted, note
from dovetail.launch.files.outputs import continued
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.machine.topology import format_numbers
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import append
from dovetail.protocol.messages import Finished
from dovetail.protocol.profile import machine_key

FIRST = b'{"bench": '  # the beginning of every file of ours
Where = tuple[str, float, str]  # set of prompts, temperature, id of the prompt


@dataclass(frozen=True)
class Remembered:
    """A contender whose replies are all in the file: no process is needed."""

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
    """The measurements so far; without a file it is kept for this run alone."""

    file: IO[bytes] | None = None
    known: dict[str, Any] = field(default_factory=dict)
    """Label -> method, threads, identity: of the run that began."""
    tasks: dict[Where, tuple[str, int, Finished]] = field(default_factory=dict)
    """Place -> prompt, tokens of its reply, and the reply of `none`, which sets the length."""
    replies: dict[tuple[str, Where, int], tuple[Finished, int]] = field(default_factory=dict)
    """Label, where, number -> the reply, and the tokens that came with its first round."""
    peaks: dict[str, float] = field(default_factory=dict)
    whole: bool = False  # true if the result is in the file
    headed: bool = False  # true if the file has its first line
    begun: bool = False  # true if this run has measured anything itself

    def task(self, where: Where, prompt: Prompt) -> Task | None:
        kept = self.tasks.get(where)
        return Task(prompt, *kept) if kept is not None else None

    def keep_task(self, where: Where, task: Task) -> None:
        self.begun = True
        self.tasks[where] = (task.turn, task.max_tokens, task.reference)
        self._write(
            {
                "task": {
                    "at": where,
                    "turn": task.turn,
                    "max_tokens": task.max_tokens,
                    "reference": _reply_told(task.reference),
                }
            }
        )

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
        told = {
            "method": label,
            "at": where,
            "number": number,
            "together": run.together,
            "peak_rss_mb": peak_mb,
            **_reply_told(run.finished),
        }
        self._write({"reply": told})

    def agree(self, found: Mapping[str, Contender]) -> dict[str, Contender]:
        """Return the contenders of the run that began; `UserError` if those started now are others.
        A peer keeps the numbers of threads that it was measured with."""
        if not self.known:
            self.known = {
                label: {
                    "name": c.method.name,
                    "threads": c.method.threads,
                    "identity": c.identity(),
                }
                for label, c in found.items()
            }
            self._write({"contenders": self.known})
            return dict(found)
        by_name = {contender.method.name: contender for contender in found.values()}
        agreed: dict[str, Contender] = {}
        for label, told in self.known.items():
            contender = by_name[told["name"]]
            if contender.identity() != told["identity"]:
                raise _other_run(
                    f"the models or engines of {told['name']}",
                    told["identity"],
                    contender.identity(),
                )
            agreed[label] = (
                replace(contender, method=replace(contender.method, threads=told["threads"]))
                if isinstance(contender, Theirs)
                else contender
            )
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
            append(
                self.file,
                Path(self.file.name),
                "what is measured",
                json.dumps(told).encode() + b"\n",
            )


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
        _compare(told["bench"], heading)
        journal.headed = True
    elif "contenders" in told:
        journal.known = {
            str(label): {name: known[name] for name in ("name", "threads", "identity")}
            for label, known in told["contenders"].items()
        }
    elif "task" in told:
        task = told["task"]
        journal.tasks[_where(task["at"])] = (
            str(task["turn"]),
            int(task["max_tokens"]),
            _finished(task["reference"]),
        )
    elif "reply" in told:
        reply = told["reply"]
        label, where = str(reply["method"]), _where(reply["at"])
        journal.replies[label, where, int(reply["number"])] = (
            _finished(reply),
            int(reply["together"]),
        )
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


def _compare(there: Any, here: Any, name: str = "") -> None:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in (*here, *(key for key in there if key not in here)):
            _compare(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        raise _other_run(name, there, here)


def _other_run(name: str, there: object, here: object) -> UserError:
    told = (
        "is not in this run"
        if here is None
        else "was not in that run"
        if there is None
        else f"was {there!r} and is {here!r}"
    )
    return UserError(
        f"--out is the file of another run: {name} {told}; choose another --out, or run it as "
        "it was"
    )
