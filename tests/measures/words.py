"""Measures the English of a checkout: private words in its code, and the length of its pages.

    python tests/measures/words.py [CHECKOUT] [--sample 100 --seed 1]

Docstrings, comments and string literals of the four folders are searched for the words of
`PRIVATE`, which processes do not do and the field does not use. `--sample` prints that many
sentences at random instead, of docstrings, comments, outputs and pages, for a person to read.
"""

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "protocol", "runtime", "workers", "launch"
PRIVATE = (
    "told|tells?|telling|said|says?|saying|hears?|heard|anew|beside|nobody|somebody"
    "|so many|once more|of its own|of their own|for fear"
)
WORD = re.compile(rf"\b({PRIVATE})\b", re.IGNORECASE)
BRACES = re.compile(r"\{[^{}]*\}")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NO_PAGES = "ATTRIBUTION.md", "MESSAGES.md", "RESULTS.md", "FLEET.md"
"""Licences, a generated reference, and logs of measurements."""
MOST_WORDS = 35  # of a sentence of a page


def texts(source: str) -> Iterator[str]:
    """Docstrings, comments and string literals of a file, white space joined."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING") or "FSTRING" in kind:
            yield " ".join(BRACES.sub("{}", token.string).split())


def private(source: str) -> Counter[str]:
    """How often a file uses each private word."""
    if not WORD.search(" ".join(source.split())):
        return Counter()
    return Counter(word.lower() for text in texts(source) for word in WORD.findall(text))


def counts(checkout: Path, folder: str) -> tuple[Counter[str], int]:
    """The private words of a folder, and its lines."""
    found: Counter[str] = Counter()
    lines = 0
    for path in sorted((checkout / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found += private(source)
        lines += source.count("\n")
    return found, lines


def pages(checkout: Path) -> list[Path]:
    """The pages that people read from start to end, without those about embedded models."""
    return sorted(
        path
        for path in checkout.rglob("*.md")
        if path.name not in NO_PAGES
        and not {"demo", "build"} & set(path.relative_to(checkout).parts)
        and not any(part.startswith(".") for part in path.relative_to(checkout).parts)
    )


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def sentences(text: str) -> list[str]:
    """The sentences of a page: of paragraphs, list items and cells of tables."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|^#.*$", prose(text), flags=re.M):
        cells = (
            re.split(r" \| |^\||\|$", block, flags=re.M) if block.strip()[:1] == "|" else [block]
        )
        for cell in cells:
            joined = re.sub(r"\]\([^)]*\)|[\[\]]", "", " ".join(cell.split()))
            found += [s for s in re.split(r"(?<=[.?!])[*)]* ", joined) if s]
    return found


def long_sentences(text: str) -> list[str]:
    """The sentences of a page that are too long; a list of names in code counts as one word."""
    listed = re.sub(r"`[^`]*`(?:,\s+(?:and\s+)?`[^`]*`)+", "`...`", text)
    return [one for one in sentences(listed) if len(one.split()) > MOST_WORDS]


def spoken(source: str) -> Iterator[tuple[str, str]]:
    """Sentences of a file's docstrings, comments and outputs: (docstring or output, sentence)."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string.split()) > 5:
            yield "docstring", token.string
    tree = ast.parse(source)
    documented = {
        id(getattr(first, "value", None))
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for first in node.body[:1]
    }
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{...}"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in inside:
                continue
            text = node.value
        else:
            continue
        kind = "docstring" if id(node) in documented | bare else "output"
        joined = " ".join(text.split())
        for one in re.split(r"(?<=[.?!]) (?=[A-Z`])", joined):
            if len(one.split()) >= 5:
                yield kind, one


def sample(checkout: Path, wanted: int, seed: int) -> list[tuple[str, str]]:
    """Sentences at random: half of docstrings, a quarter each of outputs and of pages."""
    kinds: dict[str, list[tuple[str, str]]] = {"docstring": [], "output": [], "page": []}
    for folder in FOLDERS:
        for path in sorted((checkout / folder).rglob("*.py")):
            for kind, one in spoken(path.read_text(encoding="utf-8")):
                kinds[kind].append((str(path.relative_to(checkout)), one))
    for path in pages(checkout):
        for one in sentences(path.read_text(encoding="utf-8")):
            if len(one.split()) >= 5:
                kinds["page"].append((str(path.relative_to(checkout)), one))
    chance = random.Random(seed)
    return [
        *chance.sample(kinds["docstring"], wanted - 2 * (wanted // 4)),
        *chance.sample(kinds["output"], wanted // 4),
        *chance.sample(kinds["page"], wanted // 4),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the English of a checkout.")
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--sample", type=int, help="Print this many sentences at random.")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    say = sys.stdout.write
    if given.sample:
        for number, (path, one) in enumerate(sample(given.checkout, given.sample, given.seed), 1):
            say(f"{number:3} {path}: {one}\n")
        return
    say(f"{'':10}{'words':>7}{'a 1,000 lines':>15}  most frequent\n")
    for folder in FOLDERS:
        found, lines = counts(given.checkout, folder)
        most = ", ".join(f"{word} {count}" for word, count in found.most_common(8))
        say(f"{folder:10}{found.total():7}{found.total() / lines * 1000:15.1f}  {most}\n")
    say("\npage, words, sentences of more than 35 words\n")
    for page in pages(given.checkout):
        text = page.read_text(encoding="utf-8")
        say(
            f"{page.relative_to(given.checkout)!s:44}{len(text.split()):7}{len(long_sentences(text)):5}\n"
        )


if __name__ == "__main__":
    main()
