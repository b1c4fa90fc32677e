"""The last round's tree of nodes, drawn as branches."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from dovetail.launch.console.cells import Picture

MARKS = {
    "a": ("✓", "accepted", "bold green"),
    "r": ("✗", "rejected", "red"),
    "n": ("·", "not verified", "dim"),
    "b": ("★", "bonus", "bold magenta"),
}


def tree_lines(tree: Picture | None) -> Iterator[RenderableType]:
    if tree is None:
        yield Text("no recent round")
        return
    hit = ", a hit" if tree["hit"] else ""
    counts = (
        f"{tree['offered']} nodes offered, {tree['verified']} verified, {tree['accepted']} "
        f"accepted{hit}"
        if tree["offered"]
        else "nothing was drafted"
    )
    yield Text.assemble(
        ("tree ", "bold"), f"of session {tree['session']}, round {tree['round']}: {counts}"
    )
    yield Text(
        "  ".join(f"{mark} {word}" for mark, word, _ in MARKS.values())
        + "   number: rank, best first"
    )
    yield Text.assemble("● ", (tree["root"] or "root", "bold"))
    yield from _branches(tree)


def _branches(tree: Picture) -> Iterator[Text]:
    """A line for each node, below its parent; the bonus before its siblings."""
    bonus = len(tree["parents"])
    below: dict[int, list[int]] = {tree["bonus_parent"]: [bonus]}
    for node, parent in enumerate(tree["parents"]):
        below.setdefault(parent, []).append(node)
    waiting = [(node, "", place == 0) for place, node in enumerate(reversed(below.get(-1, [])))]
    while waiting:
        node, before, last = waiting.pop()
        yield Text.assemble(
            (before + ("└─ " if last else "├─ "), "dim"),
            _node(tree, node, bonus),
            no_wrap=True,
            overflow="ellipsis",
        )
        inner = before + ("   " if last else "│  ")
        waiting += [
            (child, inner, place == 0) for place, child in enumerate(reversed(below.get(node, [])))
        ]


def _node(tree: Picture, node: int, bonus: int) -> Text:
    kind = "b" if node == bonus else tree["fates"][node]
    mark, _, style = MARKS[kind]
    text = (
        tree["bonus"]
        if node == bonus
        else tree["texts"][node]
        if tree["texts"] is not None
        else None
    )
    rank = "" if node == bonus else f"{node + 1} "
    likely = "" if node == bonus else f"  {100 * tree['likely'][node]:.0f} %"
    return Text.assemble((f"{mark} {rank}", style), (text or "", style), (likely, "dim"))
