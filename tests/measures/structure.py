"""Measures the structure of a checkout: lines, files, rooms, circles, functions.

    python tests/measures/structure.py [CHECKOUT]

Of each of the four folders and the tests: Python lines as they stand, files, the largest file, the
most entries of a folder, and the lengths of functions in lines: median, 90th percentile, longest.
Then the circles of files that import each other, imports inside functions counted.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "protocol", "runtime", "workers", "launch", "tests"
PRODUCT = FOLDERS[:-1]
PACKAGE = "dovetail."


def functions(tree: ast.Module) -> Iterator[int]:
    """Lengths in lines of all functions, those within others too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of the modules, or of what may be one, that a file imports from the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The groups of files of which each reaches every other one (Tarjan, 1972)."""
    order: dict[str, int] = {}
    least: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(file: str) -> None:
        order[file] = least[file] = len(order)
        path.append(file)
        for other in arrows[file]:
            if other not in order:
                visit(other)
            if other in path:
                least[file] = min(least[file], least[other])
        if least[file] == order[file]:
            group = path[path.index(file) :]
            del path[path.index(file) :]
            if len(group) > 1:
                found.append(sorted(group))

    for file in arrows:
        if file not in order:
            visit(file)
    return found


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    say = sys.stdout.write
    say(f"{'':10}{'lines':>8}{'files':>7}{'largest':>9}{'entries':>9}  functions\n")
    trees: dict[str, ast.Module] = {}
    for folder in FOLDERS:
        files = sorted((checkout / folder).rglob("*.py"))
        texts = {file: file.read_text(encoding="utf-8") for file in files}
        lines = {file: len(text.splitlines()) for file, text in texts.items()}
        read = {file: ast.parse(text) for file, text in texts.items()}
        lengths = sorted(length for tree in read.values() for length in functions(tree))
        rooms = {file.parent for file in files}
        entries = max(
            sum(1 for entry in room.iterdir() if entry.suffix == ".py" or entry in rooms)
            for room in rooms
        )
        most = f"{statistics.median(lengths):.0f} / {lengths[len(lengths) * 9 // 10]}"
        say(f"{folder:10}{sum(lines.values()):8}{len(files):7}{max(lines.values()):9}{entries:9}")
        say(f"  {most} / {lengths[-1]}\n")
        if folder in PRODUCT:
            trees |= {
                PACKAGE + ".".join(file.relative_to(checkout).with_suffix("").parts): tree
                for file, tree in read.items()
            }
    arrows = {
        file: {name for name in imported(tree) if name in trees} for file, tree in trees.items()
    }
    found = circles(arrows)
    say(f"circles of files: {len(found)}\n")
    for group in found:
        say(f"  {', '.join(group)}\n")


if __name__ == "__main__":
    main()
