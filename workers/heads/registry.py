"""The table of head kinds: found by the name that a kind has in the settings, in a checkpoint, or
in a config.json."""

from dovetail.protocol.settings import HEAD_KINDS
from dovetail.workers.heads.dovetail import DOVETAIL
from dovetail.workers.heads.eagle import EAGLE
from dovetail.workers.heads.eagle3 import EAGLE3
from dovetail.workers.heads.jakiro import JAKIRO, JAKIRO_STAR
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.spec import Shapes, plain_name

KINDS: dict[str, HeadKind] = {
    kind.name: kind for kind in (DOVETAIL, JAKIRO_STAR, JAKIRO, EAGLE3, EAGLE)
}
"""All kinds of heads. A checkpoint is of the first kind that recognises its tensors, and so is the
name in its config.json: the more particular of two kinds comes first."""


def kind_of_tensors(shapes: Shapes) -> HeadKind | None:
    """Return the kind of head that tensors of these names and shapes are; None: no head, such as an
    ordinary language model."""
    found = {plain_name(name): shape for name, shape in shapes.items()}
    return next((kind for kind in KINDS.values() if kind.recognises(found)), None)


def kind_of_architecture(named: str) -> str | None:
    """Return the kind of head that the `architectures` of a config.json name."""
    return next((name for name in KINDS if name in named.lower()), None)


def setting_of(kind: str) -> str:
    """Return what `draft.kind` calls a kind of head."""
    return KINDS[kind].setting or kind


def titles() -> str:
    """Return the names that the papers give the kinds, as a list in words."""
    return ", ".join(KINDS[kind].title for kind in HEAD_KINDS)
