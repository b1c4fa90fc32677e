"""Write the questions that the embedded target answers for its draft heads: python
tests/demo_recipe questions --documents N --corpus FOLDER --from-corpus N --out FILE.jsonl.

A line is {"turns": [question], "source": ...}; `dovetail features --regenerate` lets the target
answer them. Half of them are the generator's, of the kinds that the target was trained on; the
others are a corpus's (zstandard-compressed JSON lines with a "prompt"), since a draft is asked
about everything. Sources take turns, so that those with many templated lines do not outnumber the
rest. Knows no tokens. (A corpus needs zstandard.)
"""

import argparse
import io
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from demo_recipe.text import documents

Question = dict[str, object]
SHORTEST, LONGEST = 10, 900
"""Characters: a question and its answer have to fit into 512 tokens."""


def generated(count: int, seed: int) -> Iterator[Question]:
    """The first turns of so many generated documents."""
    for document in documents(count, seed):
        if "turns" in document:
            yield {"turns": document["turns"][:1], "source": f"generated: {document['kind']}"}


def from_corpus(folder: Path, count: int, rng: random.Random) -> list[Question]:
    """Return so many prompts of a corpus, its sources taking turns until they are used up."""
    waiting: dict[str, list[Question]] = defaultdict(list)
    for file in sorted(folder.glob("*.jsonl.zst")):
        if file.name != "val.jsonl.zst":
            for row in _rows(file):
                if SHORTEST < len(row.get("prompt", "")) < LONGEST:
                    waiting[row["source"]].append(
                        {"turns": [row["prompt"]], "source": row["source"]}
                    )
    for rows in waiting.values():
        rng.shuffle(rows)
    taken: list[Question] = []
    while len(taken) < count and (left := [rows for rows in waiting.values() if rows]):
        taken += [rows.pop() for rows in left]
    return taken[:count]


def _rows(file: Path) -> Iterator[dict[str, str]]:
    import zstandard

    with file.open("rb") as content:
        for line in io.TextIOWrapper(
            zstandard.ZstdDecompressor().stream_reader(content), encoding="utf-8"
        ):
            yield json.loads(line)


def write(rows: Sequence[Question], out: Path) -> None:
    """One line a question."""
    out.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10000)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--from-corpus", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    rows = list(generated(args.documents, args.seed))
    if args.corpus is not None:
        rows += from_corpus(args.corpus, args.from_corpus, rng)
    rng.shuffle(rows)
    write(rows, args.out)
