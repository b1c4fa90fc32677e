"""The card of a trained head, the log of its training and the pictures of its curves. Writes text;
reads and trains nothing."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.launch.files.charts import Curve, draw
from dovetail.workers.training.recipes import recipe_of

if TYPE_CHECKING:
    from dovetail.workers.training.data.features import Features
    from dovetail.workers.training.data.states import Origin
    from dovetail.workers.training.trainer import Trained

CARD = """# {title}

Trained by `dovetail train {kind}` for the target

- {target}
- checkpoint digest `{digest}`

`dovetail generate --target TARGET --draft THIS_FOLDER "..."` drafts with it. Embedding{and_head} of the target are not in here: they are taken from it.

| | |
| --- | --- |
| parameters | {parameters:,} |
| shape | {shape} |
| data | {data_tokens:,} tokens in {sequences:,} sequences, of which {held:,} tokens were held out |
| training | {steps:,} steps of {columns:,} tokens, {tokens:,} tokens in {minutes:.1f} minutes |
| rate, decay, weight decay, clipping | {rate:g}, {decay}, {weight_decay:g}, {clip:g} |
| losses | {losses} |
| seed | {seed} |

Measured on the held-out sequences by simulation: chains of the {depth} most likely tokens, drafted from every position on the head's own output, against what
the target takes at temperature 0.

| | |
| --- | --- |
| tokens a round, the target's own included | **{tau:.2f}** |
| accepted at depth {depths}, of those that got so far | {at} |
{more}
![Loss](loss.svg)
![Acceptance](acceptance.svg)

`training.json` has every measurement and all settings.
"""  # noqa: E501


def card(kind: str, what: str, features: "Features", trained: "Trained") -> str:
    plan, last, shape = trained.plan, trained.checks[-1], trained.head.shape
    return CARD.format(
        title=what[0].upper() + what[1:].split(":")[0],
        kind=kind,
        target=public_name(features.origin.target),
        digest=features.origin.digest,
        and_head="" if trained.head.own_output else " and output head",
        parameters=trained.outcome.parameters,
        shape=_shape(trained),
        data_tokens=features.tokens,
        sequences=features.count,
        held=trained.tokens_held,
        steps=trained.outcome.steps,
        columns=plan.batch * plan.length,
        tokens=trained.outcome.tokens,
        minutes=trained.outcome.minutes,
        rate=plan.pace.rate,
        decay=plan.pace.decay,
        weight_decay=plan.pace.weight_decay,
        clip=plan.pace.clip,
        losses=_losses(trained),
        seed=plan.pace.seed,
        depth=len(last.at),
        tau=last.length,
        depths=", ".join(str(depth + 1) for depth in range(len(last.at))),
        at=", ".join(f"{share:.1%}" for share in last.at),
        more=_more(trained, shape.vocabulary),
    )


def public_name(target: str) -> str:
    """Return the name of a target on a card: a hub id as it is, a folder by its name without the
    path, which is private."""
    if Path(target).is_dir():
        return f"the model in a folder called {Path(target).resolve().name}"
    return target


def _shape(trained: "Trained") -> str:
    shape = trained.head.shape
    parts = [
        f"hidden {shape.hidden}",
        f"MLP {shape.intermediate}",
        f"{shape.heads} heads, {shape.kv_heads} of keys and values",
        f"{shape.blocks} block(s)",
    ]
    return "; ".join([*parts, *recipe_of(shape.kind).shape_words(shape)])


def _losses(trained: "Trained") -> str:
    recipe, shape = trained.plan.recipe, trained.head.shape
    parts = [
        f"{recipe.feature:g} SmoothL1 of the features",
        f"{recipe.cross_entropy:g} soft cross entropy",
        f"noise {recipe.noise:g}",
    ]
    parts += recipe_of(shape.kind).loss_words(shape, recipe)
    alone = trained.plan.alone if recipe.steps > 1 else 0.0
    first = (
        f" (one for the first {alone:.0%} of the run: hence the jump of the loss)" if alone else ""
    )
    parts.append(
        f"{recipe.steps} training-time step(s){first}, each {recipe.decay:g} of the one before"
    )
    return "; ".join(parts)


def _more(trained: "Trained", vocabulary: int) -> str:
    lines = []
    if trained.checks[-1].contrast is not None:
        lines.append(
            f"| accepted at depth 2 from the contrast | {trained.checks[-1].contrast:.1%} |\n"
        )
    if trained.draft_coverage is not None and trained.head.shape.own_vocabulary < vocabulary:
        lines.append(f"| tokens of the data that it can propose | {trained.draft_coverage:.2%} |\n")
    return "".join(lines)


def log_of(kind: str, origin: "Origin", trained: "Trained") -> dict[str, Any]:
    return {
        "kind": kind,
        "origin": {**asdict(origin), "target": public_name(origin.target)},
        "shape": asdict(trained.head.shape),
        "plan": asdict(trained.plan),
        "outcome": asdict(trained.outcome),
        "checks": [asdict(check) for check in trained.checks],
    }


def curves(trained: "Trained") -> Mapping[str, str]:
    checks = trained.checks
    shares = [
        Curve(
            f"depth {depth + 1}", [(check.steps, check.at[depth]) for check in checks], dashed=True
        )
        for depth in range(min(3, len(checks[0].at)))
    ]
    return {
        "loss.svg": draw(
            "Loss of the training",
            "steps",
            "loss",
            [Curve("loss", [(check.steps, check.loss) for check in checks])],
        ),
        "acceptance.svg": draw(
            "Simulated acceptance on held-out text",
            "steps",
            "tokens a round; share accepted",
            [Curve("tau", [(c.steps, c.length) for c in checks]), *shares],
        ),
    }
