"""The training of a draft head: features, shape, plan, and the folder that comes of it."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.launch.files.charts import check_charts
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.launch.training.card import card, curves, log_of
from dovetail.launch.training.progress import show_progress
from dovetail.protocol.errors import UserError
from dovetail.workers.training.recipes import TRAINED, recipe_of

if TYPE_CHECKING:
    from dovetail.workers.training.data.features import Features
    from dovetail.workers.training.heads.trainable import HeadShape, TrainableHead
    from dovetail.workers.training.plan import Plan
    from dovetail.workers.training.process_group import ProcessGroup
    from dovetail.workers.training.target_parts import TargetParts
    from dovetail.workers.training.trainer import Trained
    from dovetail.workers.training.workplace import Workplace


TEXTS = ("README.md", "training.json", "loss.svg", "acceptance.svg")
"""Files of a head's folder that a draft does not load."""


@dataclass(frozen=True)
class Wish:
    """The options on the command line; None: the preset's value."""

    kind: str
    out: Path
    own: Mapping[str, Any] = field(default_factory=dict)
    """The options that only this kind has, by their fields."""
    data: tuple[Path, ...] = ()
    features: Path | None = None
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
    begin: Literal["target", "random"] = "target"
    threads: int | None = None
    processes: int = 1

    def chosen(self, *, recipe: bool) -> dict[str, Any]:
        """Return the own options of the kind, by the fields that they set: of the losses' recipe,
        or of the head's shape."""
        options = [option for option in TRAINED[self.kind].options if bool(option.recipe) == recipe]
        return {o.recipe or o.field: self.own.get(o.field, o.default) for o in options}


def train_head(wish: Wish) -> "Trained | None":
    if (wish.features is None) == (not wish.data):
        raise UserError("give either --data FILE, or --features DIR from `dovetail features`")
    if wish.regenerate and not wish.data:
        raise UserError(
            "--regenerate needs --data; for --features use `dovetail features --regenerate`"
        )
    check_charts("the card of a head, which has pictures,")
    from dovetail.workers.training.folder import workplace
    from dovetail.workers.training.process_group import ALONE, Accelerated
    from dovetail.workers.training.trainer import use_threads

    if wish.threads is not None:
        use_threads(wish.threads)
    peers = Accelerated() if wish.processes > 1 else ALONE
    place = workplace(wish.out, wish.kind, TEXTS)
    with nullcontext() if peers.rank else place.hold():
        return _train(wish, place, peers)


def _train(wish: Wish, place: "Workplace", peers: "ProcessGroup") -> "Trained | None":
    from dovetail.workers.training.folder import config_of, write_head
    from dovetail.workers.training.run import silent
    from dovetail.workers.training.target_parts import read_target
    from dovetail.workers.training.trainer import train_head as train

    features, name = _features(wish)
    target = read_target(name)
    origin = features.origin
    if origin.digest != target.digest:
        raise UserError(
            f"the features are of {origin.target} (checkpoint {origin.digest[:12]}), not of {name} "
            f"({target.digest[:12]})"
        )
    shape, plan = _shape(wish, features, target), _plan(wish, target, peers)
    about = {
        "target": target.digest,
        "taps": features.origin.taps,
        "data": features.digest,
        "begin": wish.begin,
    }

    def prepare(head: "TrainableHead") -> None:
        if wish.begin == "target":
            head.begin_with(target)

    with show_progress() as show:
        told = silent if peers.rank else show
        trained = train(
            shape,
            features,
            target.frozen,
            plan,
            prepare=prepare,
            checkpoint=place.checkpoint,
            about=about,
            peers=peers,
            progress=told,
        )
    if peers.rank:
        return None
    log = log_of(wish.kind, features.origin, trained)
    texts = {
        "README.md": card(wish.kind, TRAINED[wish.kind].what, features, trained),
        "training.json": json.dumps(log, indent=2) + "\n",
        **curves(trained),
    }
    with place.result() as folder:
        write_head(
            folder,
            trained.head,
            config_of(shape, trained_for=target.digest, taps=features.origin.taps),
            texts,
        )
    return trained


def _features(wish: Wish) -> "tuple[Features, str]":
    from dovetail.workers.training.data.corpus import open_reader, read_examples
    from dovetail.workers.training.data.features import online_features, open_features
    from dovetail.workers.training.data.states import open_states
    from dovetail.workers.training.regenerate import Writing, regenerate_files

    if wish.features is not None:
        stored = open_features(wish.features)
        return stored, wish.target or stored.origin.target
    target = wish.target or str(DEMO_FOLDER / "target")
    reader, files = open_reader(target), wish.data
    if wish.regenerate:
        files = (wish.out.with_name(wish.out.name + ".answers.jsonl"),)
        with show_progress() as show:
            regenerate_files(
                wish.data, target, reader.renderer, files[0], Writing(seed=wish.seed), progress=show
            )
    examples = read_examples(files, reader)
    taps = "auto" if recipe_of(wish.kind).trainable.reads_taps else "none"
    return online_features(examples, open_states(target, taps=taps)), target


def _shape(wish: Wish, features: "Features", target: "TargetParts") -> "HeadShape":
    from dovetail.workers.training.folder import shape_for

    own = wish.chosen(recipe=False)
    choices = recipe_of(wish.kind).choices(
        own, taps=features.origin.taps, vocabulary_size=features.origin.vocabulary_size
    )
    return shape_for(
        wish.kind,
        target,
        context=features.origin.context,
        intermediate=wish.intermediate,
        **choices,
    )


def _plan(wish: Wish, target: "TargetParts", peers: "ProcessGroup") -> "Plan":
    from dovetail.workers.training.recipes import plan_for
    from dovetail.workers.training.trainer import faster_number

    plan = plan_for(
        wish.kind, target.frozen.embedding.shape[1], None if wish.preset == "auto" else wish.preset
    )
    pace = replace(
        plan.pace,
        seed=wish.seed,
        steps=wish.steps,
        **_given(device=peers.device, minutes=wish.minutes, rate=wish.rate, warm_up=wish.warm_up),
    )
    weights = {
        "feature": wish.feature_weight,
        "cross_entropy": wish.ce_weight,
        "steps": wish.ttt_steps,
        "noise": wish.noise,
        **wish.chosen(recipe=True),
    }
    number = wish.number or faster_number(pace.device)
    return replace(
        plan,
        pace=pace,
        recipe=replace(plan.recipe, **_given(**weights)),
        number=number,
        **_given(batch=wish.batch, length=wish.length),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
