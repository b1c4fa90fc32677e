"""`dovetail stratify`: the bins of entropy for the policy `heterospec` (HeteroSpec, Liu et al.
2025, section 4.2), fitted by a regression tree to the rank of accepted paths in replies with
`dynamic` trees. Rounds near the end of a reply, or of one that repeats itself, are left out."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.launch.bench.turns import loop_begins
from dovetail.launch.console.help import (
    COUNT,
    FILE,
    HelpCommand,
    json_instead_of,
    rare,
    seed_option,
)
from dovetail.launch.console.terminal import note, print_table, progress_bar, spinner
from dovetail.launch.files.charts import Curve, Panel, check_chart, draw_panels
from dovetail.launch.files.outputs import check_output, continued
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.processes.connection import Connection
from dovetail.launch.processes.stack import begin_stack, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import DECODING_SECTIONS, settings_flags
from dovetail.launch.settings.thresholds import MADE_FOR, draft_facts, write_thresholds
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.files import append, writing
from dovetail.protocol.messages import Result, RoundRecord
from dovetail.protocol.settings import Settings, TreeSettings

if TYPE_CHECKING:
    from dovetail.workers.training.stratify import Round, Strata

GROUPS = 20  # points of the plot; each averages the same number of rounds


@dataclass(frozen=True)
class PromptRounds:
    """The rounds of the answers to a prompt."""

    id: str
    rounds: "tuple[Round, ...]"


@click.command(cls=HelpCommand)
@click.option(
    "--prompts",
    type=FILE,
    required=True,
    help='File of typical prompts, one {"id", "turns"} per line.',
)
@click.option(
    "--out",
    type=FILE,
    required=True,
    help="TOML file for the thresholds, for --tree.thresholds.",
)
@click.option(
    "--rounds",
    "kept",
    type=FILE,
    help="Save the rounds in this file; a second run continues from it.",
)
@rare("--limit", type=COUNT, help="Number of prompts of the file.  [default: all]")
@seed_option("Seed of every reply.")
@click.option("--plot", type=FILE, help="Plot rank over entropy, with the bins, in this SVG file.")
@json_instead_of("a table")
@settings_flags(*DECODING_SECTIONS, stratified=False)
def command(
    configuration: Configuration,
    prompts: Path,
    out: Path,
    kept: Path | None,
    limit: int | None,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Decode PROMPTS with speculation and find the bins of entropy by which `--policy heterospec`
    shapes its trees.

    The thresholds hold for one draft and for the tree's depth and width. Takes about as long as the
    replies; some thousand rounds suffice.
    """
    _check(configuration, plot)
    check_output(out, "the thresholds")
    check_output(plot, "the plot")
    chosen = read_prompts(prompts)[:limit]
    holds_for = _holds_for(configuration.settings)
    with _kept(kept, holds_for) as (replies, keep):
        left = [prompt for prompt in chosen if prompt.id not in replies]
        if left:
            replies |= _play(configuration, left, seed, keep)
    rounds = [
        round for prompt in chosen if prompt.id in replies for round in replies[prompt.id].rounds
    ]
    from dovetail.workers.training.stratify import stratify

    strata = stratify(rounds, configuration.settings.tree.gamma)
    fitted_on = {
        "prompts": prompts.name,
        "replies": len(replies),
        "rounds": len(rounds),
        "max_tokens": configuration.settings.sampling.max_tokens,
    }
    write_thresholds(
        out, strata.thresholds, {"holds_for": holds_for, "fitted_on": fitted_on}, _bins_told(strata)
    )
    if plot is not None:
        drawn = chart(rounds, strata, configuration.settings.tree.gamma)
        with writing(plot, "the plot"):
            plot.write_text(drawn, encoding="utf-8")
    if as_json:
        found = {"thresholds": strata.thresholds, "bins": _bins_told(strata)}
        click.echo(json.dumps({**found, "holds_for": holds_for, "fitted_on": fitted_on}))
        return
    _show(strata, configuration.settings.tree)
    note(
        f"{len(rounds)} rounds of {len(replies)} prompts; use it with --policy heterospec "
        f"--tree.thresholds {out}"
    )


def _check(configuration: Configuration, plot: Path | None) -> None:
    check_chart(plot)
    settings = configuration.settings
    if (kind := settings.draft.kind) in ("none", "ngram"):
        raise UserError(f"draft.kind = {kind!r} has no entropy: name a draft with a model")
    if (gamma := settings.tree.gamma) == 0 or settings.tree.width == 1:
        raise UserError(f"a tree of gamma {gamma} and width {settings.tree.width} has no entropy")
    if settings.sampling.acceptance == "rejection":
        raise UserError("sampling.acceptance 'rejection' draws its trees at random: leave it out")
    if find_spec("sklearn") is None:  # report before anything is decoded
        raise UserError(
            "fitting thresholds needs scikit-learn: pip install 'dovetail-llm[stratify]'"
        )


def _holds_for(settings: Settings) -> dict[str, Any]:
    tree = {"gamma": settings.tree.gamma, **{key: getattr(settings.tree, key) for key in MADE_FOR}}
    return {**draft_facts(settings.draft), **tree, "temperature": settings.sampling.temperature}


def _play(
    configuration: Configuration,
    prompts: Sequence[Prompt],
    seed: int,
    keep: Callable[[PromptRounds], None],
) -> dict[str, PromptRounds]:
    """Replies by prompt. One that is too long for the context is left out, with a note."""
    replies = {}
    with Supervisor() as supervisor:
        with spinner() as say:
            say("starting")
            stack = begin_stack(supervisor, configuration, measures=True)()
            state = wait_until_ready(supervisor, stack, say)
        with stack.connect() as client, progress_bar(len(prompts), "prompts") as step:
            connection = Connection(client, state, stack)
            for prompt in prompts:
                step(prompt.id)
                try:
                    replies[prompt.id] = _answer(connection, configuration.settings, prompt, seed)
                except RequestError as error:
                    if error.code != "prompt_too_long":
                        raise
                    note(f"{prompt.id} is left out: {error}")
                else:
                    keep(replies[prompt.id])
    return replies


def _answer(connection: Connection, settings: Settings, prompt: Prompt, seed: int) -> PromptRounds:
    tree = settings.tree.model_copy(
        update={"policy": "heterospec", "insist": True, "thresholds": ""}
    )  # one bin: the trees are those of dynamic
    history: list[str] = []
    rounds: list[Round] = []
    for turn in prompt.turns:
        records: list[RoundRecord] = []
        result = connection.decode(
            [*history, turn],
            sampling=settings.sampling,
            tree=tree,
            max_tokens=settings.sampling.max_tokens,
            seed=seed,
            ahead=False,
            record=records.append,
        ).result
        history += [turn, result.text]
        rounds += rounds_of(records, result, tree, settings.sampling.max_tokens)
    return PromptRounds(prompt.id, tuple(rounds))


def rounds_of(
    records: Sequence[RoundRecord], result: Result, tree: TreeSettings, max_tokens: int
) -> "list[Round]":
    """Return the rounds to fit: those with a tree, room for all of its levels, and an informative
    rank."""
    from dovetail.workers.training.stratify import Round, terminal_confidence_rank

    last = result.prompt_tokens + min(loop_begins(result.token_ids), max_tokens - tree.depth - 1)
    return [
        Round(
            record.entropy,
            terminal_confidence_rank(record.accepted, tree.gamma),
            len(record.accepted) >= tree.depth,
        )
        for record in records
        if record.entropy is not None and record.prefix <= last
    ]


@contextmanager
def _kept(
    path: Path | None, holds_for: dict[str, Any]
) -> Iterator[tuple[dict[str, PromptRounds], Callable[[PromptRounds], None]]]:
    """Yield the replies of an earlier run, and a function that appends one to their file, whose
    first line has their settings."""
    replies: dict[str, PromptRounds] = {}
    if path is None:
        yield replies, lambda _: None
        return
    from dovetail.workers.training.stratify import Round

    headed = False

    def take(line: bytes) -> None:
        nonlocal headed
        content = json.loads(line)
        if headed:
            rounds = (Round(float(e), int(rank), bool(full)) for e, rank, full in content["rounds"])
            replies[content["id"]] = PromptRounds(content["id"], tuple(rounds))
            return
        there, headed = content["holds_for"], True
        for key, own in holds_for.items():
            if (other := there.get(key)) != own:
                text = f"the rounds in {path} were played with {key} = {other!r}, not {own!r}"
                raise UserError(f"{text}: choose another --rounds")

    def torn(line: bytes) -> bool:
        return line.startswith((b'{"id": ', b'{"holds_for": ')[: 1 if headed else 2])

    with continued(path, "rounds", take, torn, "--rounds") as file:

        def keep(told: dict[str, Any]) -> None:
            append(file, path, "the rounds", json.dumps(told).encode() + b"\n")

        if not headed:
            keep({"holds_for": holds_for})
        yield replies, lambda reply: keep(asdict(reply))


def _bins_told(strata: "Strata") -> list[dict[str, Any]]:
    return [{key: round(value, 3) for key, value in asdict(found).items()} for found in strata.bins]


def _show(strata: "Strata", tree: TreeSettings) -> None:
    adapted = tree.model_copy(update={"policy": "heterospec", "thresholds": strata.thresholds})
    rows = []
    for number, (found, upper) in enumerate(
        zip(strata.bins, (*strata.thresholds, None), strict=True)
    ):
        nodes, levels = adapted.size_in(number)
        ranks = (found.rounds, found.full_share, found.fitted_rank, found.mean_rank)
        rows.append((number, upper, *ranks, nodes, levels))
    ranks_of = ("rounds", "fully accepted", "rank as fitted", "mean rank")
    print_table(("bin", "entropy up to, nats", *ranks_of, "nodes", "levels"), rows)


def chart(rounds: "Sequence[Round]", strata: "Strata", nodes: int) -> str:
    """The SVG of rank, and of the share that is fully accepted, over entropy: means of groups of
    equally many rounds, and the bins as steps."""
    from dovetail.workers.training.stratify import fitted_rank

    ordered = sorted(rounds)
    groups = [
        ordered[len(ordered) * group // GROUPS : len(ordered) * (group + 1) // GROUPS]
        for group in range(GROUPS)
    ]
    across = [_mean([seen.entropy for seen in group]) for group in groups]
    edges = (0.0, *strata.thresholds, max(ordered[-1].entropy, strata.thresholds[-1]))

    def curves(of: "Callable[[Round], float]", bins: Sequence[float]) -> list[Curve]:
        steps = [
            (edge, level)
            for number, level in enumerate(bins)
            for edge in edges[number : number + 2]
        ]
        means = [_mean([of(seen) for seen in group]) for group in groups]
        return [
            Curve("rounds", list(zip(across, means, strict=True))),
            Curve("bins", steps, dashed=True),
        ]

    rank = curves(
        lambda seen: fitted_rank(seen, nodes), [found.fitted_rank for found in strata.bins]
    )
    full = curves(lambda seen: seen.full, [found.full_share for found in strata.bins])
    entropy = "cumulative top-K entropy, nats"
    panels = [
        Panel(
            "Rank of the accepted path",
            entropy,
            "rank (worst: not accepted to the deepest level)",
            rank,
        ),
        Panel("Accepted to the deepest level", entropy, "share", full),
    ]
    return draw_panels("Acceptance by certainty of the draft", panels)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
