"""`dovetail bench`: methods side by side, prompt by prompt, in one run; or the transport alone.

Every method has a stack of processes of its own on the same cores as every other, and the methods take turns at each prompt, so that whatever else
happens on the machine happens to all of them; a stack whose turn it is not sleeps. Definitions:

- tokens_per_s is the decoding rate: tokens after the first one over the time after the first one. What a prompt costs before is told apart, end to end.
- speedup is the summed time per token of `none` over that of the method, on the same prompts; its interval is a paired bootstrap over prompts.
- A reply is measured up to its first repeated 20-gram: text of a small model that has begun to loop is foretold by any draft. The reply of `none`,
  decoded once before anything is timed, says where that is; the same run warms the caches up, and shows which prompts have to be cut to fit the context.
- pass is the time of a target's pass as it was called, T_V, over that of `none`, T_T.
- Of a prompt of several turns, the first is used.
- A method may be a peer, another engine with the same models on the same cores (`peers.py`). What it can be measured with, it is measured with in turn; its
  best is its row. At temperature 0 its tokens are compared as those of any method; above, it draws by itself.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from dovetail.launch.comparison import Difference, first_difference
from dovetail.launch.configure import ALL_SECTIONS, DEMO_FOLDER, Configuration, SettingsCommand, parse_setting, read_file, settings_flags
from dovetail.launch.connection import Connection
from dovetail.launch.outputs import check_output
from dovetail.launch.peers import ASSISTED, Peer
from dovetail.launch.prompts import Prompt, read_prompts
from dovetail.launch.supervise import Supervisor, layout_of, start_stack, wait_until_ready
from dovetail.launch.terminal import note, print_table, progress_bar, spinner
from dovetail.launch.transport import Overhead, measure_overhead
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS, Sampling

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
    threads: int | None = None
    """Of a peer, which is measured with several numbers of them; none: a method of ours."""

    @property
    def ours(self) -> bool:
        return self.threads is None

    @property
    def drafts(self) -> bool:
        return self.configuration.settings.draft.kind != NONE

    @property
    def label(self) -> str:
        """Tells a peer with so many threads from the same with others."""
        return self.name if self.threads is None else f"{self.name} with {self.threads} thread{'s' if self.threads > 1 else ''}"


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
    """One timed reply; the time to the first token is that to the first `together` tokens."""

    task: Task
    finished: Finished
    together: int = 1

    @property
    def decode_s(self) -> float:
        return self.finished.result.wall_s - self.finished.result.time_to_first_token_s

    @property
    def decoded_tokens(self) -> int:
        return self.finished.result.completion_tokens - self.together


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

    @property
    def tokens_per_s(self) -> float:
        """The decoding rate."""
        seconds, tokens = self.decoding()
        return float(tokens.sum() / seconds.sum()) if seconds.sum() else 0.0


class Contender(Protocol):
    """What decodes for a method."""

    @property
    def method(self) -> Method:
        """Whose replies these are."""

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        """One timed reply."""

    def peak_rss_mb(self) -> float:
        """The most memory that its processes ever held, summed, in 10^6 bytes."""


@dataclass(frozen=True)
class Ours:
    """A stack of our processes."""

    method: Method
    connection: Connection

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        tree = self.method.configuration.settings.tree
        sampling = _sampling(self.method, temperature, task.max_tokens)
        finished = self.connection.decode([task.turn], sampling=sampling, tree=tree, max_tokens=task.max_tokens, seed=seed, speculate=self.method.drafts)
        return Run(task, finished)

    def peak_rss_mb(self) -> float:
        return self.connection.peak_rss_mb()


@dataclass(frozen=True)
class Theirs:
    """A peer with so many threads."""

    method: Method
    peer: Peer

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        threads = self.method.threads
        assert threads is not None
        sampling = _sampling(self.method, temperature, task.max_tokens)
        reply = self.peer.decode([task.turn], sampling=sampling, max_tokens=task.max_tokens, seed=seed, threads=threads)
        return Run(task, Finished(epoch=0, request=0, result=reply.result, margins=()), reply.together)

    def peak_rss_mb(self) -> float:
        return self.peer.peak_rss_mb()


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

    METHOD is none, a kind of draft, the folder of a draft, a settings file (NAME.toml), or assisted (transformers' assisted generation with the same two
    models), with settings appended: --method small,tree.gamma=6. Exit code 1 if a method's tokens differ from those of none by more than a near-tie.
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
    with contenders(chosen) as found:
        measured = list(measure(found, sets, heats, repeat, seed))
        cells = best_of_peers(measured)
        rows = [row(cell, _baseline(cells, cell), found[cell.method.label], seed) for cell in cells]
    result = {
        "rows": rows,
        "against": against_peers(cells, seed),
        "peers": _peers_told(measured, cells),
        "passes": [_pass_told(cell, _baseline(cells, cell)) for cell in cells],
        "medians": medians(rows),
        "end_to_end": [_end_to_end(cell) for cell in cells],
        "prompts": _tasks_told(cells),
        "differences": _differences_told(cells),
    }
    _report(result, out, as_json, lambda: _show(result, cells))
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
    if head == ASSISTED:
        configuration = base.over(origin, {})
    elif head in DRAFT_KINDS:
        configuration = base.over(origin, {"draft.kind": head, **({"draft.model": ""} if head in ("ngram", *HEAD_KINDS) else {})})
    elif head.endswith(".toml"):
        configuration = base.over(origin, read_file(Path(head)))
    elif "/" in head or Path(head).is_dir():
        configuration = base.over(origin, {"draft.kind": "auto", "draft.model": head})
    else:
        raise UserError(
            f"--method {head!r} is no method: name none, a kind of draft (small, dovetail, ...), the folder of a draft, a settings file (.toml) or {ASSISTED}"
        )
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--method {text}: {setting!r} is no setting: write NAME=VALUE, such as tree.gamma=6")
        values[name] = parse_setting(name, value, origin)
    return Method(text, configuration.over(origin, values), 1 if head == ASSISTED else None)


def _prompt_set(path: Path, limit: int | None) -> PromptSet:
    return PromptSet(path.stem, tuple(read_prompts(path)[:limit]))


@contextmanager
def contenders(methods: Sequence[Method]) -> Iterator[dict[str, Contender]]:
    """What decodes for each method, by the method's label, all on the same cores and all ready; the first method is `none`."""
    layout = layout_of(methods[0].configuration.settings)
    with ExitStack() as owned:
        supervisor = owned.enter_context(Supervisor())
        found: dict[str, Contender] = {}
        with spinner() as say:
            for method in methods:
                say(f"starting {method.name}")
                if not method.ours:
                    peer = owned.enter_context(closing(Peer(supervisor, method.configuration, layout)))
                    variants = [replace(method, threads=threads) for threads in peer.thread_counts]
                    found.update({variant.label: Theirs(variant, peer) for variant in variants})
                    continue
                stack = start_stack(supervisor, method.configuration, layout=layout, prefix=f"{method.name}: ")
                state = wait_until_ready(supervisor, stack, lambda text, name=method.name: say(f"{name}: {text}"))  # type: ignore[misc]
                found[method.label] = Ours(method, Connection(owned.enter_context(stack.connect()), state, stack))
        yield found


def measure(found: Mapping[str, Contender], sets: Sequence[PromptSet], temperatures: Sequence[float], repeat: int, seed: int) -> Iterator[Cell]:
    """The cells of every set and temperature, filled prompt by prompt with the methods in turn."""
    alone = found[NONE]
    assert isinstance(alone, Ours)
    steps = sum(len(s.prompts) for s in sets) * len(temperatures) * (1 + repeat * len(found))
    with progress_bar(steps, "replies") as step:
        for prompts in sets:
            for temperature in temperatures:
                cells = [Cell(contender.method, prompts, temperature) for contender in found.values()]
                for number, prompt in enumerate(prompts.prompts):
                    step(f"{prompts.name} {prompt.id}: how far")
                    task = prepare(alone.connection, alone.method, prompt, temperature, seed)
                    for turn in range(repeat):
                        for cell in _rotated(cells, number + turn):
                            step(f"{prompts.name} {prompt.id}: {cell.method.label}")
                            cell.runs.append(found[cell.method.label].decode(task, temperature, seed))
                    _compare(cells, task)
                yield from cells


def _rotated(cells: Sequence[Cell], by: int) -> list[Cell]:
    """Each method is the first one equally often."""
    by %= len(cells)
    return [*cells[by:], *cells[:by]]


def _sampling(method: Method, temperature: float, max_tokens: int) -> Sampling:
    sampling = method.configuration.settings.sampling
    return sampling.model_copy(update={"temperature": temperature, "min_tokens": min(sampling.min_tokens, max_tokens)})


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
    """Hold the last replies to a prompt against that of `none`, where they are to be the same."""
    alone = cells[0].runs[-1].finished
    for cell in cells[1:]:
        other = cell.runs[-1].finished
        difference = first_difference(alone, other) if _comparable(cell, alone, other) else None
        if difference is not None:
            cell.differences[task.prompt.id] = difference


def _comparable(cell: Cell, alone: Finished, other: Finished) -> bool:
    """Replies of another function (fingerprint) are no matter of losslessness; nor is what a peer draws, or computes with weights that it has not."""
    if cell.method.ours:
        return other.result.fingerprint == alone.result.fingerprint
    return cell.temperature == 0.0 and cell.method.configuration.settings.target.weights in ("fp32", "half")


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


def best_of_peers(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, but of each peer on a set at a temperature only the one with the number of threads that was the fastest."""
    return [cell for cell in cells if cell is max(_variants(cells, cell), key=lambda variant: variant.tokens_per_s)]


def _variants(cells: Sequence[Cell], of: Cell) -> list[Cell]:
    return [c for c in cells if c.method.name == of.method.name and c.prompts is of.prompts and c.temperature == of.temperature]


def _peers_told(measured: Sequence[Cell], best: Sequence[Cell]) -> list[dict[str, Any]]:
    """What each peer was measured with, and which of it is its row."""
    where = [(cell, {"method": cell.method.name, "prompts": cell.prompts.name, "temperature": cell.temperature}) for cell in measured if not cell.method.ours]
    return [{**at, "threads": c.method.threads, "tokens_per_s": c.tokens_per_s, "best": any(c is other for other in best)} for c, at in where]


def against_peers(cells: Sequence[Cell], seed: int) -> list[dict[str, Any]]:
    """How many times as fast as each peer each method of ours is, with the interval; the same prompts, in turns."""
    told = []
    for peer in (cell for cell in cells if not cell.method.ours):
        rivals = (c for c in cells if c.method.ours and c.prompts is peer.prompts and c.temperature == peer.temperature)
        for cell in rivals:
            ratio, low, high = speedup(cell, peer, seed)
            names = {"method": cell.method.name, "peer": peer.method.name, "prompts": cell.prompts.name, "temperature": cell.temperature}
            told.append({**names, "ratio": ratio, "low": low, "high": high})
    return told


def row(cell: Cell, baseline: Cell, contender: Contender, seed: int) -> dict[str, Any]:
    """One line of the result, for a method on a set at a temperature."""
    results = [run.finished.result for run in cell.runs]
    seconds = sum(run.decode_s for run in cell.runs)
    tokens, rounds = sum(run.decoded_tokens for run in cell.runs), sum(result.rounds for result in results)
    taus = [result.tau for result in results if result.tau is not None]
    ratio, low, high = speedup(cell, baseline, seed)
    settings = cell.method.configuration.settings
    shaped = cell.method.drafts and cell.method.ours
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
        "peak_rss_mb": contender.peak_rss_mb(),
        "peak_vram_mb": None,
        "draft_share": sum(result.draft_exposed_s for result in results) / seconds if seconds else 0.0,
        "verify_share": sum(result.verify_s for result in results) / seconds if seconds else 0.0,
        "weights": settings.target.weights if cell.method.ours else "bf16" if settings.target.weights == "bf16" else "fp32",
        "policy": settings.tree.policy if shaped else NONE,
        "gamma": settings.tree.gamma if shaped else 0,
        "depth": settings.tree.depth if shaped else 0,
        "width": settings.tree.width if shaped else 0,
    }


def _pass_told(cell: Cell, baseline: Cell) -> dict[str, Any]:
    """Milliseconds of a pass of the target as it was called, and how many times that is of one of the target alone."""
    milliseconds, alone = (_pass_ms(c) for c in (cell, baseline))
    ratio = milliseconds / alone if milliseconds is not None and alone else None
    return {"method": cell.method.name, "prompts": cell.prompts.name, "temperature": cell.temperature, "verify_ms": milliseconds, "ratio": ratio}


def _pass_ms(cell: Cell) -> float | None:
    results = [run.finished.result for run in cell.runs]
    rounds = sum(result.rounds for result in results)
    return 1e3 * sum(result.verify_s for result in results) / rounds if rounds else None


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The speed-up of each method on its median set of prompts, where there are several."""
    told = []
    for method, temperature in dict.fromkeys((row["method"], row["temperature"]) for row in rows):
        found = [row["speedup"] for row in rows if (row["method"], row["temperature"]) == (method, temperature) and row["speedup"] is not None]
        if len(found) > 1:
            told.append({"method": method, "temperature": temperature, "sets": len(found), "speedup": float(np.median(found))})
    return told


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


def _show(result: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    headings = ("method", "prompts", "T", "tokens/s", "speed-up", "tau", "pass", "draft", "verify", "MB", "differ")
    shown = []
    for told, passes, cell in zip(result["rows"], result["passes"], cells, strict=True):
        ratio = "-" if told["speedup"] is None else f"{told['speedup']:.2f} ({told['speedup_low']:.2f}-{told['speedup_high']:.2f})"
        cost = "-" if passes["ratio"] is None else f"{passes['ratio']:.2f}"
        shares = (cost, f"{told['draft_share']:.0%}", f"{told['verify_share']:.0%}")
        where = (told["method"], told["prompts"], told["temperature"])
        shown.append((*where, f"{told['tokens_per_s']:.1f}", ratio, told["tau"], *shares, round(told["peak_rss_mb"]), len(cell.differences)))
    print_table(headings, shown)
    for told in result["prompts"]:
        if told["shortened"] or told["looped"]:
            cut = f"{told['shortened']} of {told['count']} prompts were cut to fit, {told['looped']} replies where they began to loop"
            note(f"{told['prompts']} T {told['temperature']:g}: {cut}")
    for told in result["peers"]:
        if told["best"]:
            threads = f"{told['threads']} thread{'s' if told['threads'] > 1 else ''}"
            note(f"{told['method']} {told['prompts']} T {told['temperature']:g}: {threads}{_slower(result['peers'], told)}")
    for told in result["against"]:
        if told["ratio"] is not None:
            place = f"{told['prompts']} T {told['temperature']:g}"
            note(f"{place}: {told['method']} is {told['ratio']:.2f} ({told['low']:.2f}-{told['high']:.2f}) times as fast as {told['peer']}")
    for told in result["medians"]:
        if told["method"] != NONE:
            note(f"{told['method']} T {told['temperature']:g}: speed-up {told['speedup']:.2f} on the median of {told['sets']} sets")
    for told in result["differences"]:
        kind = "near-tie" if told["near_tie"] else "DIFFERS"
        note(f"{kind}: {told['method']} {told['prompts']} T {told['temperature']:g} {told['id']} at token {told['position']}, margin {told['margin']:.2g}")


def _slower(told: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> str:
    """The rates with other numbers of threads, in words."""
    same = ("method", "prompts", "temperature")
    others = (peer for peer in told if not peer["best"] and all(peer[name] == best[name] for name in same))
    return "".join(f" (with {peer['threads']}: {peer['tokens_per_s']:.1f} tokens/s)" for peer in others)


def _show_overhead(overhead: Overhead) -> None:
    rows = [
        ("coordinator", overhead.coordinator_us, overhead.coordinator_p99_us, overhead.own_coordinator_us),
        ("transport, four hops", overhead.transport_us, overhead.transport_p99_us, overhead.own_transport_us),
        ("both", overhead.outside_us, overhead.outside_p99_us, overhead.own_coordinator_us + overhead.own_transport_us),
    ]
    print_table((f"us a round, {overhead.rounds} rounds", "median", "p99", "coordinator's own mean"), rows)
