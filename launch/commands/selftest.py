"""`dovetail selftest`: the target computes its checkpoint, and speculation changes no token: each
case decodes the same prompts with and without the draft, with the same seed."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from dovetail.launch.checks.agreement import (
    CARD_COLUMNS,
    Agreement,
    agreement_of,
    card_cells,
    measure_card,
)
from dovetail.launch.console.help import (
    COUNT,
    FILE,
    HelpCommand,
    connect_option,
    json_option,
    option,
    rare,
)
from dovetail.launch.console.terminal import first_failure, note, print_table, progress_bar
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.processes.connection import LOSSY, Connection, connected, is_lossy
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import DECODING_SECTIONS, settings_flags
from dovetail.launch.settings.models import DEMO_FOLDER, with_target
from dovetail.protocol.errors import DovetailError, UserError, printable
from dovetail.protocol.messages import DraftFailure, Finished, WorkerState
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.session.comparison import Difference, first_difference

SEED = 20260101
DEMO_PROMPTS = DEMO_FOLDER / "prompts.jsonl"
TOKENS = 48  # the default length of each reply: enough for a dozen rounds
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=40),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.8, min_p=0.05),
    Sampling(repetition_penalty=1.2, min_tokens=16),
    Sampling(
        temperature=1.0,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        logit_bias=((0, -100.0), (5, 2.5)),
    ),
)
CHAIN = {"gamma": 4, "depth": 4, "width": 1}
WIDE = {"gamma": 59, "depth": 8, "width": 10}


@dataclass(frozen=True)
class Case:
    """A sampling setting and a tree shape."""

    sampling: Sampling
    tree: TreeSettings

    @property
    def name(self) -> str:
        sampling = " ".join(
            f"{key} {len(value)}" if isinstance(value, tuple) else f"{key} {value:g}"
            for key, value in self.sampling.model_dump().items()
            if key == "temperature" or value != Sampling.model_fields[key].default
        )
        tree = self.tree
        return f"{sampling} · gamma {tree.gamma} depth {tree.depth} width {tree.width}"


@dataclass(frozen=True)
class CaseResult:
    """The result of a case: the number of compared tokens, and the largest of the first
    differences."""

    case: str
    tokens: int
    difference: Difference | None
    failure: DraftFailure | None = None
    """The first failure of the draft; nothing after it was compared."""

    @property
    def ok(self) -> bool:
        return self.failure is None and (self.difference is None or self.difference.near_tie)


@click.command(cls=HelpCommand)
@connect_option(
    "The coordinator to test.  [default: the only one of this user, else one is started]"
)
@click.option("--prompts", type=FILE, help="File of prompts.  [default: the demonstration's]")
@option("--limit", type=COUNT, default=3, help="Number of prompts.")
@rare(
    "--text-tokens",
    type=click.IntRange(min=0),
    help="Length in tokens of the text compared with transformers; 0: none.  [default: beyond the "
    "positions in config.json, 256 to 2064]",
)
@click.option(
    "--card",
    is_flag=True,
    help="Instead, measure the effect of each type of the target's weights on a text, without a "
    "coordinator.",
)
@json_option()
@settings_flags(*DECODING_SECTIONS)
@click.pass_context
def command(
    context: click.Context,
    configuration: Configuration,
    connect: str | None,
    prompts: Path | None,
    limit: int,
    text_tokens: int | None,
    card: bool,
    as_json: bool,
) -> None:
    """Compare token ids with and without speculation, at several temperatures, truncations and tree
    sizes, and the target's log-probabilities of a text with transformers' own in fp32; exit code 1
    if they differ, or if the draft fails.

    A difference where the target's two best choices are less than 1e-4 apart is a near-tie, decided
    by rounding. It is reported but is no failure.
    """
    if card:
        _show_card(configuration, prompts, text_tokens, as_json=as_json)
        return
    _check_settings(configuration)
    chosen = read_prompts(prompts or DEMO_PROMPTS)[:limit]
    asked = configuration.given("sampling.max_tokens")
    tokens = configuration.settings.sampling.max_tokens if asked else TOKENS
    cases = _cases(drafting_tree(configuration), tokens)
    with connected(configuration, connect) as connection, progress_bar(len(cases), "cases") as step:
        _log("the target and its draft are ready")
        refuse_lossy(connection.state.workers)
        runs = _Runs(connection, chosen, tokens)
        checks = []
        for number, case in enumerate(cases, 1):
            step(case.name)
            _log(f"case {number} of {len(cases)}: {case.name}")
            checks.append(runs.check(case))
        if not runs.drafted and not any(check.failure for check in checks):
            text = "the draft proposed nothing, so nothing was compared"
            raise DovetailError(f"{text}: `dovetail status` shows the workers")
        note(connection.models())
        agreement = Agreement(why="--text-tokens is 0")
        if text_tokens != 0:
            _log("comparing the target's log-probabilities of a text with transformers' in fp32")
            with progress_bar(1, "text") as step:
                agreement = agreement_of(
                    connection,
                    chosen,
                    text_tokens,
                    lambda done, of: step(f"layer {done} of {of}") if done < of else None,
                )
    ok = all(check.ok for check in checks) and agreement.ok is not False
    _show(checks, agreement, ok=ok, as_json=as_json)
    context.exit(0 if ok else 1)


def _show_card(
    configuration: Configuration, prompts: Path | None, text_tokens: int | None, *, as_json: bool
) -> None:
    target = with_target(configuration.settings.target)
    lines = measure_card(target, read_prompts(prompts or DEMO_PROMPTS), text_tokens)
    if as_json:
        click.echo(json.dumps({"card": [asdict(line) for line in lines]}))
    else:
        print_table(CARD_COLUMNS, [card_cells(line) for line in lines])


def _check_settings(configuration: Configuration) -> None:
    if configuration.settings.draft.kind == "none" or configuration.settings.tree.gamma == 0:
        raise UserError("nothing to compare without a draft: leave out --draft none and --gamma 0")
    if configuration.settings.sampling.acceptance == "rejection":
        text = "rejection does not keep tokens, so there is nothing to compare"
        raise UserError(f"{text}: leave --sampling.acceptance out")


def _show(checks: Sequence[CaseResult], agreement: Agreement, *, ok: bool, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "case": c.case,
                "ok": c.ok,
                "tokens": c.tokens,
                "margin": c.difference.margin if c.difference else None,
                "draft_failure": c.failure.model_dump() if c.failure else None,
            }
            for c in checks
        ]
        other = {**asdict(agreement), "ok": agreement.ok}
        click.echo(json.dumps({"checks": rows, "transformers": other, "ok": ok}))
    else:
        cells = [
            (c.case, c.ok, c.tokens, c.difference.margin if c.difference else "", _remark(c))
            for c in checks
        ]
        print_table(("case", "ok", "tokens", "margin", ""), cells)
        click.echo(agreement.remark)


def _log(text: str) -> None:
    if not sys.stderr.isatty():
        note(text)


def refuse_lossy(workers: Iterable[WorkerState]) -> None:
    """`UserError` for a target whose tokens depend on the rest of the batch, since no test could
    pass."""
    if any(map(is_lossy, workers)):
        text = f"{LOSSY} weights are not lossless even against themselves"
        raise UserError(f"{text}: use --weights int8, half or fp32")


def _remark(check: CaseResult) -> str:
    if check.failure is not None:
        return f"the draft failed in round {check.failure.round}: {printable(check.failure.error)}"
    if check.difference is None:
        return ""
    kind = "near-tie" if check.difference.near_tie else "differs"
    return f"{kind} at token {check.difference.position}"


def drafting_tree(configuration: Configuration) -> TreeSettings:
    """The tree of the settings; without a policy, one that always drafts, so that there is
    something to compare."""
    tree = configuration.settings.tree
    if configuration.given("tree.policy"):
        return tree
    return tree.model_copy(update={"policy": "dynamic", "insist": True})


def _cases(tree: TreeSettings, tokens: int) -> list[Case]:
    """Every sampling with the tree of the settings, and greedy and plain sampling with a chain and
    with a large tree, for replies of this many tokens."""
    cases = []
    for sampling in SAMPLINGS:
        least = {"min_tokens": min(sampling.min_tokens, tokens)}
        cases.append(Case(sampling.model_copy(update=least), tree))
    for shape in (CHAIN, WIDE):
        other = tree.model_copy(update=shape)
        cases += [Case(Sampling(), other), Case(Sampling(temperature=1.0), other)]
    return cases


class _Runs:
    """Decodes the prompts; replies of the target alone are kept, since several trees are compared
    with them."""

    def __init__(self, connection: Connection, prompts: list[Prompt], tokens: int) -> None:
        self._connection, self._prompts, self._tokens = connection, prompts, tokens
        self.drafted = 0  # nodes that were verified in all; without any, nothing was tested
        self._alone: dict[tuple[Sampling, str], Finished] = {}

    def check(self, case: Case) -> CaseResult:
        """Compare all prompts."""
        tokens = 0
        differences, results = [], []
        for prompt in self._prompts:
            key = case.sampling, prompt.id
            if key not in self._alone:
                self._alone[key] = self._decode(case, prompt, speculate=False)
            alone = self._alone[key]
            speculated = self._decode(case, prompt, speculate=True)
            results.append(speculated.result)
            tokens += speculated.result.completion_tokens
            self.drafted += speculated.result.drafted_tokens
            if (difference := first_difference(alone, speculated)) is not None:
                differences.append(difference)
        widest = max(differences, key=lambda d: d.margin, default=None)
        return CaseResult(case.name, tokens, widest, first_failure(results)[1])

    def _decode(self, case: Case, prompt: Prompt, *, speculate: bool) -> Finished:
        turns = prompt.turns[:1]
        return self._connection.decode(
            turns,
            sampling=case.sampling,
            tree=case.tree,
            max_tokens=self._tokens,
            seed=SEED,
            speculate=speculate,
        )
