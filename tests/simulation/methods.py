"""Which trees are played: a policy with its sizes, and whether it drafts ahead; one, or a sweep
over one of its sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.launch.bench.methods import tree_of
from dovetail.launch.planning.acceptance import About
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import Configuration, parse_setting
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import MAX_GAMMA, TreeSettings
from dovetail.protocol.settings.tree import POLICIES


@dataclass(frozen=True)
class Method:
    """A tree as a session asks for it; `ahead` None: where it pays."""

    name: str
    tree: TreeSettings
    ahead: bool | None

    def named(self, name: str, **changes: object) -> "Method":
        return Method(name, TreeSettings(**{**self.tree.model_dump(), **changes}), self.ahead)

    def with_ahead(self, ahead: bool) -> "Method":
        return Method(self.name, self.tree, ahead)


def read_methods(base: Configuration, texts: Sequence[str], about: About) -> list[Method]:
    """Return what "POLICY,SETTING=VALUE,..." name over the settings of the run, which stand alone
    where none is named; `UserError` says what is wrong with one."""
    if len(set(texts)) < len(texts):
        raise UserError("a --method is named twice: give each once")
    return [read_method(base, text, about) for text in texts or (base.settings.tree.policy,)]


def read_method(base: Configuration, text: str, about: About) -> Method:
    """One of them. Scores are the recording's, so its sharpening is taken; thresholds that hold for
    a sharpening found online are taken for it too."""
    if base.settings.tree.sharpening != "auto":
        raise UserError(f"tree.sharpening: {_recorded(about)}")
    head, *parts = text.split(",")
    if head not in POLICIES:
        raise UserError(
            f"--method {head!r} is not a tree policy: choose {', '.join(POLICIES)}, with settings "
            "behind it such as gamma=59 or ahead=false"
        )
    values: dict[str, object] = dict(tree_of(head))
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(
                f"--method {text}: {part!r} is not a setting: write NAME=VALUE, such as gamma=6"
            )
        name = name if "." in name else _full_name(name)
        if name == "tree.sharpening":
            raise UserError(f"--method {text}: {_recorded(about)}")
        values[name] = parse_setting(name, value, f"--method {text}")
    settings = base.over(f"--method {text}", values).settings
    if settings.tree.width > about.width:
        raise UserError(
            f"--method {text}: {about.width} children of a node were recorded: set tree.width to "
            "at most that, or record again with --children"
        )
    tree = settings.tree.model_copy(update={"sharpening": about.sharpening})
    return Method(text, tree, None if settings.draft.ahead == "auto" else settings.draft.ahead)


def _recorded(about: About) -> str:
    return (
        f"the scores were recorded with a sharpening of {about.sharpening:g}: leave it out, or "
        "record again"
    )


def vary(method: Method, size: str, value: int) -> Method:
    """The method with another gamma or depth; a beam of more levels offers more nodes."""
    name = f"{method.name},{size}={value}"
    if size == "depth" and method.tree.traits.full_levels:
        return method.named(name, depth=value, gamma=min(MAX_GAMMA, value * method.tree.width))
    return method.named(name, **{size: value})


def _full_name(name: str) -> str:
    """Return the setting's name with its section: draft for `ahead`, else tree."""
    return next(
        (full for full in (f"tree.{name}", f"draft.{name}") if full in SETTINGS), f"tree.{name}"
    )
