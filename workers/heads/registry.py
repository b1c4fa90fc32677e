"""The table of head kinds: one entry a kind, found by the name that it has in the settings, in a
checkpoint, or in a config.json.

What a command line has to know of a kind stands here, since torch, which the kinds' own files need,
takes seconds to import. Such a file is opened by `load`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dovetail.protocol.settings import HEAD_KINDS
from dovetail.workers.heads.spec import EXPERTS, Shapes, plain_name

if TYPE_CHECKING:
    from dovetail.workers.heads.kind import HeadKind, TrainedKind


@dataclass(frozen=True)
class Figures:
    """The accepted lengths that a paper reports of a kind, at T = 0 on MT-bench."""

    tokens: tuple[float, ...]
    """The lengths of heads with 1, 2, ... blocks."""
    tree: tuple[str, int, int, int]
    """Policy, gamma, depth and width."""
    source: str
    """Paper, table and target; `{blocks}` stands for the number of blocks."""


@dataclass(frozen=True)
class Option:
    """An option of `dovetail train KIND` that only this kind has."""

    name: str
    help: str
    type: Literal["count", "flag", "weight"]
    least: int = 0
    most: int | None = None
    default: int | bool | None = None
    rare: bool = False
    """True if `--help` leaves it to `--help-all`."""
    recipe: str = ""
    """The field of the losses' `Recipe` that it sets; empty: it goes into the head's shape."""

    @property
    def field(self) -> str:
        """The name of the option as a Python name."""
        return self.name.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Entry:
    """A kind of head."""

    name: str
    load: "Callable[[], HeadKind]"
    """Import its file, and with it torch."""
    recognises: Callable[[Shapes], bool]
    """Tells whether tensors, by plain names, are those of a head of this kind."""
    title: str = ""
    """The name that its paper gives it; empty: a variant of another kind."""
    setting: str = ""
    """The name in `draft.kind`, if that differs."""
    what: str = ""
    """The words of `dovetail train` for it."""
    figures: Figures | None = None
    """Figures of its paper; None: a variant, which has those of the kind that it is one of."""
    options: tuple[Option, ...] = ()


SERVER, GPU = ("dynamic", 15, 8, 10), ("dynamic", 59, 8, 10)
"""The trees of the papers' figures: on servers' CPUs, and on GPUs."""


def _dovetail() -> "HeadKind":
    from dovetail.workers.heads.dovetail import DOVETAIL

    return DOVETAIL


def _eagle() -> "HeadKind":
    from dovetail.workers.heads.eagle import EAGLE

    return EAGLE


def _eagle3() -> "HeadKind":
    from dovetail.workers.heads.eagle3 import EAGLE3

    return EAGLE3


def _jakiro() -> "HeadKind":
    from dovetail.workers.heads.jakiro import JAKIRO

    return JAKIRO


def _jakiro_star() -> "HeadKind":
    from dovetail.workers.heads.jakiro import JAKIRO_STAR

    return JAKIRO_STAR


def _is_dovetail(shapes: Shapes) -> bool:
    return "W_z" in shapes


def _is_jakiro(shapes: Shapes) -> bool:
    return f"{EXPERTS}.gate.weight" in shapes


def _is_jakiro_star(shapes: Shapes) -> bool:
    return _is_jakiro(shapes) and f"{EXPERTS}.experts.0.fc.weight" in shapes


def _is_eagle3(shapes: Shapes) -> bool:
    own = ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    return any(name in shapes for name in own)


def _is_eagle(shapes: Shapes) -> bool:
    fusion = shapes.get("fc.weight", ())
    return (
        "layers.0.self_attn.q_proj.weight" in shapes
        and "layers.0.input_layernorm.weight" not in shapes
        and len(fusion) == 2
        and fusion[1] == 2 * fusion[0]
    )


ENTRIES = (
    Entry(
        "dovetail",
        _dovetail,
        _is_dovetail,
        title="Dovetail",
        what="a Dovetail head: gated fusion and one to six decoder layers",
        figures=Figures(
            (4.06, 4.31, 4.53, 4.62, 4.73, 4.83),
            SERVER,
            "Dovetail paper, Table 6, number of blocks {blocks}, Llama-2 7B",
        ),
        options=(
            Option("--blocks", "Decoder layers.", "count", least=1, most=6, default=1),
            Option(
                "--dgf-silu",
                "SiLU on the embedding's side (in the code, not in the paper).",
                "flag",
                default=True,
                rare=True,
            ),
            Option(
                "--dgf-embed-norm",
                "RMSNorm of the embedding (in the code, not in the paper).",
                "flag",
                default=True,
                rare=True,
            ),
        ),
    ),
    Entry("jakiro*", _jakiro_star, _is_jakiro_star, setting="jakiro"),
    Entry(
        "jakiro",
        _jakiro,
        _is_jakiro,
        title="Jakiro",
        what="a Jakiro head: experts, and a contrast that predicts one token further",
        figures=Figures((4.96,), GPU, "Jakiro paper, Table 1: Vicuna 7B"),
        options=(
            Option("--experts", "Experts, of which two run.", "count", least=2, most=4, default=2),
            Option(
                "--contrast",
                "The second prediction, for the tree's last level.",
                "flag",
                default=True,
                rare=True,
            ),
            Option(
                "--contrast-weight",
                "Of its feature loss: 0.5 in Jakiro's code, 1.0 in its paper.  [default: 0.5]",
                "weight",
                rare=True,
                recipe="contrast_feature",
            ),
        ),
    ),
    Entry(
        "eagle3",
        _eagle3,
        _is_eagle3,
        title="EAGLE-3",
        what="an EAGLE-3 head: three residual streams, one layer, an output head of its own",
        figures=Figures((6.15,), GPU, "HeteroSpec paper, Table 1: EAGLE-3 with Llama-3.1 8B"),
        options=(
            Option(
                "--draft-vocabulary",
                "How many of the most frequent tokens it can propose.  [default: all]",
                "count",
                least=2,
            ),
        ),
    ),
    Entry(
        "eagle",
        _eagle,
        _is_eagle,
        title="EAGLE-1/2",
        what="an EAGLE-1/2 head: embedding and last hidden state through one decoder layer",
        figures=Figures((3.95,), SERVER, "Dovetail paper, Table 6: EAGLE-2 with Llama-2 7B"),
    ),
)
"""All kinds of heads. A checkpoint is of the first kind that recognises its tensors, and so is the
name in its config.json: the more particular of two kinds stands first."""
KINDS: Mapping[str, Entry] = {entry.name: entry for entry in ENTRIES}


def kind_of_head(name: str) -> "HeadKind":
    """Return the kind of that name."""
    return KINDS[name].load()


def trained_kind(name: str) -> "TrainedKind":
    """Return the kind of that name, which can be trained."""
    from dovetail.workers.heads.kind import TrainedKind

    kind = kind_of_head(name)
    assert isinstance(kind, TrainedKind)
    return kind


def kind_of_tensors(shapes: Shapes) -> str | None:
    """Return the kind of head that tensors of these names and shapes are; None: no head, such as an
    ordinary language model."""
    found = {plain_name(name): shape for name, shape in shapes.items()}
    return next((entry.name for entry in ENTRIES if entry.recognises(found)), None)


def kind_of_architecture(named: str) -> str | None:
    """Return the kind of head that the `architectures` of a config.json name."""
    return next((entry.name for entry in ENTRIES if entry.name in named.lower()), None)


def setting_of(kind: str) -> str:
    """Return what `draft.kind` calls a kind of head."""
    return KINDS[kind].setting or kind


def titles() -> str:
    """Return the names that the papers give the kinds, as a list in words."""
    return ", ".join(KINDS[kind].title for kind in HEAD_KINDS)
