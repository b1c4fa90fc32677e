"""The training of a draft head: features, shape, plan, and the resulting folder."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dovetail.launch.console.terminal import counted, note
from dovetail.launch.files.charts import Curve, check_charts, draw
from dovetail.launch.settings.models import DEMO_FOLDER, keeps_blocks
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.training.recipes import TRAINED, draft_vocabulary, recipe_of

if TYPE_CHECKING:
    from dovetail.workers.training.data.chats import Renderer
    from dovetail.workers.training.data.examples import Examples
    from dovetail.workers.training.data.features import Features
    from dovetail.workers.training.data.states import Origin
    from dovetail.workers.training.heads.trainable import HeadShape, TrainableDraft
    from dovetail.workers.training.plan import Plan
    from dovetail.workers.training.process_group import ProcessGroup
    from dovetail.workers.training.regenerate import Outcome
    from dovetail.workers.training.run import Progress
    from dovetail.workers.training.target_parts import TargetParts
    from dovetail.workers.training.trainer import Trained
    from dovetail.workers.training.workplace import Workplace


TEXTS = ("README.md", "training.json", "loss.svg", "acceptance.svg")
"""Files of a head's folder that are not needed for drafting."""
NEW = ("target", "random")  # what a head begins with unless it continues another one


@dataclass(frozen=True)
class TrainingOptions:
    """The options on the command line; None: the preset's value."""

    kind: str
    out: Path
    own: Mapping[str, Any] = field(default_factory=dict)
    """The options specific to this kind, by field."""
    data: tuple[Path, ...] = ()
    features: tuple[Path, ...] = ()
    target: str | None = None
    regenerate: bool = False
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    preset: Literal["auto", "paper", "tiny"] = "auto"
    rate: float | None = None
    batch: int | None = None
    length: int | None = None
    ttt_steps: int | None = None
    ce_weight: float | None = None
    feature_weight: float | None = None
    noise: float | None = None
    warm_up: int | None = None
    number: Literal["fp32", "bf16"] | None = None
    intermediate: int | None = None
    draft_vocabulary: int | None = None
    store: Literal["fp16", "int8"] = "fp16"
    begin: str = "target"
    """target, random, or the folder of a trained head."""
    threads: int | None = None
    processes: int = 1

    def chosen(self, *, recipe: bool) -> dict[str, Any]:
        """Return {field: value} of the kind's own options, for the recipe of losses or else the
        head's shape."""
        options = [option for option in TRAINED[self.kind].options if bool(option.recipe) == recipe]
        return {o.recipe or o.field: self.own.get(o.field, o.default) for o in options}


def train_head(wish: TrainingOptions) -> "Trained | None":
    if bool(wish.features) == bool(wish.data):
        raise UserError("give either --data FILE, or --features DIR from `dovetail features`")
    if wish.regenerate and (not wish.data or wish.processes > 1):
        remedy = "otherwise use `dovetail features --regenerate`"
        raise UserError(f"--regenerate needs --data and a single process; {remedy}")
    check_charts("the card of a head, which has pictures,")
    from dovetail.workers.heads.files import classify
    from dovetail.workers.training.folder import workplace
    from dovetail.workers.training.process_group import ALONE, Accelerated
    from dovetail.workers.training.trainer import use_threads

    if wish.begin not in NEW and (
        not (Path(wish.begin) / "config.json").is_file() or classify(wish.begin) != wish.kind
    ):
        raise UserError(
            f"--begin {wish.begin} is neither target, nor random, nor the folder of a head of the "
            f"kind {wish.kind}"
        )
    if wish.threads is not None:
        use_threads(wish.threads)
    peers = Accelerated() if wish.processes > 1 else ALONE
    place = workplace(wish.out, wish.kind, TEXTS)
    with nullcontext() if peers.rank else place.hold():
        return _train(wish, place, peers)


def _train(wish: TrainingOptions, place: "Workplace", peers: "ProcessGroup") -> "Trained | None":
    from dovetail.workers.heads.files import open_files
    from dovetail.workers.heads.reduced.rows import COUNTS
    from dovetail.workers.training.folder import check_begun, config_of, read_weights, write_head
    from dovetail.workers.training.heads.trainable import STREAM
    from dovetail.workers.training.run import silent
    from dovetail.workers.training.target_parts import read_target
    from dovetail.workers.training.trainer import train_head as train

    features, name = _features(wish, peers)
    target = read_target(name)
    origin = features.origin
    if origin.digest != target.digest:
        other = f"{origin.target} (checkpoint {origin.digest[:12]})"
        raise UserError(f"the features are of {other}, not of {name} ({target.digest[:12]})")
    shape, plan = _shape(wish, features, target), _plan(wish, target, peers)
    about: dict[str, Any] = {"target": target.digest, "data": features.digest}
    begun = None if wish.begin in NEW else open_files(wish.begin, allow_bin=False)
    config = config_of(shape, trained_for=target.digest, taps=features.origin.taps)
    about |= {"taps": features.origin.taps, "begin": begun.digest if begun else wish.begin}

    def prepare(head: "TrainableDraft") -> None:
        if begun is not None:
            read_weights(head, begun)
            check_begun(begun, config, target)
        elif wish.begin == "target":
            head.begin_with(target, features.stream() or STREAM)

    with show_progress() as show:
        trained = train(
            shape,
            features,
            target.frozen,
            plan,
            prepare=prepare,
            checkpoint=place.checkpoint,
            about=about,
            peers=peers,
            progress=silent if peers.rank else show,
        )
    if peers.rank:
        return None
    log = log_of(wish.kind, features.origin, trained)
    texts = {
        "README.md": card(wish.kind, TRAINED[wish.kind].what, features, trained),
        "training.json": json.dumps(log, indent=2) + "\n",
        **curves(trained),
    }
    if trained.head.known is None:
        texts[COUNTS] = json.dumps({"counts": trained.counts.tolist()}) + "\n"
    with place.result() as folder:
        write_head(folder, trained.head, config, texts, target.frozen, store=wish.store)
    return trained


def _features(wish: TrainingOptions, peers: "ProcessGroup") -> "tuple[Features, str]":
    from dovetail.workers.training.data.corpus import open_reader, read_examples
    from dovetail.workers.training.data.features import online_features, open_features
    from dovetail.workers.training.data.states import open_states
    from dovetail.workers.training.regenerate import Writing, regenerate_files

    if wish.features:
        stored = open_features(wish.features)
        return stored, wish.target or stored.origin.target
    target = wish.target or str(DEMO_FOLDER / "target")
    reader, files = open_reader(target), wish.data
    if not peers.rank:
        note_template(reader.renderer, target, files)
    if wish.regenerate:
        files = (wish.out.with_name(wish.out.name + ".answers.jsonl"),)
        writing = Writing(seed=wish.seed)
        with show_progress() as show:
            written = regenerate_files(
                *(wish.data, target, reader.renderer, files[0], writing),
                weights=weights_of(target),
                progress=show,
            )
        note_answers(files[0], written)
    examples = read_examples(files, reader)
    if not peers.rank:
        note_examples(examples)
    taps = "auto" if recipe_of(wish.kind).trainable.reads_taps else "none"
    return online_features(
        examples, open_states(target, taps=taps, weights=weights_of(target))
    ), target


def note_template(renderer: "Renderer", target: object, files: Sequence[Path]) -> None:
    if renderer.is_plain and any(file.suffix != ".bin" for file in files):
        note(f"{target} has no chat template: messages become plain lines")


def note_answers(file: Path, written: "Outcome") -> None:
    note(f"{file}: {written.chats:,} chats answered")
    note_left_out(written.left_out)


def note_examples(examples: "Examples") -> None:
    note(
        f"{len(examples.rows):,} sequences, {examples.tokens:,} tokens, of which "
        f"{examples.learned:,} are learned"
    )
    longer = {"cut, since they were longer": examples.cut} if examples.cut else {}
    note_left_out({**longer, **examples.left_out})


def note_left_out(left_out: Mapping[str, int]) -> None:
    for reason, count in left_out.items():
        note(f"{count:,} {reason}")


def weights_of(target: str, device: str = "cpu") -> str:
    """Return the default type of a target's weights: the blocks of a GGUF file, as when it is
    served, else fp32."""
    settings = TargetSettings(model=str(find_folder(target)))
    return FILE if device == "cpu" and keeps_blocks(settings) else "fp32"


def _shape(wish: TrainingOptions, features: "Features", target: "TargetParts") -> "HeadShape":
    from dovetail.workers.training.folder import shape_for

    own, origin = wish.chosen(recipe=False), features.origin
    vocabulary = origin.vocabulary_size
    kind = recipe_of(wish.kind)
    if not kind.layer_of_target:
        own["draft_vocabulary"] = draft_vocabulary(wish.draft_vocabulary, vocabulary)
    elif wish.draft_vocabulary is not None or wish.intermediate is not None:
        raise UserError(
            f"{TRAINED[wish.kind].what.split(':')[0]} has the MLP and the vocabulary of its "
            "target: leave out --intermediate and --draft-vocabulary (--draft.head_rows reduces "
            "its output head)"
        )
    choices = kind.choices(own, taps=origin.taps)
    sizes: dict[str, Any] = {"context": origin.context, "intermediate": wish.intermediate}
    return shape_for(wish.kind, target, **sizes, **choices)


def _plan(wish: TrainingOptions, target: "TargetParts", peers: "ProcessGroup") -> "Plan":
    from dovetail.workers.training.recipes import plan_for
    from dovetail.workers.training.trainer import faster_number

    preset = None if wish.preset == "auto" else wish.preset
    plan = plan_for(wish.kind, target.frozen.embedding.shape[1], preset)
    own = _given(device=peers.device, minutes=wish.minutes, rate=wish.rate, warm_up=wish.warm_up)
    pace = replace(plan.pace, seed=wish.seed, steps=wish.steps, **own)
    weights = {
        "feature": wish.feature_weight,
        "cross_entropy": wish.ce_weight,
        "steps": wish.ttt_steps,
        "noise": wish.noise,
        **wish.chosen(recipe=True),
    }
    number = wish.number or faster_number(pace.device)
    recipe = replace(plan.recipe, **_given(**weights))
    sizes = _given(batch=wish.batch, length=wish.length)
    alone = plan.alone if wish.begin in NEW else 0.0
    return replace(plan, pace=pace, recipe=recipe, number=number, alone=alone, **sizes)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


CARD = """# {title}

Trained by `dovetail train {kind}` for the target

- {target}
- checkpoint digest `{digest}`

`dovetail generate --target TARGET --draft THIS_FOLDER "..."` drafts with it. Not included but taken
from the target: embedding{and_head}.

| | |
| --- | --- |
| parameters | {parameters:,} |
| shape | {shape} |
| data | {data_tokens:,} tokens in {sequences:,} sequences, of which {held:,} tokens were held out |
| training | {steps:,} steps of {columns:,} tokens, {tokens:,} tokens in {minutes:.1f} minutes |
| rate, decay, weight decay, clipping | {rate:g}, {decay}, {weight_decay:g}, {clip:g} |
| losses | {losses} |
| seed | {seed} |

Measured on the held-out sequences by simulation: chains of the {depth} most likely tokens, drafted
from every position on the head's own output, against the target's choices at temperature 0.

| | |
| --- | --- |
| tokens per round, including the target's own | **{tau:.2f}** |
| accepted at depth {depths}, of those that reached it | {at} |
{more}
![Loss](loss.svg)
![Acceptance](acceptance.svg)

`training.json` has every measurement and all settings.
"""


def card(kind: str, what: str, features: "Features", trained: "Trained") -> str:
    plan, last, shape = trained.plan, trained.checks[-1], trained.head.shape
    reduced = shape.own_vocabulary < shape.vocabulary
    return CARD.format(
        title=what[0].upper() + what[1:].split(":")[0],
        kind=kind,
        target=public_name(features.origin.target),
        digest=features.origin.digest,
        and_head="" if trained.head.own_output or reduced else " and output head",
        parameters=trained.outcome.parameters,
        shape=_shape_in_words(trained),
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
    """Return the name of a target on a card: a hub id, or the name of a folder without its path,
    which is private."""
    if Path(target).is_dir():
        return f"the model in a folder called {Path(target).resolve().name}"
    if Path(target).is_file():
        return f"the model in a file called {Path(target).name}"
    return target


def _shape_in_words(trained: "Trained") -> str:
    shape = trained.head.shape
    heads = f"{shape.heads} heads, {shape.kv_heads} of keys and values"
    sizes = (f"hidden {shape.hidden}", f"MLP {shape.intermediate}", heads)
    words = recipe_of(shape.kind).shape_words(shape)
    if shape.own_vocabulary < shape.vocabulary:
        words.append(f"{shape.own_vocabulary:,} of {shape.vocabulary:,} tokens")
    return "; ".join([*sizes, f"{shape.blocks} block(s)", *words])


def _losses(trained: "Trained") -> str:
    recipe, shape = trained.plan.recipe, trained.head.shape
    if not TRAINED[shape.kind].in_steps:
        return f"soft cross entropy, each level {recipe.decay:g} of the one before"
    parts = [
        f"{recipe.feature:g} SmoothL1 of the features",
        f"{recipe.cross_entropy:g} soft cross entropy",
        f"noise {recipe.noise:g}",
    ]
    parts += recipe_of(shape.kind).loss_words(shape, recipe)
    alone = trained.plan.alone if recipe.steps > 1 else 0.0
    jump = f" (one for the first {alone:.0%} of the run: hence the jump of the loss)"
    each = f"each {recipe.decay:g} of the one before"
    parts.append(f"{recipe.steps} training-time step(s){jump if alone else ''}, {each}")
    return "; ".join(parts)


def _more(trained: "Trained", vocabulary: int) -> str:
    lines = ""
    if (share := trained.checks[-1].contrast) is not None:
        lines += f"| accepted at depth 2 from the contrast | {share:.1%} |\n"
    if trained.head.shape.own_vocabulary < vocabulary:
        lines += f"| tokens of the data that it can propose | {trained.draft_coverage:.2%} |\n"
    return lines


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
    loss = Curve("loss", [(check.steps, check.loss) for check in checks])
    found = [Curve("tau", [(check.steps, check.length) for check in checks])]
    for depth in range(min(3, len(checks[0].at))):
        shares = [(check.steps, check.at[depth]) for check in checks]
        found.append(Curve(f"depth {depth + 1}", shares, dashed=True))
    title, up = "Simulated acceptance on held-out text", "tokens per round; share accepted"
    return {
        "loss.svg": draw("Loss of the training", "steps", "loss", [loss]),
        "acceptance.svg": draw(title, "steps", up, found),
    }


PLAIN_LINE_EVERY_S = 60.0


def tell(result: Mapping[str, Any], line: str, *, as_json: bool) -> None:
    click.echo(json.dumps(result) if as_json else line)


@contextlib.contextmanager
def show_progress() -> "Iterator[Callable[[Progress], None]]":
    """A bar on a terminal; elsewhere a plain line from time to time."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    doing, held = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (doing, BarColumn(), TaskProgressColumn(), held, TimeRemainingColumn())
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def show(at: "Progress") -> None:
            if at.stage not in tasks:
                tasks[at.stage] = bars.add_task(at.stage, total=1.0, note="")
            bars.update(tasks[at.stage], completed=at.done, note=_note(at))

        yield show


def _plain_lines() -> "Callable[[Progress], None]":
    last, begun = -PLAIN_LINE_EVERY_S, dict[str, "Progress"]()

    def show(at: "Progress") -> None:
        nonlocal last
        first = begun.setdefault(at.stage, at)  # of this process: the run may have been resumed
        if at.done >= 1 or time.monotonic() - last >= PLAIN_LINE_EVERY_S:
            last, done = time.monotonic(), at.done - first.done
            left = (at.spent_s - first.spent_s) * (1 - at.done) / done / 60 if done else 0.0
            time_left = f", {counted(round(left), 'minute')} left" if left >= 1 else ""
            click.echo(f"{at.stage} {at.done:.0%}: {_note(at)}{time_left}", err=True)

    return show


def _note(at: "Progress") -> str:
    loss = "" if at.loss != at.loss else f", loss {at.loss:.3f}"
    speed = f", {at.tokens / at.spent_s:,.0f}/s" if at.spent_s else ""
    return f"{at.tokens:,} tokens{speed}{loss}{', ' if at.note else ''}{at.note}"
