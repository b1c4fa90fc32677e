"""The table of head kinds: found by their name in the settings, in a checkpoint, or in a
config.json."""

from dovetail.protocol.settings import HEAD_KINDS
from dovetail.workers.heads.block.dflash import DFLASH
from dovetail.workers.heads.block.dflash2 import DFLASH2
from dovetail.workers.heads.block.dspark import DSPARK
from dovetail.workers.heads.block.peagle import PEAGLE
from dovetail.workers.heads.dovetail import DOVETAIL
from dovetail.workers.heads.eagle import EAGLE
from dovetail.workers.heads.eagle3 import EAGLE3
from dovetail.workers.heads.jakiro import JAKIRO, JAKIRO_STAR
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.mtp.kind import MTP
from dovetail.workers.heads.spec import Shapes, plain_name

KINDS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        *(DOVETAIL, JAKIRO_STAR, JAKIRO, DFLASH2, DSPARK, DFLASH, PEAGLE, EAGLE3, EAGLE, MTP),
    )
}
"""All kinds of heads. The first one that recognises a checkpoint's tensors, or the name in its
config.json, is taken, so the more specific of two kinds comes first."""


def kind_of_tensors(shapes: Shapes) -> HeadKind | None:
    """Return the kind of head with tensors of these names and shapes; None: not a head."""
    found = {plain_name(name): shape for name, shape in shapes.items()}
    return next((kind for kind in KINDS.values() if kind.recognises(found)), None)


def kind_of_architecture(named: str) -> str | None:
    """Return the kind of head that the `architectures` of a config.json name."""
    return next((name for name in KINDS if name in named.lower()), None)


def setting_of(kind: str) -> str:
    """Return a kind's name in `draft.kind`."""
    return KINDS[kind].setting or kind


def titles() -> str:
    """Return the kinds' names in their papers, as a list in words."""
    return ", ".join(KINDS[kind].title for kind in HEAD_KINDS)
