"""The command `coupling`: what the noise that draft and target share is worth, above temperature 0.

*A node*: at contexts of held-out text a draft names its likeliest children and the target makes its
 choice; the share of contexts where the choice is among
the children, at temperature 1 with the noise and at temperature 0 without, for the same contexts.
*A reply*: committed tokens a round (tau) with the shared
noise; with EAGLE's rule, under which the children are the draft's likeliest tokens and the target's
sample has to be one of them; and with the papers'
rejection. Both workers in one process (`duet.py`), the same trees, prompts and keys.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.agreement import Text, agreements
from benchmarks.duet import Duet, Reply, open_draft, open_target
from benchmarks.measure import ratio_of_sums
from benchmarks.options import Command, Numbers, option, options, pin, report
from dovetail.launch.bench.turns import loop_begins
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.text.tokenizer import TextCodec

GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)
REJECTED = Sampling(temperature=1.0, acceptance="rejection")
MATCHING_FIGURE, REJECTION_FIGURE = 1.5, 1.05
"""The ratios of tau to reach: against top-k matching, and against rejection on the same static
tree."""
PLAIN = TreeSettings(policy="dynamic", insist=True, gamma=0)
PROMPTS = DEMO_FOLDER / "prompts.jsonl"


@click.command(cls=Command)
@option(
    "--draft",
    "drafts",
    multiple=True,
    default=(str(DEMO_FOLDER / "draft"),),
    help="Folder of a draft or head; can be repeated.",
)
@option("--target", default=str(DEMO_FOLDER / "target"), help="Folder of their target.")
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts that no draft was trained on.",
)
@option("--limit", type=click.IntRange(min=1), default=16, help="Prompts taken.")
@option("--max-tokens", type=click.IntRange(min=2), default=128, help="Tokens of a reply.")
@option(
    "--keys",
    type=click.IntRange(min=1),
    default=2,
    help="Keys of the noise: replies to each prompt, and choices at each context.",
)
@option("--children", type=Numbers(), default="1,2,4,10", help="Children of a node.")
@option(
    "--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width of the growing tree."
)
@option(
    "--static", type=Numbers(3), default="25,5,10", help="gamma, depth, width of the static tree."
)
@options("json")
def coupling(
    drafts: tuple[str, ...],
    target: str,
    prompts: Path,
    limit: int,
    max_tokens: int,
    keys: int,
    children: tuple[int, ...],
    tree: tuple[int, int, int],
    static: tuple[int, int, int],
    as_json: bool,
) -> None:
    """Acceptance with the noise that draft and target share, against temperature 0, top-k matching
    and rejection."""
    pin(1)
    found = []
    with progress_bar(len(drafts) * (limit * (1 + 6 * keys)), "replies") as step:
        for draft in drafts:
            duet = Duet(open_target(target), open_draft(draft, target))
            asked = tasks(duet, prompts, limit, max_tokens, keys, step)
            nodes, entropy = agreements(
                target, draft, [Text(task.prompt, task.reply, task.key) for task in asked], children
            )
            variants = {
                name: [
                    task.run(duet, sampling, shape(name.split()[-1], tree, static), drafting, step)
                    for task in asked
                    if task.temperature == heat
                ]
                for name, (heat, sampling, drafting) in VARIANTS.items()
            }
            found.append(
                {
                    "draft": draft,
                    "entropy": entropy,
                    "nodes": [node.as_json() for node in nodes],
                    **taus(variants),
                }
            )
    report({"tree": tree, "static": static, "drafts": found}, as_json, lambda: show(found))


VARIANTS: Mapping[str, tuple[float, Sampling, Sampling | None]] = {
    "greedy tree": (0.0, GREEDY, None),
    "coupled tree": (1.0, SAMPLED, None),
    "matched tree": (1.0, SAMPLED, GREEDY),
    "coupled static": (1.0, SAMPLED, None),
    "matched static": (1.0, SAMPLED, GREEDY),
    "rejected static": (1.0, REJECTED, None),
}
"""Name and tree -> temperature, what the target is told, what the draft is told if that is another.
Told nothing of temperature, a draft ranks children by their logits alone: that is top-k
matching."""


def shape(name: str, tree: tuple[int, int, int], static: tuple[int, int, int]) -> TreeSettings:
    """The tree of a variant."""
    gamma, depth, width = static if name == "static" else tree
    return TreeSettings(
        policy="static" if name == "static" else "dynamic",
        insist=True,
        gamma=gamma,
        depth=depth,
        width=width,
    )


# -- replies ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A prompt with a key at a temperature, and the target's own reply up to where it begins to
    loop."""

    prompt: tuple[int, ...]
    key: bytes
    temperature: float
    reply: tuple[int, ...]

    def run(
        self,
        duet: Duet,
        sampling: Sampling,
        tree: TreeSettings,
        drafting: Sampling | None,
        step: Callable[[str], None],
    ) -> Reply:
        """Decode the reply again with speculation; with rejection it is another one, of at most the
        same length."""
        step("speculated")
        return duet.decode(
            self.prompt,
            key=self.key,
            sampling=sampling,
            tree=tree,
            max_tokens=len(self.reply),
            drafting=drafting,
        )


def tasks(
    duet: Duet, prompts: Path, limit: int, max_tokens: int, keys: int, step: Callable[[str], None]
) -> list[Task]:
    """Every prompt at temperature 0, and with every key at temperature 1."""
    found = []
    codec = TextCodec(duet.tokenizer, duet.vocabulary)
    for prompt in read_prompts(prompts)[:limit]:
        tokens = codec.encode_turns(prompt.turns[:1])[: duet.context - max_tokens]
        for sampling, count in ((GREEDY, 1), (SAMPLED, keys)):
            for key in list_keys(prompt.id, count):
                step(prompt.id)
                reply = duet.decode(
                    tokens, key=key, sampling=sampling, tree=PLAIN, max_tokens=max_tokens
                ).tokens
                found.append(
                    Task(
                        tokens,
                        key,
                        sampling.temperature,
                        tuple(reply[: max(2, loop_begins(reply))]),
                    )
                )
    return found


def list_keys(name: str, count: int) -> list[bytes]:
    """Return so many keys of the noise for a prompt, the same each time."""
    return [hashlib.sha256(f"{name} {index}".encode()).digest()[:16] for index in range(count)]


def taus(variants: Mapping[str, Sequence[Reply]]) -> dict[str, Any]:
    """tau of each variant, and the ratios that figures were set for."""
    sums = {
        name: [(reply.decoded, reply.rounds) for reply in replies]
        for name, replies in variants.items()
    }
    compared = {
        "matching": (sums["coupled tree"], sums["matched tree"], MATCHING_FIGURE),
        "static matching": (sums["coupled static"], sums["matched static"], MATCHING_FIGURE),
        "rejection": (sums["coupled static"], sums["rejected static"], REJECTION_FIGURE),
    }
    ratios = {
        name: (ratio_of_sums(ours, theirs), figure)
        for name, (ours, theirs, figure) in compared.items()
    }
    return {
        "tau": {
            name: sum(d for d, _ in pairs) / max(1, sum(r for _, r in pairs))
            for name, pairs in sums.items()
        },
        "against": {
            name: {**found.as_json(), "figure": figure, "holds": found.reaches(figure)}
            for name, (found, figure) in ratios.items()
        },
    }


def show(found: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for told in found:
        click.echo(
            f"{told['draft']}: the target's choices have {told['entropy']:.2f} nats of entropy "
            "at T = 1"
        )
        for node in told["nodes"]:
            shares = (f"{node[rule]:.3f}" for rule in ("greedy", "coupled", "matched", "rejected"))
            cells.append((told["draft"], node["children"], *shares, *judged(node["ratio"], node)))
    print_table(
        (
            "draft",
            "children",
            "accepted at T = 0",
            "T = 1 coupled",
            "matched",
            "rejection",
            "coupled / T = 0 (95 %)",
            "figure",
            "holds",
        ),
        cells,
    )
    print_table(
        ("draft", *VARIANTS),
        [(told["draft"], *(f"{told['tau'][name]:.2f}" for name in VARIANTS)) for told in found],
    )
    print_table(
        ("draft", "tau, coupled against", "ratio (95 %)", "figure", "holds"),
        [
            (told["draft"], name, *judged(against, against))
            for told in found
            for name, against in told["against"].items()
        ],
    )


def judged(ratio: Mapping[str, float], told: Mapping[str, Any]) -> tuple[str, str, str]:
    """The cells of a ratio that is to reach a figure."""
    return (
        f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})",
        f">= {told['figure']:g}",
        "yes" if told["holds"] else "NO",
    )
