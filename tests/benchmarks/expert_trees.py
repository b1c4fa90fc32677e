"""The command `expert-trees`: the gain of choosing a tree's nodes by the experts that each adds to
the pass, over `goodput` at the same prices, which knows how many experts M rows use.

At every position of a mixture's own text a draft grows a tree, and the mixture computes all nodes;
the experts of every row are recorded. Every choice of nodes is then evaluated on the same records,
at stated prices: T = a + c U + d M, where U is the number of distinct experts. Nothing is timed.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.measure import ratio_of_sums
from benchmarks.options import Command, option, options, pin, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.experts import count_experts
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.runtime.control.pricing import cut
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.speculation.decode import Chooser
from dovetail.workers.speculation.growth import GrowingTree, likeliest
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Shape

NODES, DEPTH, WIDTH = 24, 8, 6  # of a recorded tree
ROW = 0.01  # d: a row without its experts, in passes over one row
ROUND = 0.1  # drafting and messages of a round, in passes over one row
PERTURBED = 0.1  # noise of an upcycled expert's weights, in their standard deviations
RATES = 3  # iterations until the value of a second is that of the rounds it leads to
PRIOR = 2.0  # weight of the draft's own probability, in outcomes
Bits = NDArray[np.float32]
Nodes = tuple[int, ...]


@dataclass
class Round:
    """A tree at one position; row 0 is the root, row i + 1 node i of a best-first order."""

    text: int
    tokens: list[int]
    parents: list[int]
    levels: list[int]
    ranks: list[int]
    gains: list[float]  # log-probabilities of nodes given their parents, by the draft
    chosen: NDArray[np.int64]  # [rows, layers, k]: the experts of each row
    right: list[bool] = field(default_factory=list)  # whether the target takes that row
    chances: list[float] = field(default_factory=list)  # path probabilities, calibrated


@click.command("expert-trees", cls=Command)
@option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a mixture.  [default: the embedded target, upcycled]",
)
@option(
    "--draft",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=DEMO_FOLDER / "draft",
    help="Folder of a smaller model.",
)
@option("--prompts", type=click.Path(path_type=Path), default=DEMO_FOLDER / "prompts.jsonl")
@option("--limit", type=click.IntRange(min=2), default=16, help="Prompts taken.")
@option("--max-tokens", type=click.IntRange(min=2), default=32, help="Tokens of a text.")
@option("--temperature", type=float, default=1.0)
@option("--experts", type=click.IntRange(min=2), default=16, help="Experts of a layer, upcycled.")
@option("--chosen", type=click.IntRange(min=1), default=2, help="Experts that a row uses.")
@option(
    "--share",
    "shares",
    type=click.FloatRange(0.0, 0.95),
    multiple=True,
    default=(0.55, 0.85),
    help="Share of experts in the time of a pass over one row; can be repeated.",
)
@options("json")
def expert_trees(
    target: Path | None,
    draft: Path,
    prompts: Path,
    limit: int,
    max_tokens: int,
    temperature: float,
    experts: int,
    chosen: int,
    shares: tuple[float, ...],
    as_json: bool,
) -> None:
    """Trees that know the experts of each node, by token or exactly, over goodput.

    Ratios are of tokens per second at equal prices, with the 95 % interval of a bootstrap over
    texts; rates and tables are fitted to the first half of the texts, and figures are of the
    second. There are two controls: experts at random, and experts that depend on the token id
    alone.
    """
    if chosen > experts:
        raise UserError(f"--chosen {chosen}: a layer has {experts} experts; choose at most as many")
    pin(1)
    mixture = upcycled(experts, chosen) if target is None else loaded(target)
    count, _ = count_experts(mixture.config.to_dict())
    codec = TextCodec(*read_tokenizer(target or DEMO_FOLDER / "target"))
    asked = [codec.encode_turns(prompt.turns[:1]) for prompt in read_prompts(prompts)[:limit]]
    if len(asked) < 2:
        raise UserError(f"--prompts {prompts}: it has one prompt; two are needed")
    stop, sampling = set(codec.facts.end), Sampling(temperature=temperature)
    rounds = record(mixture, loaded(draft), asked, stop, max_tokens, sampling)
    calibrate(rounds, len(asked) // 2)
    routed = routings(rounds, count)
    rows = [
        {"routing": name, **row}
        for name, routing in routed.items()
        for share in shares
        for row in compared(rounds, routing, share, len(asked) // 2)
    ]
    result = {
        "added": {name: added(rounds, used) for name, used in routed.items()},
        "positions": len(rounds),
        "experts": count,
        "row": rounds[0].chosen.shape[2],
    }
    report({**result, "choices": rows}, as_json, lambda: show(result, rows))


# -- the models ------------------------------------------------------------------------------------


def loaded(folder: Path) -> Any:
    """Return transformers' model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def upcycled(experts: int, chosen: int) -> Any:
    """Return the embedded target as a mixture (Komatsuzaki et al. 2023): experts are perturbed
    copies of its MLPs, the router is random, without the direction that all states share."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    dense = loaded(DEMO_FOLDER / "target")
    config = json.loads(dense.config.to_json_string())
    config.pop("model_type")
    mixture = MixtralForCausalLM(
        MixtralConfig(**config, num_local_experts=experts, num_experts_per_tok=chosen)
    )
    mixture.load_state_dict(dense.state_dict(), strict=False)
    means: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, given: means.append(given[0][0].mean(0)))
        for layer in dense.model.layers
    ]
    with torch.inference_mode():
        dense(torch.randint(2, config["vocab_size"], (1, 256)))
    for hook in hooks:
        hook.remove()
    for old, new, mean in zip(dense.model.layers, mixture.model.layers, means, strict=True):
        own = old.mlp
        up = torch.cat((own.gate_proj.weight, own.up_proj.weight))
        for stack, weight in (
            (new.mlp.experts.gate_up_proj, up),
            (new.mlp.experts.down_proj, own.down_proj.weight),
        ):
            noise = torch.randn_like(stack) * PERTURBED * weight.std()
            stack.data.copy_(weight.detach() + noise)
        router = torch.randn_like(new.mlp.gate.weight) / mean.norm()
        along = (router @ mean)[:, None] * mean / mean.square().sum()
        new.mlp.gate.weight.data.copy_(router - along)
    return mixture.eval()


def forward(model: Any, before: Sequence[int], paths: Sequence[Nodes]) -> tuple[Tensor, list[int]]:
    """Return the logits [N, V] after each of `paths` behind `before`, and their rows in the
    pass."""
    nodes = sorted({path[:n] for path in paths for n in range(1, len(path) + 1)}, key=len)
    start, size = len(before), len(before) + len(nodes)
    rows = {(): start - 1, **{path: start + place for place, path in enumerate(nodes)}}
    seen = torch.ones(size, size).tril().bool()
    for path in nodes:
        seen[rows[path]] = seen[rows[path[:-1]]]
        seen[rows[path], rows[path]] = True
    mask = torch.zeros(size, size).masked_fill(~seen, torch.finfo(torch.float32).min)
    places = [*range(start), *(start - 1 + len(path) for path in nodes)]
    found = model(
        input_ids=torch.tensor([[*before, *(path[-1] for path in nodes)]]),
        attention_mask=mask[None, None],
        position_ids=torch.tensor([places]),
        use_cache=False,
    )
    wanted = [rows[path] for path in paths]
    return found.logits[0, wanted], wanted


def watched(model: Any) -> list[Tensor]:
    """Return a list to which each pass of the model adds the experts [rows, k] of each layer."""
    found: list[Tensor] = []

    def look(_: object, __: object, given: object) -> None:
        if isinstance(given, tuple):
            found.extend(one for one in given if not one.is_floating_point() and one.ndim == 2)

    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_hook(look)
    return found


@torch.inference_mode()
def record(
    mixture: Any,
    draft: Any,
    asked: Sequence[Sequence[int]],
    stop: Container[int],
    most: int,
    sampling: Sampling,
) -> list[Round]:
    """Return a tree at every position of the mixture's own replies to `asked`; they end at a token
    of `stop`."""
    settings, shape = TreeSettings(policy="goodput"), Shape(NODES, DEPTH, WIDTH)
    found, rounds, size = watched(mixture), list[Round](), mixture.config.vocab_size
    with progress_bar(len(asked) * most, "positions") as step:
        for text, prompt in enumerate(asked):
            before, start = [*prompt], len(prompt)
            chooser = Chooser(prompt, sampling, b"%016d" % text, size)
            while len(before) < start + most + DEPTH and before[-1] not in stop:
                if len(before) >= start + most:  # the paths of the last trees go on
                    before.append(chooser.choice(forward(mixture, before, [()])[0], ()))
                    chooser.commit(before[-1:])
                    continue
                step("")
                tree, policy = GrowingTree(), open_policy(settings)
                for nodes in policy.passes(tree, shape):
                    paths = [(*tree.path_tokens(node),) for node in nodes.tolist()]
                    z, noise = chooser.process(forward(draft, before, paths)[0], paths)
                    if nodes[0] != ROOT:
                        tree.give_rows(nodes)
                    tree.add_children(nodes, *likeliest(z, WIDTH, noise=noise))
                offered = policy.select(tree, shape)
                sent = tree.token_tree(offered)
                paths = [(), *((*tree.path_tokens(node),) for node in offered.tolist())]
                found.clear()
                logits, rows = forward(mixture, before, paths)
                if not found:
                    raise UserError("--target: it has no experts, or transformers shows no routing")
                rounds.append(
                    Round(
                        text,
                        [before[-1], *sent.tokens],
                        [-1, *(parent + 1 for parent in sent.parents)],
                        [0, *tree.levels[offered].tolist()],
                        [0, *tree.ranks[offered].tolist()],
                        [0.0, *tree.gains[offered].tolist()],
                        torch.stack(found, 1)[rows].numpy(),
                    )
                )
                token = chooser.choice(logits[:1], ())
                chooser.commit([token])
                before.append(token)
            reply = before[start:]
            for place, one in enumerate(rounds[-min(len(reply), most) :]):
                for row, parent in enumerate(one.parents):
                    level = one.levels[row]
                    there = reply[place + level - 1 : place + level] == [one.tokens[row]]
                    one.right.append(not row or (one.right[parent] and there))
    return rounds


def calibrate(rounds: Sequence[Round], half: int) -> None:
    """Give rows their path probabilities: frequencies by rank and score in the first texts."""
    outcomes = defaultdict[tuple[int, int], list[int]](lambda: [0, 0])
    for one in rounds:
        for row in range(1, len(one.tokens)) if one.text < half else ():
            if one.right[one.parents[row]]:
                known = outcomes[one.ranks[row], int(-2.0 * one.gains[row])]
                known[0], known[1] = known[0] + one.right[row], known[1] + 1
    for one in rounds:
        one.chances.append(1.0)
        for row in range(1, len(one.tokens)):
            hits, seen = outcomes[one.ranks[row], int(-2.0 * one.gains[row])]
            chance = (hits + PRIOR * np.exp(one.gains[row])) / (seen + PRIOR)
            one.chances.append(one.chances[one.parents[row]] * float(chance))


# -- choices of nodes ------------------------------------------------------------------------------


def routings(rounds: Sequence[Round], count: int) -> dict[str, list[Bits]]:
    """Return the experts of the rows of each round, as [rows, layers x experts] of 0 and 1: as
    recorded, by token alone, and at random."""
    _, layers, chosen = rounds[0].chosen.shape
    drawn = np.random.default_rng(1)

    def bits(places: NDArray[np.int64]) -> Bits:
        found = np.zeros((len(places), layers, count), np.float32)
        np.put_along_axis(found, places[..., :chosen], 1.0, 2)
        return found.reshape(len(places), -1)

    return {
        "recorded": [bits(one.chosen) for one in rounds],
        "by token": [
            bits(
                np.stack(
                    [np.random.default_rng(token).random((layers, count)) for token in one.tokens]
                ).argsort(2)
            )
            for one in rounds
        ],
        "random": [
            bits(drawn.random((len(one.tokens), layers, count)).argsort(2)) for one in rounds
        ],
    }


def added(rounds: Sequence[Round], routing: Sequence[Bits]) -> tuple[float, float]:
    """Return mean and standard deviation of the experts that the likeliest node adds to the root's,
    as a share of those of one row."""
    shares = [
        float(used[best_first(one)[0]] @ (1.0 - used[0])) / float(used[0].sum())
        for one, used in zip(rounds, routing, strict=True)
    ]
    return float(np.mean(shares)), float(np.std(shares))


Choice = Callable[[Round, Bits, float], list[int]]
"""A round, the experts of its rows and tokens/s -> the rows that are verified besides the root."""


def compared(
    rounds: Sequence[Round], routing: Sequence[Bits], share: float, half: int
) -> list[dict[str, Any]]:
    """Return each choice's tokens a second in the second half of the texts, over goodput's."""
    both = [*zip(rounds, routing, strict=True)]
    first = [pair for pair in both if pair[0].text < half]
    row = float(routing[0][0].sum())
    price, usual = share / row, np.concatenate([used for _, used in first]).mean(0)
    unions, known = defaultdict[int, list[float]](list), defaultdict[int, list[Bits]](list)
    for one, used in first:
        ordered = used[[0, *best_first(one)]]
        for rows, union in enumerate(np.maximum.accumulate(ordered).sum(1), 1):
            unions[rows].append(union)
        for token, its in zip(one.tokens, used, strict=True):
            known[token].append(its)
    means = {rows: float(np.mean(its)) for rows, its in unions.items()}
    table = {token: (sum(its) + usual) / (len(its) + 1) for token, its in known.items()}

    def likeliest_rows(one: Round, rate: float, experts: Callable[[int], float]) -> list[int]:
        order = best_first(one)
        offers = [[log(one.chances[row]) for row in order]]
        most = cut(offers, rate=rate, seconds=lambda rows: price * experts(rows) + ROW * rows)
        return order[: most[0]]

    choices: dict[str, Choice] = {
        "rows alone": lambda one, _, rate: likeliest_rows(one, rate, lambda rows: row),
        "goodput": lambda one, _, rate: likeliest_rows(
            one, rate, lambda rows: means.get(rows, row * rows)
        ),
        "table by token": lambda one, _, rate: marginal(
            one, np.stack([table.get(token, usual) for token in one.tokens]), rate, price
        ),
        "exact": lambda one, used, rate: marginal(one, used, rate, price),
    }
    found = {}
    for name, choice in choices.items():
        rate = 1.0
        for _ in range(RATES):
            tokens, seconds, _ = np.sum(run(choice, first, rate, share, price), axis=0)
            rate = tokens / seconds
        found[name] = run(choice, both[len(first) :], rate, share, price)
    return [
        {
            "share": share,
            "choice": name,
            "rows": sum(rows for *_, rows in sums) / (len(both) - len(first)),
            "rate": sum(tokens for tokens, *_ in sums) / sum(seconds for _, seconds, _ in sums),
            "ratio": ratio_of_sums(
                [its[:2] for its in sums], [its[:2] for its in found["goodput"]]
            ).as_json(),
        }
        for name, sums in found.items()
    ]


def run(
    choice: Choice, rounds: Sequence[tuple[Round, Bits]], rate: float, share: float, price: float
) -> list[tuple[float, float, float]]:
    """Return (tokens, passes over one row that they take, rows) of each text."""
    texts = defaultdict[int, list[float]](lambda: [0.0, 0.0, 0.0])
    for one, used in rounds:
        rows = [0, *choice(one, used, rate)]
        found = texts[one.text]
        found[0] += sum(one.right[row] for row in rows)
        found[1] += 1.0 - share - ROW + price * float(used[rows].max(0).sum())
        found[1] += ROW * len(rows) + ROUND
        found[2] += len(rows)
    return [(tokens, seconds, rows) for tokens, seconds, rows in texts.values()]


def best_first(one: Round) -> list[int]:
    """Return the rows besides the root, the likeliest first, parents before children."""
    return sorted(range(1, len(one.tokens)), key=lambda row: (-one.chances[row], row))


def marginal(one: Round, used: Bits, rate: float, price: float) -> list[int]:
    """Return the rows besides the root that are worth their experts: the best prefix, either of the
    likeliest rows or of those with the most tokens over the price of the experts that they add."""
    likely, best, most = best_first(one), list[int](), 0.0
    for greedy in (False, True):
        waiting, taken, missed, worth = [*likely], list[int](), 1.0 - used[0], 0.0
        while waiting:
            costs = ROW + price * (used @ missed)
            below = [row for row in waiting if one.parents[row] in (0, *taken)]
            row = max(below, key=lambda row: one.chances[row] / costs[row]) if greedy else below[0]
            waiting.remove(row)
            taken.append(row)
            worth += one.chances[row] - rate * float(costs[row])
            missed = missed * (1.0 - used[row])
            if worth > most:
                most, best = worth, [*taken]
    return best


def show(result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    click.echo(
        f"{result['positions']} positions; a row uses {result['row']} of {result['experts']} "
        "experts a layer; a pass over one row takes 1 s, and the target alone makes 1 token/s"
    )
    for name, (mean, spread) in result["added"].items():
        click.echo(f"{name}: a second row adds {mean:.2f} (sd {spread:.2f}) of a row's experts")
    names = ("routing", "share", "choice", "rows", "tokens/s", "over goodput (95 %)")
    cells = [
        (
            *(row[name] for name in ("routing", "share", "choice")),
            f"{row['rows']:.1f}",
            f"{row['rate']:.3f}",
            "{median:.3f} ({low:.3f}-{high:.3f})".format(**row["ratio"]),
        )
        for row in rows
    ]
    print_table(names, cells)
