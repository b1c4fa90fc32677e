"""`dovetail bench`: methods side by side, prompt by prompt, in one run; or the transport alone.

Every method has a stack of processes of its own on the same cores as every other, and the methods take turns at each prompt, so that whatever else
happens on the machine happens to all of them; a stack whose turn it is not sleeps. Definitions:

- tokens_per_s is the decoding rate: tokens after the first one over the time after the first one. What a prompt costs before is told apart, end to end.
- speedup is the summed time per token of `none` over that of the method, on the same prompts; its interval is a paired bootstrap over prompts.
- A reply is measured up to its first repeated 20-gram: text of a small model that has begun to loop is foretold by any draft. The reply of `none`,
  decoded once before anything is timed, says where that is; the same run warms the caches up, and shows which prompts have to be cut to fit the context.
- Of a prompt of several turns, the first is used.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from dovetail.launch.comparison import Difference, first_difference
from dovetail.launch.configure import ALL_SECTIONS, DEMO_FOLDER, Configuration, SettingsCommand, parse_setting, read_file, settings_flags
from dovetail.launch.connection import Connection
from dovetail.launch.outputs import check_output
from dovetail.launch.prompts import Prompt, read_prompts
from dovetail.launch.supervise import Supervisor, layout_of, start_stack, wait_until_ready
from dovetail.launch.terminal import note, print_table, progress_bar, spinner
from dovetail.launch.transport import Overhead, measure_overhead
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import DRAFT_KINDS, Sampling

LOOP_TOKENS = 20
RESAMPLES = 2000
INTERVAL = (0.025, 0.975)
SHORTER = 0.8
"""A prompt that does not fit is tried again with this share of its characters."""
NONE = "none"
TRANSPORT_ROUNDS = 4000


@dataclass(frozen=True)
class Method:
    """One way to decode: the name it was given on the command line, and the settings that this means."""

    name: str
    configuration: Configuration

    @property
    def drafts(self) -> bool:
        return self.configuration.settings.draft.kind != NONE


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Task:
    """One prompt as it is measured: cut to fit the context, and the reply cut where it begins to loop."""

    prompt: Prompt
    turn: str
    max_tokens: int
    reference: Finished

    @property
    def shortened(self) -> bool:
        return self.turn != self.prompt.turns[0]


@dataclass(frozen=True)
class Run:
    """One timed reply."""

    task: Task
    finished: Finished

    @property
    def decode_s(self) -> float:
        return self.finished.result.wall_s - self.finished.result.time_to_first_token_s

    @property
    def decoded_tokens(self) -> int:
        return self.finished.result.completion_tokens - 1


@dataclass
class Cell:
    """All runs of one method on one set of prompts at one temperature."""

    method: Method
    prompts: PromptSet
    temperature: float
    runs: list[Run] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)
    """Prompt id -> where its tokens part from those of `none`."""

    def decoding(self) -> tuple[Any, Any]:
        """(seconds, tokens) of decoding for each prompt, over all repeats, in the order of the prompts."""
        ids = list(dict.fromkeys(run.task.prompt.id for run in self.runs))
        seconds, tokens = np.zeros(len(ids)), np.zeros(len(ids))
        for run in self.runs:
            seconds[ids.index(run.task.prompt.id)] += run.decode_s
            tokens[ids.index(run.task.prompt.id)] += run.decoded_tokens
        return seconds, tokens


@click.command(cls=SettingsCommand)
@click.option("--prompts", "files", multiple=True, type=click.Path(dir_okay=False, path_type=Path), help="File of prompts, a set of its own; can be repeated.")
@click.option("--method", "methods", multiple=True, metavar="METHOD[,SETTING=VALUE...]", help="What to measure; can be repeated. `none` is always run.")
@click.option("--temperature", "temperatures", multiple=True, type=float, help="Can be repeated.  [default: sampling.temperature]")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts taken of each set.  [default: all]")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Times that every prompt is measured with every method.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True, help="Seed of every reply and of the bootstrap.")
@click.option("--transport", is_flag=True, help="Measure coordinator and links alone, with workers that answer at once.")
@click.option("--rounds", type=click.IntRange(min=40), default=TRANSPORT_ROUNDS, show_default=True, help="Rounds that --transport measures.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON object to this file too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table.")
@settings_flags(*ALL_SECTIONS, without=("--temperature",))
@click.pass_context
def command(
    context: click.Context,
    configuration: Configuration,
    files: tuple[Path, ...],
    methods: tuple[str, ...],
    temperatures: tuple[float, ...],
    limit: int | None,
    repeat: int,
    seed: int,
    transport: bool,
    rounds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure methods on sets of prompts at several temperatures, alternating prompt by prompt.

    METHOD is none, a kind of draft, the folder of a draft, or a settings file (NAME.toml), with settings appended: --method small,tree.gamma=6.
    Exit code 1 if a method's tokens differ from those of none by more than a near-tie.
    """
    check_output(out, "the result")
    if transport:
        with spinner() as say:
            say("measuring the transport")
            overhead = measure_overhead(rounds)
        _report(overhead.as_json(), out, as_json, lambda: _show_overhead(overhead))
        return
    chosen = _methods(configuration, methods)
    sets = [_prompt_set(path, limit) for path in files or (DEMO_FOLDER / "prompts.jsonl",)]
    heats = [configuration.over("--temperature", {"sampling.temperature": t}).settings.sampling.temperature for t in dict.fromkeys(temperatures)]
    heats = heats or [configuration.settings.sampling.temperature]
    with _stacks(chosen) as stacks:
        cells = list(_measure(chosen, stacks, sets, heats, repeat, seed))
        rows = [_row(cell, _baseline(cells, cell), stacks[cell.method.name], seed) for cell in cells]
    result = {"rows": rows, "end_to_end": [_end_to_end(cell) for cell in cells], "prompts": _tasks_told(cells), "differences": _differences_told(cells)}
    _report(result, out, as_json, lambda: _show(rows, cells))
    context.exit(0 if all(d.near_tie for cell in cells for d in cell.differences.values()) else 1)


def _report(result: Mapping[str, Any], out: Path | None, as_json: bool, show: Callable[[], None]) -> None:
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)
    else:
        show()


# -- what is measured --------------------------------------------------------------------------------------------------------------------------


def _methods(base: Configuration, texts: Sequence[str]) -> list[Method]:
    """The methods, `none` first; `UserError` for one that is none, or that is named twice."""
    texts = (NONE, *(text for text in texts if text != NONE)) if texts else (NONE, "auto")
    if len(set(texts)) < len(texts):
        raise UserError("a --method is named twice: give each once, and --repeat for more runs")
    return [read_method(base, text) for text in texts]


def read_method(base: Configuration, text: str) -> Method:
    """The method that "HEAD,SETTING=VALUE,..." names, over the settings of the whole run."""
    head, *settings = text.split(",")
    origin = f"--method {text}"
    if head in DRAFT_KINDS:
        configuration = base.over(origin, {"draft.kind": head, **({"draft.model": ""} if head == "ngram" else {})})
    elif head.endswith(".toml"):
        configuration = base.over(origin, read_file(Path(head)))
    elif "/" in head or Path(head).is_dir():
        configuration = base.over(origin, {"draft.model": head})
    else:
        raise UserError(f"--method {head!r} is no method: name none, a kind of draft (small, ngram), the folder of a draft, or a settings file (NAME.toml)")
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--method {text}: {setting!r} is no setting: write NAME=VALUE, such as tree.gamma=6")
        values[name] = parse_setting(name, value, origin)
    return Method(text, configuration.over(origin, values))


def _prompt_set(path: Path, limit: int | None) -> PromptSet:
    return PromptSet(path.stem, tuple(read_prompts(path)[:limit]))


@contextmanager
def _stacks(methods: Sequence[Method]) -> Iterator[dict[str, Connection]]:
    """A stack for each method, all on the same cores and all ready."""
    with ExitStack() as owned:
        supervisor = owned.enter_context(Supervisor())
        stacks = {}
        with spinner() as say:
            for method in methods:
                say(f"starting {method.name}")
                layout = layout_of(methods[0].configuration.settings)
                stack = start_stack(supervisor, method.configuration, layout=layout, prefix=f"{method.name}: ")
                state = wait_until_ready(supervisor, stack, lambda text, name=method.name: say(f"{name}: {text}"))  # type: ignore[misc]
                stacks[method.name] = Connection(owned.enter_context(stack.connect()), state, stack)
        yield stacks


def _measure(
    methods: Sequence[Method], stacks: Mapping[str, Connection], sets: Sequence[PromptSet], temperatures: Sequence[float], repeat: int, seed: int
) -> Iterator[Cell]:
    """The cells of every set and temperature, filled prompt by prompt with the methods in turn."""
    steps = sum(len(s.prompts) for s in sets) * len(temperatures) * (1 + repeat * len(methods))
    with progress_bar(steps, "replies") as step:
        for prompts in sets:
            for temperature in temperatures:
                cells = [Cell(method, prompts, temperature) for method in methods]
                for number, prompt in enumerate(prompts.prompts):
                    step(f"{prompts.name} {prompt.id}: how far")
                    task = prepare(stacks[NONE], methods[0], prompt, temperature, seed)
                    for turn in range(repeat):
                        for cell in _rotated(cells, number + turn):
                            step(f"{prompts.name} {prompt.id}: {cell.method.name}")
                            cell.runs.append(Run(task, decode(stacks[cell.method.name], cell.method, task, temperature, seed)))
                    _compare(cells, task)
                yield from cells


def _rotated(cells: Sequence[Cell], by: int) -> list[Cell]:
    """Each method is the first one equally often."""
    by %= len(cells)
    return [*cells[by:], *cells[:by]]


def _sampling(method: Method, temperature: float, max_tokens: int) -> Sampling:
    sampling = method.configuration.settings.sampling
    return sampling.model_copy(update={"temperature": temperature, "min_tokens": min(sampling.min_tokens, max_tokens)})


def decode(connection: Connection, method: Method, task: Task, temperature: float, seed: int) -> Finished:
    """One timed reply."""
    tree = method.configuration.settings.tree
    sampling = _sampling(method, temperature, task.max_tokens)
    return connection.decode([task.turn], sampling=sampling, tree=tree, max_tokens=task.max_tokens, seed=seed, speculate=method.drafts)


def prepare(connection: Connection, alone: Method, prompt: Prompt, temperature: float, seed: int) -> Task:
    """Cut a prompt until it fits the context together with its reply, keeping its beginning, and find where the reply begins to loop."""
    tree, most = alone.configuration.settings.tree, alone.configuration.settings.sampling.max_tokens
    sampling = _sampling(alone, temperature, most)
    turn = prompt.turns[0]
    while True:
        try:
            finished = connection.decode([turn], sampling=sampling, tree=tree, max_tokens=most, seed=seed, speculate=False)
        except RequestError as error:
            if error.code != "prompt_too_long" or not turn:
                raise
        else:
            result = finished.result
            if result.finish_reason != "length" or result.completion_tokens == most or not turn:
                return Task(prompt, turn, max(1, loop_begins(result.token_ids)), finished)
        turn = turn[: int(len(turn) * SHORTER)]


def loop_begins(tokens: Sequence[int], length: int = LOOP_TOKENS) -> int:
    """How many tokens there are before the first 20-gram that was there before; all of them if none was."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            return start
        seen.add(gram)
    return len(tokens)


def _compare(cells: Sequence[Cell], task: Task) -> None:
    """Hold the last replies to a prompt against that of `none`; those of another function (fingerprint) are no matter of losslessness."""
    alone = cells[0].runs[-1].finished
    for cell in cells[1:]:
        other = cell.runs[-1].finished
        difference = first_difference(alone, other) if other.result.fingerprint == alone.result.fingerprint else None
        if difference is not None:
            cell.differences[task.prompt.id] = difference


# -- what came of it ---------------------------------------------------------------------------------------------------------------------------


def _baseline(cells: Sequence[Cell], of: Cell) -> Cell:
    return next(c for c in cells if c.method.name == NONE and c.prompts is of.prompts and c.temperature == of.temperature)


def speedup(cell: Cell, baseline: Cell, seed: int) -> tuple[float | None, float | None, float | None]:
    """(ratio, low, high) of time per token; nothing where nothing was decoded after the first token."""
    (seconds, tokens), (base_seconds, base_tokens) = cell.decoding(), baseline.decoding()
    if not tokens.sum() or not base_tokens.sum():
        return None, None, None
    draws = np.random.default_rng(seed).integers(0, len(seconds), (RESAMPLES, len(seconds)))
    sums = [values[draws].sum(axis=1) for values in (seconds, tokens, base_seconds, base_tokens)]
    usable = (sums[1] > 0) & (sums[3] > 0)
    ratios = (sums[2] / np.maximum(sums[3], 1) / (sums[0] / np.maximum(sums[1], 1)))[usable]
    low, high = np.quantile(ratios, INTERVAL)
    ratio = (base_seconds.sum() / base_tokens.sum()) / (seconds.sum() / tokens.sum())
    return float(ratio), float(low), float(high)


def _row(cell: Cell, baseline: Cell, connection: Connection, seed: int) -> dict[str, Any]:
    """One line of the result, for a method on a set at a temperature."""
    results = [run.finished.result for run in cell.runs]
    seconds = sum(run.decode_s for run in cell.runs)
    tokens, rounds = sum(run.decoded_tokens for run in cell.runs), sum(result.rounds for result in results)
    taus = [result.tau for result in results if result.tau is not None]
    ratio, low, high = speedup(cell, baseline, seed)
    settings = cell.method.configuration.settings
    drafts = cell.method.drafts
    return {
        "method": cell.method.name,
        "prompts": cell.prompts.name,
        "temperature": cell.temperature,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "speedup": ratio,
        "speedup_low": low,
        "speedup_high": high,
        "tau": tokens / rounds if rounds else None,
        "tau_macro": sum(taus) / len(taus) if taus else None,
        "calls": rounds,
        "verified_tokens": sum(result.drafted_tokens + result.rounds for result in results),
        "peak_rss_mb": connection.peak_rss_mb(),
        "peak_vram_mb": None,
        "draft_share": sum(result.draft_exposed_s for result in results) / seconds if seconds else 0.0,
        "verify_share": sum(result.verify_s for result in results) / seconds if seconds else 0.0,
        "weights": settings.target.weights,
        "policy": settings.tree.policy if drafts else NONE,
        "gamma": settings.tree.gamma if drafts else 0,
        "depth": settings.tree.depth if drafts else 0,
        "width": settings.tree.width if drafts else 0,
    }


def _end_to_end(cell: Cell) -> dict[str, Any]:
    """All tokens over all time, prompts included."""
    results = [run.finished.result for run in cell.runs]
    rate = sum(result.completion_tokens for result in results) / sum(result.wall_s for result in results)
    return {"method": cell.method.name, "prompts": cell.prompts.name, "temperature": cell.temperature, "tokens_per_s": rate}


def _tasks_told(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For every set and temperature, how many prompts there were, how many were cut to fit, and how many replies were cut where they began to loop."""
    told = []
    for cell in cells:
        if cell.method.name == NONE:
            tasks = {run.task.prompt.id: run.task for run in cell.runs}.values()
            looped = sum(task.max_tokens < task.reference.result.completion_tokens for task in tasks)
            counts = {"count": len(tasks), "shortened": sum(task.shortened for task in tasks), "looped": looped}
            told.append({"prompts": cell.prompts.name, "temperature": cell.temperature, **counts})
    return told


def _differences_told(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "method": cell.method.name,
            "prompts": cell.prompts.name,
            "temperature": cell.temperature,
            "id": id,
            "position": difference.position,
            "margin": difference.margin,
            "near_tie": difference.near_tie,
        }
        for cell in cells
        for id, difference in cell.differences.items()
    ]


def _show(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> None:
    headings = ("method", "prompts", "T", "tokens/s", "speed-up", "tau", "draft", "verify", "MB", "differ")
    shown = []
    for row, cell in zip(rows, cells, strict=True):
        ratio = "-" if row["speedup"] is None else f"{row['speedup']:.2f} ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        shares = (f"{row['draft_share']:.0%}", f"{row['verify_share']:.0%}")
        where = (row["method"], row["prompts"], row["temperature"])
        shown.append((*where, f"{row['tokens_per_s']:.1f}", ratio, row["tau"], *shares, round(row["peak_rss_mb"]), len(cell.differences)))
    print_table(headings, shown)
    for told in _tasks_told(cells):
        if told["shortened"] or told["looped"]:
            cut = f"{told['shortened']} of {told['count']} prompts were cut to fit, {told['looped']} replies where they began to loop"
            note(f"{told['prompts']} T {told['temperature']:g}: {cut}")
    for told in _differences_told(cells):
        kind = "near-tie" if told["near_tie"] else "DIFFERS"
        note(f"{kind}: {told['method']} {told['prompts']} T {told['temperature']:g} {told['id']} at token {told['position']}, margin {told['margin']:.2g}")


def _show_overhead(overhead: Overhead) -> None:
    rows = [
        ("coordinator", overhead.coordinator_us, overhead.coordinator_p99_us, overhead.own_coordinator_us),
        ("transport, four hops", overhead.transport_us, overhead.transport_p99_us, overhead.own_transport_us),
        ("both", overhead.outside_us, overhead.outside_p99_us, overhead.own_coordinator_us + overhead.own_transport_us),
    ]
    print_table((f"us a round, {overhead.rounds} rounds", "median", "p99", "coordinator's own mean"), rows)
